"""An EAGLE-3 head drafts for a model of attention alone: random ones, whose answers may have three tokens alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engines.heads import TOKENS, check_answers, last_row, open_target
from tests.engines.tiny_models import BYTE_VOCABULARY_SIZE, write_eagle_head, write_model

import paceline
from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ModelFileError
from paceline.drafters.head import HeadDrafter
from paceline.engines.base import COMMITTED_END, Step
from paceline.planning.policies.fixed import FixedPolicy

pytest.importorskip("llama_cpp")

from paceline.engines.llama_cpp import LlamaCppEngine, open_head

ROUNDING = 1e-4
LAYERS = (1, 2, 3)
WIDTH = 32


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    return write_model(folder / f"{request.param}.gguf", request.param, tokenizer="bytes", layers=4)


@pytest.fixture
def target(path: Path) -> Iterator[LlamaCppEngine]:
    engine = open_target(path, LAYERS)
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("depth", [1, 4])
def test_answers_are_those_of_plain_decoding(
    target: LlamaCppEngine, tmp_path: Path, depth: int, temperature: float
) -> None:
    known = [*TOKENS, *range(100, 150)]
    head = open_head(target, write_eagle_head(tmp_path / "head.gguf", WIDTH, draft_ids=known[::-1]))
    check_answers(target, HeadDrafter(head, target=target.vocabulary), depth, temperature)


def test_a_recurrent_model_answers_as_it_does_plainly(tmp_path: Path) -> None:
    target = open_target(write_model(tmp_path / "qwen35.gguf", "qwen35", tokenizer="bytes"), LAYERS)
    head = open_head(target, write_eagle_head(tmp_path / "head.gguf", WIDTH, draft_ids=[*TOKENS, *range(100, 150)]))
    check_answers(target, HeadDrafter(head, target=target.vocabulary), 4, 0.8)
    target.close()


def test_holding_states_changes_no_bit_of_a_row(path: Path) -> None:
    engines = [open_target(path, LAYERS), open_target(path, ())]
    for tokens, outputs in (([11, 42, 7, 99], [3]), ([3, 4, 5], [0, 1, 2]), ([6], [0])):
        rows = []
        for engine in engines:
            sequence = 0 if tokens[0] != 11 else engine.open()
            parents = range(COMMITTED_END, len(tokens) - 1)
            output = engine.forward([Step(sequence, tokens, parents, outputs)])
            rows.append(np.stack([output.logits(0, index) for index in range(len(outputs))]))
            engine.commit(sequence, range(len(tokens)))
        np.testing.assert_array_equal(rows[0], rows[1])
    for engine in engines:
        engine.close()


def test_states_of_a_tree_follow_its_path(target: LlamaCppEngine) -> None:
    sequence, fresh = target.open(), target.open()
    target.forward([Step(sequence, [11, 42, 7], [-1, 0, 1], [])])
    target.commit(sequence, [0, 1, 2])
    #   0 ─┬─ 1 ─── 3
    #      └─ 2
    target.forward([Step(sequence, [20, 21, 22], [-1, 0, 0], [2])])
    target.forward([Step(sequence, [23], [1], [0])])
    target.commit(sequence, [0, 2])
    target.forward([Step(fresh, [11, 42, 7, 20, 22], [-1, 0, 1, 2, 3], [])])
    target.commit(fresh, range(5))
    np.testing.assert_allclose(target.states(sequence, 0, 5), target.states(fresh, 0, 5), rtol=0, atol=ROUNDING)


@pytest.mark.parametrize("known", [None, [5, 9, 7, 200, 3]], ids=["all tokens", "some tokens"])
def test_what_the_head_says_is_what_its_layer_computes(
    target: LlamaCppEngine, tmp_path: Path, known: list[int] | None
) -> None:
    """Beside a forward in numpy, of tokens and states of anything: all rows, some rows, and rows of two sequences."""
    rng = np.random.default_rng(4)
    file = write_eagle_head(tmp_path / "head.gguf", WIDTH, draft_ids=known)
    head = open_head(target, file)
    tokens = rng.integers(3, 259, 12).tolist()
    states = rng.standard_normal((12, 3 * WIDTH)).astype(np.float32)
    own, expected = forward_eagle(file, tokens, states, known)
    sequence, other = head.open(), head.open()
    output = head.forward(
        [
            Step(sequence, tokens[:7], range(COMMITTED_END, 6), [1, 6], states[:7]),
            Step(other, tokens[:3], range(COMMITTED_END, 2), [2], states[:3]),
        ]
    )
    said = [output.logits(0, 0).copy(), output.logits(0, 1).copy(), output.logits(1, 0).copy()]
    np.testing.assert_allclose(said, expected[[1, 6, 2]], rtol=0, atol=ROUNDING)
    head.commit(sequence, range(7))
    head.commit(other, [])
    # A pass without outputs, of which the state is read all the same.
    head.forward([Step(sequence, tokens[7:], range(COMMITTED_END, 4), [], states[7:])])
    head.commit(sequence, range(5))
    drafted = last_row(head, [Step(sequence, [9], [COMMITTED_END], [0])])
    # A draft takes the head's own state in the place of what the encoder makes of the target's.
    _, expected = forward_eagle(file, [*tokens, 9], states, known, fed_back=own[-1:])
    np.testing.assert_allclose(drafted, expected[-1], rtol=0, atol=ROUNDING)
    head.close()


def forward_eagle(
    path: Path, tokens: list[int], states: FloatArray, known: list[int] | None, fed_back: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Return what the head makes of rows: its own states, and logits by the target's ids.

    Source: https://arxiv.org/abs/2503.01840, section 3.
    """
    gguf = pytest.importorskip("gguf")
    weights = {each.name: np.array(each.data) for each in gguf.GGUFReader(path).tensors}
    size, count = 16, 2

    def norm(values: FloatArray, name: str) -> FloatArray:
        scaled: FloatArray = (
            values / np.sqrt((values * values).mean(-1, keepdims=True) + 1e-5) * weights[f"{name}.weight"]
        )
        return scaled

    def turn(heads: FloatArray) -> FloatArray:
        """Turn pairs of neighbours, as llama.cpp does for this architecture."""
        angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(size // 2) * 2 / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = heads[..., 0::2], heads[..., 1::2]
        return np.stack([first * cos - second * sin, first * sin + second * cos], -1).reshape(heads.shape)

    rows = len(tokens)
    fused = states.astype(np.float64) @ weights["fc.weight"].T
    if fed_back is not None:
        fused = np.concatenate((fused, fed_back))
    embedded = weights["token_embd.weight"][tokens].astype(np.float64)
    both = np.concatenate([norm(embedded, "blk.0.attn_norm"), norm(fused, "blk.0.attn_norm_2")], -1)
    queries = turn((both @ weights["blk.0.attn_q.weight"].T).reshape(rows, count, size))
    keys = np.repeat(turn((both @ weights["blk.0.attn_k.weight"].T).reshape(rows, 1, size)), count, 1)
    values = np.repeat((both @ weights["blk.0.attn_v.weight"].T).reshape(rows, 1, size), count, 1)
    scores = np.exp(np.einsum("ihd,jhd->hij", queries, keys) / np.sqrt(size)) * np.tri(rows)
    mixed = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), values).reshape(rows, -1)
    hidden = fused + mixed @ weights["blk.0.attn_output.weight"].T
    normed = norm(hidden, "blk.0.ffn_norm")
    gate = normed @ weights["blk.0.ffn_gate.weight"].T
    inner = gate / (1 + np.exp(-gate)) * (normed @ weights["blk.0.ffn_up.weight"].T)
    own = hidden + inner @ weights["blk.0.ffn_down.weight"].T
    logits = norm(own, "output_norm") @ weights["output.weight"].T
    if known is None:
        return own, logits
    by_id = np.full((rows, BYTE_VOCABULARY_SIZE), -np.inf)
    by_id[:, known] = logits
    return own, by_id


