"""Heads that say a block in one pass draft for a model: random ones, whose answers may have three tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.drafters.helpers import grow
from tests.engines.heads import TOKENS, check_answers, open_target
from tests.engines.tiny_models import BYTE_VOCABULARY_SIZE, MASK_ID, write_block_head, write_model
from tests.helpers import request_of

import paceline
from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, EngineError, ModelFileError
from paceline.core.params import SamplingParams
from paceline.drafters.base import DraftBudget
from paceline.drafters.head import BlockHeadDrafter
from paceline.engines.base import COMMITTED_END, Step
from paceline.planning.policies.fixed import FixedPolicy

pytest.importorskip("llama_cpp")

from paceline.engines.llama_cpp import LlamaCppEngine, open_head
from paceline.engines.llama_cpp.head_engines import BlockEngine

ROUNDING = 1e-4
LAYERS = (1, 2, 3)
WIDTH = 32
ROWS = 5
SOME = [*TOKENS, *range(100, 150)][::-1]
KINDS: dict[str, dict[str, Any]] = {
    "DFlash": {},
    "DFlash of some tokens": {"draft_ids": SOME},
    "DSpark": {"rank": 6},
    "DSpark of some tokens": {"rank": 6, "draft_ids": SOME},
    "DSpark that begins at a mask": {"rank": 6, "metadata": {"dflash.sample_from_anchor": False}},
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dflash")
    return write_model(folder / f"{request.param}.gguf", request.param, tokenizer="bytes", layers=4)


@pytest.fixture
def target(path: Path) -> Iterator[LlamaCppEngine]:
    engine = open_target(path, LAYERS)
    yield engine
    engine.close()


def open_block_head(target: LlamaCppEngine, file: Path) -> BlockEngine:
    head = open_head(target, file)
    assert isinstance(head, BlockEngine)
    return head


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_plain_decoding(
    target: LlamaCppEngine, tmp_path: Path, kind: str, temperature: float
) -> None:
    head = open_block_head(target, write_block_head(tmp_path / "head.gguf", WIDTH, **KINDS[kind]))
    check_answers(target, BlockHeadDrafter(head, target=target.vocabulary), 4, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_recurrent_model_answers_as_it_does_plainly(tmp_path: Path, temperature: float) -> None:
    target = open_target(write_model(tmp_path / "qwen35.gguf", "qwen35", tokenizer="bytes"), LAYERS)
    sections = {"dflash.rope.dimension_sections": [8, 0, 0, 0]}
    head = open_block_head(target, write_block_head(tmp_path / "head.gguf", WIDTH, metadata=sections))
    check_answers(target, BlockHeadDrafter(head, target=target.vocabulary), 4, temperature)
    target.close()


@pytest.mark.parametrize("sections", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_head_says_is_what_its_layers_compute(
    path: Path, target: LlamaCppEngine, tmp_path: Path, kind: str, sections: bool
) -> None:
    """Beside a forward in numpy, of states of anything: read in parts, blocks of two sequences, and once more."""
    options = dict(KINDS[kind])
    if sections:
        options["metadata"] = {**options.get("metadata", {}), "dflash.rope.dimension_sections": [8, 0, 0, 0]}
    file = write_block_head(tmp_path / "head.gguf", WIDTH, **options)
    head = open_block_head(target, file)
    rng = np.random.default_rng(4)
    states = rng.standard_normal((12, 3 * WIDTH)).astype(np.float32)
    sequence, other = head.open(), head.open()
    read_states(head, sequence, states[:7])
    read_states(head, other, states[:3])
    read_states(head, sequence, states[7:])
    first = 0 if kind.startswith("DSpark") and "mask" not in kind else 1
    assert head.block_size == ROWS - first
    for _ in range(2):
        blocks = head.draft_blocks([(sequence, 9), (other, 20)])
        for block, root, read in zip(blocks, (9, 20), (states, states[:3]), strict=True):
            numpy_block = Block(file, path, read, root)
            likeliest: list[int] = []
            for _ in range(head.block_size):
                row, confidence = numpy_block.row(first + len(likeliest), [root, *likeliest])
                np.testing.assert_allclose(block.logits(likeliest), row, rtol=0, atol=ROUNDING)
                said = block.confidence(likeliest)
                assert (said is None) == (confidence is None)
                if said is not None and confidence is not None:
                    assert abs(said - confidence) < ROUNDING
                likeliest.append(int(np.argmax(row)))
            # Other drafts than llama.cpp took them for.
            drafted = [TOKENS[0], likeliest[1], TOKENS[1]]
            for count in range(1, 4):
                row, confidence = numpy_block.row(first + count, [root, *drafted[:count]])
                np.testing.assert_allclose(block.logits(drafted[:count]), row, rtol=0, atol=ROUNDING)
                if confidence is not None:
                    said = block.confidence(drafted[:count])
                    assert said is not None
                    assert abs(said - confidence) < ROUNDING
    head.close()


def test_drafts_follow_the_states_of_the_layers_in_their_order(
    path: Path, target: LlamaCppEngine, tmp_path: Path
) -> None:
    file = write_block_head(tmp_path / "head.gguf", WIDTH)
    head = open_block_head(target, file)
    drafter = BlockHeadDrafter(head, target=target.vocabulary)
    text = [(7 * place + 5) % 250 + 3 for place in range(20)]
    request = request_of(text, SamplingParams(0.0), target=target)
    assert target.open() == request.sequence
    target.forward([Step(request.sequence, text[:-1], range(COMMITTED_END, 18), [])])
    target.commit(request.sequence, range(19))
    drafter.begin(request)
    (tree,) = grow(drafter, [request], DraftBudget(8))

    def first_row(states: FloatArray) -> FloatArray:
        return Block(file, path, states, text[-1]).row(1, [text[-1]])[0]

    states = target.states(request.sequence, 0, 19).copy()
    # What the drafter has had the head read lies in the first of its sequences.
    (block,) = head.draft_blocks([(0, text[-1])])
    said = block.logits([]).copy()
    assert tree.token_ids[1] == said.argmax()
    np.testing.assert_allclose(said, first_row(states), rtol=0, atol=ROUNDING)
    layers = np.split(states, 3, axis=1)
    for number, layer in enumerate(LAYERS):
        alone = open_target(path, (layer,))
        sequence = alone.open()
        alone.forward([Step(sequence, text[:-1], range(COMMITTED_END, 18), [])])
        alone.commit(sequence, range(19))
        np.testing.assert_allclose(alone.states(sequence, 0, 19), layers[number], rtol=0, atol=ROUNDING)
        alone.close()
    # Such mistakes would be seen.
    for wrong in (states[:-1], np.roll(states, 1, axis=0), np.concatenate([layers[1], layers[0], layers[2]], axis=1)):
        assert np.abs(said - first_row(wrong)).max() > 100 * ROUNDING
    drafter.close()


def read_states(head: BlockEngine, sequence: int, states: FloatArray) -> None:
    rows = len(states)
    head.forward([Step(sequence, [0] * rows, range(COMMITTED_END, rows - 1), (), states)])
    head.commit(sequence, range(rows))


class Block:
    """What a head makes of states and a root.

    Source: https://arxiv.org/abs/2602.06036, section 4, and https://arxiv.org/abs/2607.05147, section 3.
    """

    def __init__(self, path: Path, target: Path, states: FloatArray, root: int) -> None:
        gguf = pytest.importorskip("gguf")

        def read(file: Path) -> dict[str, FloatArray]:
            return {each.name: np.array(each.data) for each in gguf.GGUFReader(file).tensors}

        self.weights, of_target = read(path), read(target)
        embedding = of_target["token_embd.weight"]
        size, count, length = 16, 2, len(states)
        fused = self._norm(states.astype(np.float64) @ self.weights["fc.weight"].T, "enc.output_norm")
        hidden = embedding[[root, *[MASK_ID] * (ROWS - 1)]].astype(np.float64)

        def turn(heads: FloatArray, first: int) -> FloatArray:
            half = size // 2
            angles = (first + np.arange(len(heads)))[:, None] * 10000.0 ** (-np.arange(half) / half)
            cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
            one, two = heads[..., :half], heads[..., half:]
            turned: FloatArray = np.concatenate([one * cos - two * sin, one * sin + two * cos], -1)
            return turned

        for layer in range(2):

            def of_layer(name: str, layer: int = layer) -> FloatArray:
                return self.weights[f"blk.{layer}.{name}.weight"]

            def keys(rows: FloatArray, first: int, layer: int = layer) -> FloatArray:
                heads = (rows @ self.weights[f"blk.{layer}.attn_k.weight"].T).reshape(len(rows), 1, size)
                return turn(self._norm(heads, f"blk.{layer}.attn_k_norm"), first)

            normed = self._norm(hidden, f"blk.{layer}.attn_norm")
            queries: FloatArray = (normed @ of_layer("attn_q").T).reshape(ROWS, count, size)
            queries = turn(self._norm(queries, f"blk.{layer}.attn_q_norm"), length)
            both = np.repeat(np.concatenate([keys(fused, 0), keys(normed, length)]), count, 1)
            values = (np.concatenate([fused, normed]) @ of_layer("attn_v").T).reshape(-1, 1, size)
            scores = np.exp(np.einsum("ihd,jhd->hij", queries, both) / np.sqrt(size))
            mixed = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), np.repeat(values, count, 1))
            hidden = hidden + mixed.reshape(ROWS, -1) @ of_layer("attn_output").T
            normed = self._norm(hidden, f"blk.{layer}.ffn_norm")
            gate = normed @ of_layer("ffn_gate").T
            hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ of_layer("ffn_up").T)) @ of_layer("ffn_down").T
        self._hidden = self._norm(hidden, "output_norm")
        output = self.weights.get("output.weight", of_target.get("output.weight", embedding))
        self._logits = self._hidden @ output.T

    def row(self, row: int, before: list[int]) -> tuple[FloatArray, float | None]:
        """Return logits by the target's ids, and the confidence, behind a root and drafts."""
        logits, confidence = self._logits[row], None
        if "markov_w1.weight" in self.weights:
            adds = self.weights["markov_w1.weight"][before[-1]]
            logits = logits + self.weights["markov_w2.weight"] @ adds
            log_odds = self.weights["conf_proj.weight"][0] @ np.concatenate([self._hidden[row], adds]) + 0.3
            confidence = float(1 / (1 + np.exp(-log_odds)))
        by_id = np.full(BYTE_VOCABULARY_SIZE, -np.inf)
        by_id[self.weights.get("d2t", np.arange(BYTE_VOCABULARY_SIZE))] = logits
        return by_id, confidence

    def _norm(self, values: FloatArray, name: str) -> FloatArray:
        scale: FloatArray = self.weights[f"{name}.weight"]
        normed: FloatArray = values / np.sqrt((values * values).mean(-1, keepdims=True) + 1e-6) * scale
        return normed


