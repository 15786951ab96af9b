"""An MTP layer drafts for its own model: a tiny random one, whose answers may have three tokens alone.

So that every number of drafts is accepted now and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from tests.engines.heads import TOKENS, check_answers, last_row, open_target
from tests.engines.tiny_models import write_model

import paceline
from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, InputError, ModelFileError, ModelWarning
from paceline.drafters.head import HeadDrafter
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.options import OUTPUT_STATE, ModelOptions
from paceline.planning.policies.fixed import FixedPolicy

pytest.importorskip("llama_cpp")

from paceline.engines.llama_cpp import LlamaCppEngine, heads, open_head

ROUNDING = 1e-4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("mtp") / "qwen35.gguf", "qwen35", tokenizer="bytes", mtp=True)


@pytest.fixture
def target(path: Path) -> Iterator[LlamaCppEngine]:
    engine = open_target(path, (OUTPUT_STATE,))
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("depth", [1, 3, 4])
def test_answers_are_those_of_plain_decoding(target: LlamaCppEngine, depth: int, temperature: float) -> None:
    check_answers(target, HeadDrafter(open_head(target), target=target.vocabulary), depth, temperature)


def test_what_the_head_says_is_what_its_layer_computes(target: LlamaCppEngine, path: Path) -> None:
    """Beside a forward of the layer in numpy, of tokens and states of anything."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(3, 259, 12).tolist()
    states = rng.standard_normal((12, target.capabilities.state_width)).astype(np.float32)
    head = open_head(target)
    sequence = head.open()
    output = head.forward([Step(sequence, tokens, range(COMMITTED_END, 11), range(12), states)])
    said = np.stack([output.logits(0, index) for index in range(12)])
    own_states, expected = forward_mtp_layer(path, tokens, states)
    np.testing.assert_allclose(said, expected, rtol=0, atol=ROUNDING)
    # A draft is read with the state that the layer left before it.
    head.commit(sequence, range(12))
    drafted = last_row(head, [Step(sequence, [9], [COMMITTED_END], [0])])
    _, expected = forward_mtp_layer(path, [*tokens, 9], np.concatenate((states, own_states[-1:])))
    np.testing.assert_allclose(drafted, expected[-1], rtol=0, atol=ROUNDING)
    head.close()


