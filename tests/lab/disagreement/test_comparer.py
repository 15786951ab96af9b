"""Comparing the embedded models: with themselves, each other, and through the draft's own tokens."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest

from paceline.core.errors import CapabilityError, InputError
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.lab.comparison import Stopped
from paceline.lab.disagreement.comparer import AsItIs, Disagreement, OwnAnswers, compare_models
from paceline.lab.intervals import ALL
from paceline.lab.samples import heldout_samples
from paceline.models.embedded import embedded_draft, embedded_target, heldout
from tests.engines.tiny_models import write_block_head, write_eagle_head, write_model

TARGET = ModelOptions(embedded_target(), context_length=256, threads=1, flash_attention=True)
DRAFT = DraftOptions(path=embedded_draft()).beside(TARGET)
ANSWERS = OwnAnswers(heldout_samples(), 2, 20, keep=False)
TEXT = AsItIs("some.txt", "\n".join(heldout("code")[:4])[:1500], 64)


@functools.cache
def on_answers() -> Disagreement:
    return compare_models(TARGET, DRAFT, ANSWERS, temperature=0.8)


@functools.cache
def on_text() -> Disagreement:
    return compare_models(TARGET, DRAFT, TEXT, temperature=0.8)


def test_a_model_agrees_with_itself_everywhere() -> None:
    found = compare_models(TARGET, DraftOptions(path=embedded_target()).beside(TARGET), ANSWERS, temperature=0.8)
    for text in found.texts:
        for token in text.tokens:
            # Passes of other widths round otherwise.
            assert token.overlap > 0.98
            assert token.divergence is not None
            assert token.divergence.kld < 1e-3
    assert found.survival[ALL][0].survival == 1.0


def test_answers_are_compared_from_their_first_token() -> None:
    found = on_answers()
    assert found.is_whole
    assert [text.kind for text in found.texts] == ["code", "prose"]
    assert all(len(text.tokens) == 20 for text in found.texts)
    assert 0.2 < sum(token.overlap for text in found.texts for token in text.tokens) / 40 < 0.95
    # Every token of an answer is a first draft token, and each of its chains is as deep as the answer goes on.
    first = found.survival[ALL][0].accepted
    assert first.trials == 40
    assert set(found.spellings) >= {token.token_id for text in found.texts for token in text.tokens}


def test_what_is_recorded_agrees_with_what_is_read() -> None:
    """A chain's first token is right as often as the closed form says, within its own error."""
    found = on_answers()
    coupled = sum(token.coupled for text in found.texts for token in text.tokens) / 40
    counted = found.survival[ALL][0].survival
    assert counted is not None
    # Three standard deviations of a share of 40.
    assert abs(counted - coupled) < 3 * (0.25 / 40) ** 0.5


def test_windows_of_a_text_are_compared_in_their_second_halves() -> None:
    found = on_text()
    assert len(found.texts) > 2
    assert {len(text.tokens) for text in found.texts} == {64 - 64 // 2 - 1}
    assert {len(text.prompt_ids) for text in found.texts} == {64 // 2 + 1}
    assert found.survival == {}


def test_a_translated_draft_is_compared_by_the_rows_that_it_proposes_by() -> None:
    translated = compare_models(TARGET, dataclasses.replace(DRAFT, draft_vocab="translate"), ANSWERS, temperature=0.8)
    plain = on_answers()
    for ours, theirs in zip(plain.texts, translated.texts, strict=True):
        assert [token.token_id for token in ours.tokens] == [token.token_id for token in theirs.tokens]
        assert all(token.divergence is None for token in theirs.tokens)
        # Of the same tokens translating changes nothing but where a word is healed.
        same = sum(abs(a.overlap - b.overlap) < 0.02 for a, b in zip(ours.tokens, theirs.tokens, strict=True))
        assert same >= 0.6 * len(ours.tokens)


def test_a_translated_draft_reads_a_text_as_it_is_too() -> None:
    text = dataclasses.replace(TEXT, text=TEXT.text[:400])
    found = compare_models(TARGET, dataclasses.replace(DRAFT, draft_vocab="translate"), text, temperature=0.8)
    assert sum(token.overlap > 0.0 for text in found.texts for token in text.tokens) > 10


@pytest.mark.parametrize("source", [ANSWERS, AsItIs("some.txt", "some words " * 40, 64)], ids=["answers", "as it is"])
def test_a_head_is_compared_by_the_rows_that_it_proposes_by(source: OwnAnswers | AsItIs, tmp_path: Path) -> None:
    target = ModelOptions(
        write_model(tmp_path / "target.gguf", "llama", tokenizer="bytes", layers=4), context_length=256, threads=1
    )
    head = write_eagle_head(tmp_path / "head.gguf", 32)
    found = compare_models(target, DraftOptions(path=head).beside(target), source, temperature=0.8)
    tokens = [token for text in found.texts for token in text.tokens]
    assert len(tokens) >= 40
    assert all(token.draft_tops and token.divergence for token in tokens)


def test_a_head_of_blocks_is_refused(tmp_path: Path) -> None:
    target = ModelOptions(
        write_model(tmp_path / "target.gguf", "llama", tokenizer="bytes", layers=4), context_length=256, threads=1
    )
    head = write_block_head(tmp_path / "head.gguf", 32)
    with pytest.raises(CapabilityError, match="drafts blocks"):
        compare_models(target, DraftOptions(path=head).beside(target), ANSWERS, temperature=0.8)


@pytest.mark.parametrize(
    "text", [AsItIs("short.txt", "short", 64), AsItIs("some.txt", TEXT.text, 512)], ids=["too short", "too wide"]
)
def test_windows_that_cannot_be_are_refused(text: AsItIs) -> None:
    with pytest.raises(InputError, match="--window"):
        compare_models(TARGET, DRAFT, text, temperature=0.8)


def test_a_user_who_has_seen_enough_gets_what_there_is() -> None:
    said: list[str] = []

    def stopped() -> bool:
        return said.count("comparing what both would say") > 1

    found = compare_models(
        TARGET, DRAFT, TEXT, temperature=0.8, stopped=stopped, tell=lambda doing, _: said.append(doing)
    )
    assert not found.is_whole
    assert [text.tokens for text in found.texts] == [on_text().texts[0].tokens]
    with pytest.raises(Stopped):
        compare_models(TARGET, DRAFT, TEXT, temperature=0.8, stopped=lambda: True)