def test_what_a_head_cannot_be_asked_for_is_refused(target: LlamaCppEngine, tmp_path: Path) -> None:
    """llama.cpp would say something else, or end the process."""
    head = open_block_head(target, write_block_head(tmp_path / "head.gguf", WIDTH))
    states = np.ones((2, 3 * WIDTH), np.float32)
    sequence, other = head.open(), head.open()
    with pytest.raises(ValueError, match="a block follows one or more"):
        head.draft_blocks([(sequence, 5)])
    for step in (
        Step(sequence, [0, 0], [-1, 0], []),
        Step(sequence, [0, 0], [-1, 0], [1], states),
        Step(sequence, [0, 0], [-1, -1], [], states),
        Step(sequence, [0, 0], [-1, 0], [], states[:, 1:]),
    ):
        with pytest.raises(ValueError, match=r"reads states|branches off|has states"):
            head.forward([step])
    head.forward([Step(sequence, [0, 0], [-1, 0], [], states)])
    with pytest.raises(ValueError, match="none that is pending"):
        head.draft_blocks([(sequence, 5)])
    head.commit(sequence, [0, 1])
    read_states(head, other, states)
    for roots in ([], [(sequence, 5)] * 2, [(sequence, 300)], [(sequence, 5)] * 100):
        with pytest.raises(ValueError, match=r"blocks have|one block a sequence|not in a vocabulary"):
            head.draft_blocks(roots)
    (block,) = head.draft_blocks([(sequence, 5)])
    with pytest.raises(IndexError, match="none follows 4 drafts"):
        block.logits([1, 2, 3, 4])
    before = block.logits([]).copy()
    head.draft_blocks([(other, 5)])
    with pytest.raises(EngineError, match="these logits are gone"):
        block.logits([])
    # What a block left behind would be seen by the next.
    np.testing.assert_array_equal(head.draft_blocks([(sequence, 5)])[0].logits([]), before)
    fork = head.fork(sequence)
    np.testing.assert_array_equal(head.draft_blocks([(fork, 5)])[0].logits([]), before)
    head.close()


