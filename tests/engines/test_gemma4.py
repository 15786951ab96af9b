"""An assistant drafts for a model in the way of Gemma 4, whose cache it reads: random ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest
from tests.engines.heads import TOKENS, answers, check_answers, last_row, open_target
from tests.engines.tiny_models import write_gemma4, write_gemma4_assistant, write_model

import paceline
from paceline.core.arrays import FloatArray
from paceline.core.clock import WallClock
from paceline.core.errors import CapabilityError, ClosedError, EngineError, ModelFileError, NoRoomError
from paceline.core.verify import Proposal
from paceline.drafters.base import DraftJob
from paceline.drafters.head import CacheHeadDrafter
from paceline.drafters.rows import read_row
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.loading import foreseen_bytes
from paceline.engines.options import OUTPUT_STATE, ModelOptions
from paceline.engines.warming import warm_up
from paceline.lab.replaying.recorder import record
from paceline.planning.costs.meter import Meter, ProfilingBudget
from paceline.planning.costs.subject import open_subject
from paceline.planning.policies.fixed import FixedPolicy

pytest.importorskip("llama_cpp")

from paceline.engines.llama_cpp import LlamaCppEngine, open_head

ROUNDING = 5e-3
"""Some numbers are rounded to half precision, of which one may fall the other way."""


@pytest.fixture(scope="module", params=[0, 2], ids=["own keys", "shared keys"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    return write_gemma4(folder / "gemma4.gguf", layers=4 + request.param, shared=request.param)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma4_assistant(tmp_path_factory.mktemp("assistant") / "assistant.gguf")


@pytest.fixture
def target(path: Path) -> Iterator[LlamaCppEngine]:
    engine = open_target(path, (OUTPUT_STATE,))
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("depth", [1, 4])
def test_answers_are_those_of_plain_decoding(
    target: LlamaCppEngine, file: Path, depth: int, temperature: float
) -> None:
    drafter = CacheHeadDrafter(open_head(target, file), target=target.vocabulary)
    check_answers(target, drafter, depth, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_any_number_are_accepted_and_refused(
    target: LlamaCppEngine, file: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a head that says now and then what the target will: every chain of up to 4 drafts ends everywhere."""
    expected = answers(target, [], 0, temperature)
    texts = {tuple(answer.prompt_ids): answer.token_ids for answer in expected}
    drafter = CacheHeadDrafter(open_head(target, file), target=target.vocabulary)
    rng = np.random.default_rng(5)

    def read(job: DraftJob, frontier: int, logits: FloatArray) -> tuple[list[Proposal], float | None]:
        proposals, probability = read_row(job, frontier, logits)
        request, tree = job.request, job.tree
        known = texts[tuple(request.token_ids[: request.num_prompt])]
        place = request.num_output + tree.depths[frontier]
        is_on_path = [*request.output_ids, *tree.path_tokens(frontier)] == known[:place]
        if is_on_path and place < len(known) and rng.random() < 0.7:
            proposals = [dataclasses.replace(proposals[0], token_id=known[place])]
        return proposals, probability

    monkeypatch.setattr("paceline.drafters.draft_model.read_row", read)
    actual = answers(target, [drafter], 4, temperature)
    drafter.close()
    counts: Counter[int] = Counter()
    for one, other in zip(actual, expected, strict=True):
        assert one.token_ids == other.token_ids
        counts.update(one.request.stats.accepted_by_depth)
    assert counts[0] > counts[1] > counts[2] > counts[3] > 5


def test_holding_states_changes_no_bit_of_a_row(path: Path, file: Path) -> None:
    """Nor does a head that drafts between the passes."""
    held, plain = open_target(path, (OUTPUT_STATE,)), open_target(path, ())
    head = open_head(held, file)
    sequences = held.open(), plain.open()
    for tokens, outputs in (([11, 42, 7, 99], [3]), ([3, 4, 5], [0, 1, 2]), ([6], [0])):
        rows = []
        for engine, sequence in zip((held, plain), sequences, strict=True):
            output = engine.forward([Step(sequence, tokens, range(COMMITTED_END, len(tokens) - 1), outputs)])
            rows.append(np.stack([output.logits(0, index) for index in range(len(outputs))]))
            engine.commit(sequence, range(len(tokens)))
        np.testing.assert_array_equal(rows[0], rows[1])
        end = held.length(sequences[0])
        last_row(
            head, [Step(sequences[0], [9, 8], [-1, -1], [1], held.states(sequences[0], end - 1, end).repeat(2, 0))]
        )
        head.commit(sequences[0], ())
    for engine in (head, held, plain):
        engine.close()