def forward_mtp_layer(path: Path, tokens: list[int], states: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return what the layer makes of rows: its own states, and logits.

    The form of Qwen 3.5: attention whose heads are gated, over the projection of embedding and state, both normed.
    """
    gguf = pytest.importorskip("gguf")
    weights = {each.name: np.array(each.data, np.float64) for each in gguf.GGUFReader(path).tensors}
    size, count, kv_count = 16, 2, 1

    def of_layer(name: str) -> FloatArray:
        return weights[f"blk.4.{name}.weight"]

    def norm(values: FloatArray, name: str) -> FloatArray:
        scale: FloatArray = values / np.sqrt((values * values).mean(-1, keepdims=True) + 1e-5) * of_layer(name)
        return scale

    def turn(heads: FloatArray) -> FloatArray:
        half = size // 2
        angles = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = heads[..., :half], heads[..., half:]
        turned: FloatArray = np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)
        return turned

    rows = len(tokens)
    embedded = norm(weights["token_embd.weight"][tokens], "nextn.enorm")
    hidden = np.concatenate([embedded, norm(states, "nextn.hnorm")], -1) @ of_layer("nextn.eh_proj").T
    normed = norm(hidden, "attn_norm")
    queries = (normed @ of_layer("attn_q").T).reshape(rows, count, 2 * size)
    gates = queries[..., size:].reshape(rows, -1)
    asked = turn(norm(queries[..., :size], "attn_q_norm"))
    keys = turn(norm((normed @ of_layer("attn_k").T).reshape(rows, kv_count, size), "attn_k_norm"))
    values = (normed @ of_layer("attn_v").T).reshape(rows, kv_count, size)
    keys, values = np.repeat(keys, count // kv_count, 1), np.repeat(values, count // kv_count, 1)
    scores = np.exp(np.einsum("ihd,jhd->hij", asked, keys) / np.sqrt(size)) * np.tri(rows)
    mixed = np.einsum("hij,jhd->ihd", scores / scores.sum(-1, keepdims=True), values).reshape(rows, -1)
    hidden = hidden + (mixed / (1 + np.exp(-gates))) @ of_layer("attn_output").T
    normed = norm(hidden, "post_attention_norm")
    gate = normed @ of_layer("ffn_gate").T
    hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ of_layer("ffn_up").T)) @ of_layer("ffn_down").T
    own = norm(hidden, "nextn.shared_head_norm")
    return own, own @ weights["output.weight"].T


def test_either_may_be_closed_first(path: Path) -> None:
    target = LlamaCppEngine(ModelOptions(path, context_length=64, threads=1, hold_states=(OUTPUT_STATE,)))
    head, other = open_head(target), open_head(target)
    states = np.ones((1, target.capabilities.state_width), np.float32)
    sequence = head.open()
    before = last_row(head, [Step(sequence, [5], [COMMITTED_END], [0], states)])
    head.commit(sequence, [])
    other.close()
    target.close()
    np.testing.assert_array_equal(last_row(head, [Step(sequence, [5], [COMMITTED_END], [0], states)]), before)
    head.close()


def test_a_row_without_a_state_to_be_read_with_is_refused(target: LlamaCppEngine) -> None:
    head = open_head(target)
    sequence = head.open()
    with pytest.raises(ValueError, match="none of its own"):
        head.forward([Step(sequence, [5], [COMMITTED_END], [0])])
    width = target.capabilities.state_width
    with pytest.raises(ValueError, match=rf"states \(1, 3\), not \(1, {width}\)"):
        head.forward([Step(sequence, [5], [COMMITTED_END], [0], np.ones((1, 3), np.float32))])
    head.forward([Step(sequence, [5], [COMMITTED_END], [0], np.ones((1, width), np.float32))])
    head.close()


def test_a_layer_in_a_file_of_its_own_says_the_same(target: LlamaCppEngine, path: Path, tmp_path: Path) -> None:
    alone = write_model(tmp_path / "mtp-qwen35.gguf", "qwen35", tokenizer="bytes", mtp=True, only_mtp=True)
    states = np.ones((1, target.capabilities.state_width), np.float32)
    said = []
    for where in (None, alone):
        head = open_head(target, where)
        said.append(last_row(head, [Step(head.open(), [5], [COMMITTED_END], [0], states)]))
        head.close()
    np.testing.assert_array_equal(said[0], said[1])
    with paceline.load(path, draft=alone, policy=FixedPolicy(3)) as model:
        answer = model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1)
    assert answer.stats.num_accepted > 0
    with pytest.raises(ModelFileError, match="no model but a head"):
        paceline.load(alone)


def test_a_head_of_another_model_is_refused(path: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "mtp-other.gguf", "qwen35", tokenizer="bytes", mtp=True, only_mtp=True, heads=4)
    with pytest.raises(CapabilityError, match=r"no head of .*: its width is 64, not 32; give the head"):
        paceline.load(path, draft=other)
    with pytest.raises(CapabilityError, match=r"gives no states for this head .* of gemma4, qwen35, qwen35moe do"):
        paceline.load("target", draft=other)


def test_a_model_without_such_a_layer_holds_no_states(tmp_path: Path) -> None:
    without = write_model(tmp_path / "plain.gguf", "qwen35", tokenizer="bytes")
    with pytest.raises(InputError, match=r"no MTP layer that drafts here .*, and no mtp-\*\.gguf lies beside it"):
        paceline.load(without, draft="mtp")


def test_a_layer_in_a_file_beside_the_model_drafts_where_it_is_named(tmp_path: Path) -> None:
    without = write_model(tmp_path / "plain-Q8_0.gguf", "qwen35", tokenizer="bytes")
    for name in ("mtp-plain-F16.gguf", "mtp-plain-Q8_0.gguf"):
        beside = write_model(tmp_path / name, "qwen35", tokenizer="bytes", mtp=True, only_mtp=True)
    with paceline.load(without, draft="mtp", policy=FixedPolicy(3)) as model:
        (drafter,) = model.drafters
        assert isinstance(drafter, HeadDrafter)
        assert beside.name in drafter.engine.description
    with paceline.load(without, policy=FixedPolicy(3)) as model:
        assert [drafter.name for drafter in model.drafters] == ["suffix"]


def test_a_file_with_such_a_layer_drafts_with_it_where_nothing_is_named(path: Path, tmp_path: Path) -> None:
    fixed = FixedPolicy(3)
    with paceline.load(path, policy=fixed) as model, paceline.load(path, drafters=["suffix"]) as other:
        assert [drafter.name for drafter in model.drafters] == ["draft"]
        drafted = model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1)
        plain = other.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1)
    assert drafted.text == plain.text
    assert drafted.stats.num_accepted > 0
    with paceline.load(path, draft="mtp", policy=fixed) as model:
        assert [drafter.name for drafter in model.drafters] == ["draft"]
    without = write_model(tmp_path / "plain.gguf", "qwen35", tokenizer="bytes")
    with pytest.raises(InputError, match="no MTP layer that drafts here"):
        paceline.load(without, draft="mtp")


def test_a_layer_that_nobody_named_and_finds_no_memory_is_gone_without(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_memory(*arguments: object) -> NoReturn:
        raise InputError("no memory for the cache")

    monkeypatch.setattr(heads, "create_context", without_memory)
    with pytest.raises(InputError, match="no memory"):
        paceline.load(path, draft="mtp")
    with pytest.warns(ModelWarning, match="no memory for the cache"):
        model = paceline.load(path)
    with model:
        assert "draft" not in [drafter.name for drafter in model.drafters]
        assert len(model.generate("a text", max_tokens=4, allowed_token_ids=TOKENS).token_ids) == 4


def test_what_a_head_cannot_have_otherwise_than_its_target_is_told(path: Path, tmp_path: Path) -> None:
    asked = paceline.DraftOptions("mtp", cache_type_k="q8_0", threads=1)
    with pytest.warns(ModelWarning, match="threads.*cache_type_k.*changes nothing"):
        model = paceline.load(path, draft=asked)
    model.close()
    file = write_model(tmp_path / "mtp.gguf", "qwen35", tokenizer="bytes", mtp=True, only_mtp=True)
    options = ModelOptions(path, threads=2, context_length=128, cache_type_k="f32", flash_attention=False)
    for draft in (file, "mtp", paceline.DraftOptions(file)):
        with paceline.load(options, draft=draft) as model:
            assert "draft" in [drafter.name for drafter in model.drafters]