def test_either_may_be_closed_first(path: Path, tmp_path: Path) -> None:
    target = open_target(path, LAYERS)
    head = open_block_head(target, write_block_head(tmp_path / "head.gguf", WIDTH))
    sequence = head.open()
    read_states(head, sequence, np.ones((2, 3 * WIDTH), np.float32))
    before = head.draft_blocks([(sequence, 5)])[0].logits([]).copy()
    target.close()
    np.testing.assert_array_equal(head.draft_blocks([(sequence, 5)])[0].logits([]), before)
    head.close()


@pytest.mark.parametrize("kind", ["DFlash", "DSpark"])
def test_a_head_is_known_for_what_it_is(path: Path, tmp_path: Path, kind: str) -> None:
    head = write_block_head(tmp_path / "head.gguf", WIDTH, **KINDS[kind])
    with paceline.load(path, drafters=["suffix"]) as model:
        plain = model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1, speculate=False)
    with paceline.load(path, draft=head, policy=FixedPolicy(3)) as model:
        answer = model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1)
    assert answer.text == plain.text
    assert answer.stats.num_accepted > 0
    with paceline.load(path, draft=head) as model:
        assert model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1).text == plain.text
    with pytest.raises(ModelFileError, match="a head that drafts for a model"):
        paceline.load(head)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"target_width": 48}, "its target's width is 48, not 32; give the head that was made for this model"),
        ({"target_layers": (1, 2, 4)}, "has layers 0 to 3, and its head reads what layer 4 does"),
        ({"target_layers": (1, 1)}, r"names no layers of its target \(dflash.target_layers\)"),
        ({"draft_ids": [5, 9, 300]}, "not each is another one of the 300 of its vocabulary"),
        ({"draft_ids": [5, 9, 5]}, "not each is another one of the 300 of its vocabulary"),
        ({"metadata": {"dflash.block_size": None}}, r"has blocks of None rows \(dflash.block_size\), and 2 to 128"),
        ({"metadata": {"dflash.block_size": 1}}, "has blocks of 1 rows"),
        ({"metadata": {"tokenizer.ggml.mask_token_id": None}}, "has no token to mask others with"),
        ({"metadata": {"tokenizer.ggml.mask_token_id": 300}}, "has no token to mask others with"),
        ({"metadata": {"dflash.selector_top_k": 4}}, "is a DFlash2 head"),
        ({"metadata": {"dflash.hyper_connection_count": 2}}, "is a DSpark head for DeepSeek V4"),
        ({"rank": 6, "without": ["markov_w2.weight"]}, "cannot be loaded|lacks markov_w2"),
    ],
)
def test_a_head_that_cannot_draft_here_is_refused(
    path: Path, tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    head = write_block_head(tmp_path / "head.gguf", **{"target_width": WIDTH, **options})
    with pytest.raises((CapabilityError, ModelFileError), match=why):
        paceline.load(path, draft=head)


def test_a_model_that_gives_no_states_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "gemma3.gguf", "gemma3", tokenizer="bytes")
    with pytest.raises(CapabilityError, match="models of llama, qwen3, qwen35, qwen35moe, qwen3moe do"):
        paceline.load(other, draft=write_block_head(tmp_path / "head.gguf", WIDTH))
