"""Which vocabularies pair up, and what is said of those that don't."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import VocabularyMismatchError
from paceline.engines.scripted import ScriptedVocabulary
from paceline.vocabularies.relation import (
    NUM_EXAMPLES,
    TokenDifference,
    VocabularyRelation,
    check_vocabularies,
    relate_vocabularies,
)

PIECES = [bytes([97 + i % 26]) * (1 + i // 26) for i in range(200)]
PADDING = b""


def relate(target: Sequence[bytes], draft: Sequence[bytes]) -> VocabularyRelation:
    return relate_vocabularies(ScriptedVocabulary(target), ScriptedVocabulary(draft))


def test_one_vocabulary_shares_everything_with_itself() -> None:
    relation = relate(PIECES, PIECES)
    assert (relation.num_same, relation.num_differing, relation.differing_share) == (200, 0, 0.0)
    assert (relation.num_target_only, relation.num_draft_only) == (0, 0)
    assert (relation.examples, relation.unshared_ids) == ((), ())
    assert relation.fits


def test_widths_padded_to_whatever_suits_a_machine_are_one_vocabulary() -> None:
    """GPT-NeoX's tokens come in rows of 50,304, 50,432 and 50,688 logits."""
    padded = [*PIECES, *[PADDING] * 300]
    for target, draft, unshared in ((PIECES, padded, range(200, 500)), (padded, PIECES, ())):
        relation = relate(target, draft)
        assert (relation.num_same, relation.num_differing) == (200, 0)
        assert (relation.num_target_only, relation.num_draft_only) == (0, 0)
        assert relation.unshared_ids == tuple(unshared)
        assert relation.fits
    assert relate(padded, padded).unshared_ids == tuple(range(200, 500)), "padding is no token to propose"


def test_an_added_token_where_the_other_pads_is_theirs_alone() -> None:
    """As in QwQ-32B beside a Qwen2.5 draft."""
    added = [*PIECES, b"<tool_response>", b"<think>", PADDING]
    relation = relate(added, [*PIECES, PADDING])
    assert (relation.num_same, relation.num_target_only, relation.num_draft_only) == (200, 2, 0)
    assert relation.unshared_ids == (200,)
    assert relation.fits
    relation = relate([*PIECES, PADDING], added)
    assert (relation.num_same, relation.num_target_only, relation.num_draft_only) == (200, 0, 2)
    assert relation.unshared_ids == (200, 201, 202)
    assert relation.fits


def test_a_token_may_add_text_in_one_and_none_in_the_other() -> None:
    """One file calls ``<tool_call>`` a control token, its sibling a user-defined one."""
    control = ScriptedVocabulary([*PIECES, b"<tool_call>"], end_ids=[200])
    text = ScriptedVocabulary([*PIECES, b"<tool_call>"])
    for target, draft in ((control, text), (text, control)):
        relation = relate_vocabularies(target, draft)
        assert (relation.num_same, relation.unshared_ids) == (201, ())


def test_control_tokens_of_other_names_differ() -> None:
    """Neither adds a byte, so their bytes would be the same."""
    ends = [ScriptedVocabulary([*PIECES, end], end_ids=[200]) for end in (b"<|im_end|>", b"<|eot|>")]
    relation = check_vocabularies(*ends)
    assert relation.examples == (TokenDifference(200, b"<|im_end|>", b"<|eot|>"),)
    assert relation.unshared_ids == (200,)


def test_kinds_of_tokenizers_do_not_matter() -> None:
    """Gemma 3 is "spm" in GGUF and Gemma 4 "bpe", and they share 97.6 % of their tokens."""
    relation = check_vocabularies(ScriptedVocabulary(PIECES, kind="bpe"), ScriptedVocabulary(PIECES, kind="spm"))
    assert (relation.target_kind, relation.draft_kind) == ("bpe", "spm")


@given(
    target=st.lists(st.sampled_from([b"", b"a", b"b"]), max_size=9),
    draft=st.lists(st.sampled_from([b"", b"a", b"b"]), max_size=9),
)
def test_every_id_is_counted_once(target: list[bytes], draft: list[bytes]) -> None:
    relation, mirrored = relate(target, draft), relate(draft, target)
    common = relation.num_same + relation.num_differing
    assert relation.num_common == common
    assert common + relation.num_target_only == len(target) - target.count(b"")
    assert common + relation.num_draft_only == len(draft) - draft.count(b"")
    shared = [i for i, (ours, theirs) in enumerate(zip(target, draft, strict=False)) if ours == theirs != b""]
    assert relation.num_same == len(shared)
    assert sorted([*shared, *relation.unshared_ids]) == list(range(len(draft)))
    assert len(relation.examples) == min(relation.num_differing, NUM_EXAMPLES)
    assert (mirrored.num_same, mirrored.num_differing) == (relation.num_same, relation.num_differing)
    assert (mirrored.num_target_only, mirrored.num_draft_only) == (relation.num_draft_only, relation.num_target_only)
    assert mirrored.fits == relation.fits


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (
            [*PIECES[:99], *PIECES[:101]],
            "101 of the 200 token ids in use by both differ (50.50%, and 50% is the most), "
            "and token 99 is 'vvvv' to the target and 'a' to the draft",
        ),
        ([*PIECES[:50], b"\xff\n", *PIECES[:101]], r"token 50 is 'yy' to the target and '\\xff\n' to the draft"),
        ([PADDING] * 200, "they have no token id in common"),
        ([], "they have no token id in common"),
    ],
)
def test_a_mismatch_names_the_share_and_the_first_difference(draft: list[bytes], says: str) -> None:
    with pytest.raises(VocabularyMismatchError, match=re.escape(says)) as caught:
        check_vocabularies(ScriptedVocabulary(PIECES), ScriptedVocabulary(draft))
    message = str(caught.value)
    assert "--drafters suffix" in message
    assert "\n" not in message


def test_half_of_the_tokens_may_differ() -> None:
    assert check_vocabularies(
        ScriptedVocabulary(PIECES), ScriptedVocabulary([*PIECES[:100], *PIECES[:100]])
    ).differing_share == pytest.approx(0.5)
