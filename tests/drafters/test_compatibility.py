"""Which vocabularies pair up, and what is said of those that don't."""

from __future__ import annotations

import re

import pytest

from paceline.core.errors import VocabularyMismatchError
from paceline.drafters.compatibility import MAX_PADDING, check_vocabularies
from paceline.engines.scripted import ScriptedVocabulary

PIECES = [bytes([97 + i % 26]) * (1 + i // 26) for i in range(200)]


def test_padding_and_ends_of_answers_may_differ() -> None:
    target = ScriptedVocabulary([*PIECES, b""], kind="bpe")
    check_vocabularies(target, ScriptedVocabulary(PIECES, kind="bpe"))
    check_vocabularies(ScriptedVocabulary(PIECES, kind="bpe"), target)
    check_vocabularies(target, ScriptedVocabulary([*PIECES, b"</s>"], end_ids=[200], kind="bpe"))


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (ScriptedVocabulary(PIECES, kind="spm"), "the target's tokenizer is bpe, the draft's spm"),
        (ScriptedVocabulary(PIECES[: 200 - MAX_PADDING - 1], kind="bpe"), "the target has 200 tokens, the draft 71"),
        (
            ScriptedVocabulary([*PIECES[:150], b"other", *PIECES[151:]], kind="bpe"),
            "token 150 is 'uuuuuu' to the target and 'other' to the draft",
        ),
    ],
)
def test_a_mismatch_names_type_size_or_first_differing_token(draft: ScriptedVocabulary, says: str) -> None:
    with pytest.raises(VocabularyMismatchError, match=re.escape(says)) as caught:
        check_vocabularies(ScriptedVocabulary(PIECES, kind="bpe"), draft)
    assert "--drafters suffix" in str(caught.value)