@pytest.mark.parametrize("borrows", [False, True])
def test_either_may_be_closed_first(path: Path, tmp_path: Path, borrows: bool) -> None:
    target = open_target(path, LAYERS)
    head = open_head(target, write_eagle_head(tmp_path / "head.gguf", WIDTH, borrows=borrows))
    states = np.ones((1, 3 * WIDTH), np.float32)
    sequence = head.open()
    before = last_row(head, [Step(sequence, [5], [COMMITTED_END], [0], states)])
    head.commit(sequence, [])
    target.close()
    np.testing.assert_array_equal(last_row(head, [Step(sequence, [5], [COMMITTED_END], [0], states)]), before)
    head.close()


def test_a_head_is_known_for_what_it_is(path: Path, tmp_path: Path) -> None:
    head = write_eagle_head(tmp_path / "head.gguf", WIDTH)
    with paceline.load(path, draft=head, policy=FixedPolicy(3)) as model:
        answer = model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1)
    with paceline.load(path, drafters=["suffix"]) as model:
        plain = model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1, speculate=False)
    assert answer.text == plain.text
    assert answer.stats.num_accepted > 0
    with pytest.raises(ModelFileError, match="a head that drafts for a model"):
        paceline.load(head)


@pytest.mark.parametrize(
    ("width", "layers", "why"),
    [
        (48, (1, 2, 3), "its target's width is 48, not 32; give the head that was made for this model"),
        (32, (1, 2, 4), "has layers 0 to 3, and its head reads what layer 4 does"),
        (32, (1, 2), "names no 3 layers of its target"),
    ],
)
def test_a_head_of_another_model_is_refused(
    path: Path, tmp_path: Path, width: int, layers: tuple[int, ...], why: str
) -> None:
    head = write_eagle_head(tmp_path / "head.gguf", width, layers)
    with pytest.raises((CapabilityError, ModelFileError), match=why):
        paceline.load(path, draft=head)


def test_a_model_that_gives_no_states_is_refused(tmp_path: Path) -> None:
    other = write_model(tmp_path / "gemma3.gguf", "gemma3", tokenizer="bytes")
    with pytest.raises(CapabilityError, match="models of llama, qwen3, qwen35, qwen35moe, qwen3moe do; name"):
        paceline.load(other, draft=write_eagle_head(tmp_path / "head.gguf", WIDTH))