def test_what_the_head_says_is_what_its_layers_compute(target: LlamaCppEngine, path: Path, file: Path) -> None:
    """Beside a forward in numpy of both, of two sequences at once, behind drafts, and of some rows alone."""
    rng = np.random.default_rng(4)
    head = open_head(target, file)
    texts = [rng.integers(3, 259, count).tolist() for count in (40, 11)]
    known = [forward_target(path, text) for text in texts]
    sequences = [target.open() for _ in texts]
    for sequence, text, (states, _) in zip(sequences, texts, known, strict=True):
        target.forward([Step(sequence, text, range(COMMITTED_END, len(text) - 1), ())])
        target.commit(sequence, range(len(text)))
        first = target.first_state(sequence)
        assert first <= len(text) - 5
        np.testing.assert_allclose(target.states(sequence, first, len(text)), states[first:], rtol=0, atol=ROUNDING)
    drafted = [forward_assistant(file, path, cache, [7], states[-1:]) for states, cache in known]
    output = head.forward(
        [
            Step(sequence, [7], [COMMITTED_END], [0], target.states(sequence, len(text) - 1, len(text)))
            for sequence, text in zip(sequences, texts, strict=True)
        ]
    )
    said = [output.logits(row, 0) for row in (0, 1)]
    np.testing.assert_allclose(said, np.concatenate([logits for _, logits in drafted]), rtol=0, atol=ROUNDING)
    # Drafts, two of one token, are read at the same place, with the head's own state.
    own = drafted[0][0]
    _, expected = forward_assistant(file, path, known[0][1], [9, 8], own.repeat(2, 0))
    _, expected_other = forward_assistant(file, path, known[1][1], [9], drafted[1][0])
    output = head.forward([Step(sequences[0], [9, 8], [0, 0], [0, 1]), Step(sequences[1], [9], [0], [0])])
    said = [output.logits(0, 0), output.logits(0, 1), output.logits(1, 0)]
    np.testing.assert_allclose(said, np.concatenate((expected, expected_other)), rtol=0, atol=ROUNDING)
    head.commit(sequences[0], ())
    given = np.concatenate((known[0][0][-1:], own))
    some = head.forward([Step(sequences[0], [9, 8], [COMMITTED_END, 0], [1], given)])
    np.testing.assert_allclose(some.logits(0, 0), expected[1], rtol=0, atol=ROUNDING)
    head.close()


_Cache: TypeAlias = dict[bool, tuple[FloatArray, FloatArray]]
"""Keys and values of the last layer with a window (``True``) and of the last without, ``[tokens, 1, size]``."""


