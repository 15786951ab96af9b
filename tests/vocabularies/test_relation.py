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
    false_ends,
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
    assert relation.fit == "as is"


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
    assert "`drafters=['suffix']`" in message
    assert "\n" not in message


def test_half_of_the_tokens_may_differ() -> None:
    assert check_vocabularies(
        ScriptedVocabulary(PIECES), ScriptedVocabulary([*PIECES[:100], *PIECES[:100]])
    ).differing_share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("target", "draft", "fit", "unused"),
    [
        (b"x", b"x", "as is", 0),
        (b"<unused40>", b"<unused47>", "but unused", 1),
        (b"<|tool_call>", b"<unused42>", "but unused", 1),
        (b"<|image>", b"<start_of_image>", "but unused", 1),
        (b"<|reserved_special_token_5|>", b"<|python_tag|>", "but unused", 1),
        (b"[UNUSED_TOKEN_12]", b"<extra_id_3>", "but unused", 1),
        (b"<unused40>", b"<table>", "in part", 0),
        (b"<b>", b"<i>", "in part", 0),
        (b"[1]", b"[2]", "in part", 0),
        (b"<|", b"<", "in part", 0),
        (b"x", PADDING, "as is", 0),
    ],
)
def test_ids_of_no_text_may_differ(target: bytes, draft: bytes, fit: str, unused: int) -> None:
    """Gemma 3 and 4 differ in 6,206 ids, none of which any text is made of."""
    relation = relate([*PIECES, target], [*PIECES, draft])
    assert (relation.fit, relation.num_unused) == (fit, unused)
    mirrored = relate([*PIECES, draft], [*PIECES, target])
    assert (mirrored.fit, mirrored.num_unused) == (fit, unused)


def test_control_tokens_are_of_no_text() -> None:
    """Whatever they are spelled like; those with a meaning to both are kept to show."""
    target = ScriptedVocabulary([*PIECES, b"</s>", b"<unused1>"], end_ids=[200, 201])
    draft = ScriptedVocabulary([*PIECES, b"EOT", b"<eos>"], end_ids=[200, 201])
    relation = relate_vocabularies(target, draft)
    assert (relation.fit, relation.num_unused) == ("but unused", 2)
    assert relation.control == (TokenDifference(200, b"</s>", b"EOT"),)


def test_other_families_do_not_fit() -> None:
    assert relate(PIECES, PIECES[1:]).fit == "none"
    assert relate(PIECES, []).fit == "none"


def test_ends_that_are_text_are_named() -> None:
    """llama.cpp ends answers at Qwen2's token 128247, which its file has as text; Gemma 4's marker is meant to end."""

    class Vocabulary(ScriptedVocabulary):
        text_end_ids = frozenset([200, 201])

    assert false_ends(Vocabulary([*PIECES, b"</s>", b"<|tool_response>"])) == {200: b"</s>"}
    assert false_ends(ScriptedVocabulary(PIECES, end_ids=[3])) == {}
