"""Which vocabularies in use fit each other, and how those that don't line up on text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.core.vocabulary import Vocabulary
from paceline.engines.llama_cpp.draft_check import explain_refusal
from paceline.engines.llama_cpp.loading import open_vocabulary
from paceline.lab.vocabulary_fit import align_tokenizers
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.vocabularies.relation import false_ends, relate_vocabularies
from tests.chat.conversing import vocabulary_alone
from tests.proofs import LINES

AS_IS = {("phi-3", "llama-spm"), ("gpt-neox", "mpt"), ("qwen2", "qwen35")}


@pytest.fixture(scope="module")
def vocabularies(models: Path, smollm2: Path) -> Iterator[dict[str, Vocabulary]]:
    with ExitStack() as stack:
        found = {
            file.stem.removeprefix("ggml-vocab-"): stack.enter_context(vocabulary_alone(file))
            for file in sorted(models.glob("ggml-vocab-*.gguf"))
        }
        found["smollm2"] = stack.enter_context(open_vocabulary(smollm2))
        assert len(found) == 20
        yield found


def test_relatives_fit_and_no_others_do(vocabularies: dict[str, Vocabulary]) -> None:
    """StarCoder and SmolLM2 have as many ids, both "bpe"; Qwen3.5's test vocabulary is Qwen2's."""
    fits = {
        (target, draft): relation.fit
        for target, ours in vocabularies.items()
        for draft, theirs in vocabularies.items()
        if target != draft and (relation := relate_vocabularies(ours, theirs)).fits
    }
    assert fits == {pair: "as is" for pairs in (AS_IS, {(b, a) for a, b in AS_IS}) for pair in pairs}
    LINES.append(f"relations: {len(fits)} of {20 * 19} pairs of vocabularies fit")


def test_the_size_says_nothing(vocabularies: dict[str, Vocabulary]) -> None:
    relation = relate_vocabularies(vocabularies["smollm2"], vocabularies["starcoder"])
    assert vocabularies["smollm2"].size == vocabularies["starcoder"].size
    assert relation.fit == "none"
    assert relation.num_differing > 49_000


def test_gemmas_fit_but_for_ids_of_no_text(vocabularies: dict[str, Vocabulary], gemma: Path) -> None:
    with open_vocabulary(gemma) as gemma_3:
        for target, draft in ((gemma_3, vocabularies["gemma-4"]), (vocabularies["gemma-4"], gemma_3)):
            relation = relate_vocabularies(target, draft)
            assert relation.fit == "but unused"
            assert 6_000 < relation.num_unused == relation.num_differing < 6_300
            assert {difference.token_id for difference in relation.control} == {105, 106}, "they open and close turns"
        assert false_ends(gemma_3) == {212: b"</s>"}


def test_ends_that_are_text(vocabularies: dict[str, Vocabulary]) -> None:
    found = {name: false_ends(vocabulary) for name, vocabulary in vocabularies.items()}
    assert {name: ends for name, ends in found.items() if ends} == {
        "phi-3": {2: b"</s>"},
        "qwen2": {128247: b"</s>"},
        "qwen35": {128247: b"</s>"},
    }


@pytest.mark.parametrize(
    ("target", "draft", "one", "ends"),
    [
        ("llama-bpe", "qwen2", (0.90, 0.94), (0.995, 1.0)),
        ("qwen2", "smollm2", (0.74, 0.80), (0.92, 0.95)),
        ("phi-3", "llama-spm", (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_others_line_up_on_text(
    vocabularies: dict[str, Vocabulary],
    target: str,
    draft: str,
    one: tuple[float, float],
    ends: tuple[float, float],
) -> None:
    texts = {kind: heldout(kind)[:12] for kind in HELDOUT_KINDS}
    alignment = align_tokenizers(vocabularies[target], vocabularies[draft], texts)
    assert alignment.left_out == 0
    all_ends = alignment.ends["all"].value
    assert alignment.one_share is not None
    assert all_ends is not None
    assert one[0] <= alignment.one_share <= one[1]
    assert ends[0] <= all_ends <= ends[1]


@pytest.mark.parametrize(
    ("target", "draft", "says"),
    [
        ("gpt-neox", "mpt", None),
        ("qwen2", "qwen35", None),
        ("phi-3", "llama-spm", None),
        ("gemma-4", "gemma-3", "the tokenizers are of two kinds"),
        ("smollm2", "starcoder", "id 5 is spelled otherwise"),
        ("llama-bpe", "qwen2", "the target begins every text with a token of its own"),
        ("qwen2", "smollm2", "the target has 151936 ids and the draft 49152"),
    ],
)
def test_llama_cpp_s_own_check(
    models: Path, smollm2: Path, request: pytest.FixtureRequest, target: str, draft: str, says: str | None
) -> None:
    def path_of(name: str) -> Path:
        if name == "smollm2":
            return smollm2
        if name == "gemma-3":
            found: Path = request.getfixturevalue("gemma")
            return found
        return models / f"ggml-vocab-{name}.gguf"

    why = explain_refusal(path_of(target), path_of(draft))
    assert why is None if says is None else why is not None and why.startswith(says), why