def forward_target(path: Path, tokens: list[int]) -> tuple[FloatArray, _Cache]:
    """Return the states that the model's tokens leave, and what a head reads of its cache."""
    weights = read_weights(path)
    places = np.arange(len(tokens))
    hidden: FloatArray = weights["token_embd.weight"][tokens] * np.sqrt(weights["token_embd.weight"].shape[1])
    cache: _Cache = {}
    for layer in range(1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blk."))):
        has_window = layer % 2 == 0
        if f"blk.{layer}.attn_k.weight" in weights:
            normed = norm(hidden, weights[f"blk.{layer}.attn_norm.weight"])
            one, other = ((normed @ weights[f"blk.{layer}.attn_{name}.weight"].T)[:, None] for name in "kv")
            keys = norm(one, weights[f"blk.{layer}.attn_k_norm.weight"])
            cache[has_window] = turn(keys, places, weights, has_window), norm(other, 1.0)
        hidden = forward_layer(weights, layer, hidden, places, cache, has_window)
    return norm(hidden, weights["output_norm.weight"]), cache


def forward_assistant(
    path: Path, target: Path, cache: _Cache, tokens: list[int], states: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the head's own states and its logits of rows behind all that is cached, which do not see each other.

    Source: https://ai.google.dev/gemma/docs/mtp/overview.
    """
    weights, embedding = read_weights(path), read_weights(target)["token_embd.weight"]
    places = np.full(len(tokens), len(cache[True][0]))
    both = np.concatenate([embedding[tokens] * np.sqrt(embedding.shape[1]), states], -1)
    hidden: FloatArray = both @ weights["nextn.pre_projection.weight"].T
    for layer in (0, 1):
        hidden = forward_layer(weights, layer, hidden, places, cache, layer == 0)
    hidden = norm(hidden, weights["output_norm.weight"])
    return hidden @ weights["nextn.post_projection.weight"].T, hidden @ weights["token_embd.weight"].T


def forward_layer(
    weights: dict[str, FloatArray], layer: int, hidden: FloatArray, places: Any, cache: _Cache, has_window: bool
) -> FloatArray:
    def of_layer(name: str) -> FloatArray:
        return weights[f"blk.{layer}.{name}.weight"]

    keys, values = cache[has_window]
    both = (norm(hidden, of_layer("attn_norm")) @ of_layer("attn_q").T).reshape(len(hidden), 2, -1)
    queries = turn(norm(both, of_layer("attn_q_norm")), places, weights, has_window)
    back = places[:, None] - np.arange(len(keys))
    scores = np.einsum("ihd,jd->hij", queries, keys[:, 0])
    scores = np.where((back >= 0) & ((back < 16) | (not has_window)), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hij,jd->ihd", scores / scores.sum(-1, keepdims=True), values[:, 0]).reshape(len(hidden), -1)
    hidden = hidden + norm(mixed @ of_layer("attn_output").T, of_layer("post_attention_norm"))
    normed = norm(hidden, of_layer("ffn_norm"))
    gate = (normed @ of_layer("ffn_gate").T).astype(np.float16).astype(np.float64)  # what llama.cpp has a table of
    gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    gate = gate.astype(np.float16).astype(np.float64)
    inner = (gate * (normed @ of_layer("ffn_up").T)) @ of_layer("ffn_down").T
    return (hidden + norm(inner, of_layer("post_ffw_norm"))) * of_layer("layer_output_scale")


def norm(values: FloatArray, scale: FloatArray | float) -> FloatArray:
    normed: FloatArray = values / np.sqrt((values * values).mean(-1, keepdims=True) + 1e-6) * scale
    return normed


def turn(heads: FloatArray, places: Any, weights: dict[str, FloatArray], has_window: bool) -> FloatArray:
    half = heads.shape[-1] // 2
    angles = places[:, None] * 10000.0 ** (-np.arange(half) / half)
    if not has_window:
        angles = angles / weights["rope_freqs.weight"]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = heads[..., :half], heads[..., half:]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos], -1)


def read_weights(path: Path) -> dict[str, FloatArray]:
    gguf = pytest.importorskip("gguf")
    return {each.name: np.array(each.data, np.float64) for each in gguf.GGUFReader(path).tensors}


def drafts(target: LlamaCppEngine, head: Engine, sequence: int) -> FloatArray:
    """Return the rows of two levels of drafts behind a sequence of the target."""
    end = target.length(sequence)
    rows = [last_row(head, [Step(sequence, [7], [COMMITTED_END], [0], target.states(sequence, end - 1, end))])]
    rows.append(last_row(head, [Step(sequence, [9], [0], [0])]))
    head.commit(sequence, ())
    return np.stack(rows)


def read(target: LlamaCppEngine, tokens: list[int]) -> int:
    sequence = target.open()
    target.forward([Step(sequence, tokens, range(COMMITTED_END, len(tokens) - 1), ())])
    target.commit(sequence, range(len(tokens)))
    return sequence


def test_what_is_drafted_depends_on_the_text_alone(target: LlamaCppEngine, file: Path) -> None:
    """Of sequences that were forked, trimmed, stepped back or saved, whatever was drafted before."""
    head = open_head(target, file)
    tokens = np.random.default_rng(3).integers(3, 259, 60).tolist()
    expected = drafts(target, head, read(target, tokens[:30]))
    longer = read(target, tokens)
    drafts(target, head, longer)
    target.trim(longer, 29)
    with pytest.raises(ValueError, match="are not held"):
        drafts(target, head, longer)
    target.forward([Step(longer, tokens[29:30], [COMMITTED_END], ())])
    target.commit(longer, [0])
    fork = target.fork(longer)
    target.close_sequence(longer)
    saved = target.save(fork)
    target.forward([Step(fork, [5, 6, 7], [-1, 0, 0], [2])])
    target.commit(fork, [0, 2])
    drafts(target, head, fork)
    target.trim(fork, 30)
    restored = target.restore(saved)
    for sequence in (fork, restored):
        np.testing.assert_allclose(drafts(target, head, sequence), expected, rtol=0, atol=ROUNDING)
    # Files hold no states: the next pass leaves one.
    target.trim(fork, 29)
    data = target.export_state(target.save(fork)).copy()
    target.close_sequence(fork)
    loaded = target.restore(target.import_state(data, 29, 29))
    assert target.first_state(loaded) == 29
    target.forward([Step(loaded, tokens[29:30], [COMMITTED_END], ())])
    target.commit(loaded, [0])
    np.testing.assert_allclose(drafts(target, head, loaded), expected, rtol=0, atol=ROUNDING)
    head.close()


def test_a_head_is_opened_before_the_target_has_read_anything(target: LlamaCppEngine, file: Path) -> None:
    """Its context would empty the target's cache; where nothing is open, there is nothing to lose."""
    tokens = [11, 42, 7]
    sequence = read(target, tokens)
    before = last_row(target, [Step(sequence, [5], [COMMITTED_END], [0])])
    target.commit(sequence, ())
    with pytest.raises(EngineError, match=r"while 1 sequences of .* are: that would empty their cache"):
        open_head(target, file)
    np.testing.assert_array_equal(last_row(target, [Step(sequence, [5], [COMMITTED_END], [0])]), before)
    target.close_sequence(sequence)
    heads = open_head(target, file), open_head(target, file)
    sequence = read(target, tokens)
    np.testing.assert_array_equal(drafts(target, heads[0], sequence), drafts(target, heads[1], sequence))
    np.testing.assert_array_equal(last_row(target, [Step(sequence, [5], [COMMITTED_END], [0])]), before)
    for head in heads:
        head.close()


def test_drafts_follow_committed_tokens_alone(target: LlamaCppEngine, file: Path) -> None:
    head = open_head(target, file)
    step = Step(target.open(), [7], [COMMITTED_END], [0], np.ones((1, target.capabilities.state_width), np.float32))
    with pytest.raises(ValueError, match="0 committed tokens"):
        head.forward([step])
    target.forward([Step(step.sequence, [5], [COMMITTED_END], ())])
    with pytest.raises(ValueError, match="1 pending nodes"):
        head.forward([step])
    target.commit(step.sequence, [0])
    with pytest.raises(ValueError, match="none of its own to follow"):
        head.forward([dataclasses.replace(step, states=None)])
    assert np.isfinite(last_row(head, [step])).all()
    target.close_sequence(step.sequence)
    with pytest.raises(ClosedError, match="is not open"):
        head.forward([step])
    head.close()


def test_a_full_cache_leaves_no_room_for_drafts(target: LlamaCppEngine, file: Path) -> None:
    head = open_head(target, file)
    others, sequence = [read(target, [5] * 250) for _ in range(2)], read(target, [5])
    while True:
        try:
            target.forward([Step(sequence, [5], [COMMITTED_END], ())])
        except NoRoomError:
            break
        target.commit(sequence, [0])
    with pytest.raises(NoRoomError):
        drafts(target, head, sequence)
    head.commit(sequence, ())
    target.trim(others[0], 50)
    assert np.isfinite(drafts(target, head, sequence)).all()
    head.close()


def test_a_pass_that_fails_leaves_target_and_head_as_they_were(
    target: LlamaCppEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = open_head(target, file)
    sequence = read(target, [11, 42, 7])
    expected = drafts(target, head, sequence)
    states = target.states(sequence, 2, 3)
    last_row(head, [Step(sequence, [7], [COMMITTED_END], [0], states)])
    with monkeypatch.context() as patch:
        patch.setattr("llama_cpp.llama_cpp.llama_decode", lambda context, batch: -3)
        with pytest.raises(EngineError, match="failed a pass of 1 rows"):
            head.forward([Step(sequence, [9], [0], [0])])
    np.testing.assert_array_equal(last_row(head, [Step(sequence, [9], [0], [0])]), expected[1])
    head.commit(sequence, ())
    np.testing.assert_array_equal(drafts(target, head, sequence), expected)
    head.close()


def test_what_a_head_takes_is_foreseen(file: Path) -> None:
    assert foreseen_bytes(ModelOptions(file, context_length=200)) == file.stat().st_size


def test_either_may_be_closed_first(path: Path, file: Path) -> None:
    for closes_target_first in (True, False):
        target = open_target(path, (OUTPUT_STATE,))
        head = open_head(target, file)
        sequence = read(target, [11, 42, 7])
        drafts(target, head, sequence)
        if not closes_target_first:
            head.close()
            target.trim(sequence, 2)
            target.close()
            continue
        target.close()
        with pytest.raises(ClosedError):
            head.forward([Step(sequence, [7], [COMMITTED_END], [0], np.ones((1, 32), np.float32))])
        head.close()


def test_passes_are_measured_where_all_sequences_are_open(target: LlamaCppEngine, file: Path) -> None:
    """In one of the target's own beside them, which has as many tokens as are wanted."""
    head = open_head(target, file)
    sequences = [read(target, [5, 6, 7 + index]) for index in range(target.capabilities.max_sequences)]
    before = [drafts(target, head, sequence) for sequence in sequences]
    warm_up(head, [1, 4, 16])
    meter = Meter(WallClock(), ProfilingBudget(), lambda share: None)
    with open_subject(head, meter, Random(0), verifies=False) as subject:
        subject.warm_up()
        subject.fill_to(120)
        assert head.length(subject.sequence) == target.length(subject.sequence) == subject.context == 120
        assert subject.time_pass(4) > 0
        subject.rewind(32)
        assert target.length(subject.sequence) == 32
        with pytest.raises(CapabilityError, match="sequences are open, which is the most"):
            head.open()
    np.testing.assert_array_equal([drafts(target, head, sequence) for sequence in sequences], before)
    head.close()


def test_a_head_is_known_for_what_it_is(path: Path, file: Path) -> None:
    with paceline.load(path, draft=file, policy=FixedPolicy(3)) as model:
        assert [drafter.name for drafter in model.drafters] == ["draft"]
        answer = model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1)
    with paceline.load(path, drafters=["suffix"]) as model:
        plain = model.generate("a text", max_tokens=60, allowed_token_ids=TOKENS, seed=1, speculate=False)
    assert answer.text == plain.text
    assert answer.stats.num_accepted > 0
    with pytest.raises(ModelFileError, match="a head that drafts for a model"):
        paceline.load(file)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"state_width": 48}, "its width is 48, not 32; give the head that was made for this model"),
        ({"metadata": {"attention.head_count_kv": 2}}, "keys and values that it reads are not those of the last two"),
        ({"metadata": {"nextn_predict_layers": 1}}, "has 2 layers, and 1 of them draft"),
    ],
)
def test_a_head_of_another_model_is_refused(path: Path, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    head = write_gemma4_assistant(tmp_path / "head.gguf", **changes)
    with pytest.raises((CapabilityError, ModelFileError), match=why):
        paceline.load(path, draft=head)


def test_a_head_of_another_architecture_is_refused(path: Path, file: Path, tmp_path: Path) -> None:
    layer = write_model(tmp_path / "mtp.gguf", "qwen35", tokenizer="bytes", mtp=True, only_mtp=True)
    with pytest.raises(CapabilityError, match=r"a head for a model of qwen35, and .* is one of gemma4: give the head"):
        paceline.load(path, draft=layer)
    other = write_model(tmp_path / "qwen35.gguf", "qwen35", tokenizer="bytes", mtp=True)
    with pytest.raises(CapabilityError, match=r"a head for a model of gemma4, and .* is one of qwen35: give the head"):
        paceline.load(other, draft=file)
    with pytest.raises(CapabilityError, match=r"gives no states for this head .* of gemma4, qwen35, qwen35moe"):
        paceline.load("target", draft=file)


def test_a_model_whose_last_layers_the_head_cannot_read_is_refused(file: Path, tmp_path: Path) -> None:
    other = write_gemma4(tmp_path / "other.gguf", layers=5)
    with pytest.raises(CapabilityError, match="keys and values that it reads are not those of the last two layers"):
        paceline.load(other, draft=file)


def test_levels_with_siblings_are_planned_and_recorded(path: Path, file: Path) -> None:
    """With the only sequence of the target in use, measured ones and recorded ones have room all the same."""
    options: dict[str, Any] = {"allowed_token_ids": TOKENS, "seed": 1, "temperature": 0.8}
    with paceline.load(path, draft=file, policy="auto") as model:
        assert model.target.capabilities.max_sequences == 1
        recording = record(model, "a text", depth=3, siblings=2, max_tokens=30, **options)
        (trace,) = (trace for trace in recording.traces if trace.name == "draft")
        assert trace.is_model
        assert [len(level.token_ids) for level in trace.chains[9]] == [2, 2, 2]
    with paceline.load(path, draft=file, policy=FixedPolicy(3, siblings=2)) as model:
        drafted = model.generate("a text", max_tokens=30, **options)
        plain = model.generate("a text", max_tokens=30, speculate=False, **options)
    assert drafted.token_ids == plain.token_ids == list(recording.token_ids)
    assert drafted.stats.num_accepted > 0
