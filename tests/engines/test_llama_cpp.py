"""The GGUF engine against itself: whatever was forked, drafted, dropped or trimmed on the way, logits are those of a
fresh engine that was fed the plain text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("llama_cpp")
import llama_cpp.llama_cpp as api
from tests.engines.tiny_models import VOCABULARY_SIZE, write_model
from tests.models.helpers import in_f32, split_gguf, with_last_tokens

import paceline
from paceline.conversion.quantize import quantize_gguf
from paceline.core.errors import (
    CapabilityError,
    ClosedError,
    ContextLengthError,
    EngineError,
    InputError,
    ModelFileError,
    NoRoomError,
)
from paceline.core.request import Request
from paceline.drafters.suffix import SuffixDrafter
from paceline.engines import threads
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.context_length import BYTES_OF_BOOKKEEPING, cell_bytes
from paceline.engines.llama_cpp import LlamaCppEngine, native
from paceline.engines.llama_cpp import settings as model_settings
from paceline.engines.llama_cpp.ends import read_end_ids
from paceline.engines.options import CACHE_TYPES, CacheType, ModelOptions
from paceline.models.description import ModelDescription, describe
from paceline.models.embedded import embedded_draft
from paceline.runtime.loop import DecodingLoop
from paceline.vocabularies.relation import relate_vocabularies

Logits = npt.NDArray[np.float32]

DRAFT = embedded_draft()
"""The smaller embedded model, enough for everything that only asks for consistency."""


# --- helpers ----------------------------------------------------------------------------------------------------------


def load(path: Path, **settings: Any) -> LlamaCppEngine:
    """One thread: these models are too small to gain from more, and other processes may be using the cores."""
    tuning = {name: settings.pop(name) for name in ("batch_rows", "output_rows") if name in settings}
    types = {} if settings.get("exact") else {"cache_type_k": "f32", "cache_type_v": "f32"}
    options = ModelOptions(path, **{"threads": 1, "context_length": 256, **types, **settings})
    return LlamaCppEngine(options, **tuning)


def chain(sequence: int, token_ids: Sequence[int], after: int = COMMITTED_END, outputs: Sequence[int] = (-1,)) -> Step:
    """A step that feeds tokens one after the other; a negative output counts from the end."""
    rows = len(token_ids)
    first = 0 if after == COMMITTED_END else after + 1
    parents = [after, *range(first, first + rows - 1)]
    return Step(sequence, list(token_ids), parents, [output % rows for output in outputs])


def feed(engine: Engine, sequence: int, token_ids: Sequence[int]) -> Logits:
    """Append tokens to the committed ones; return the logits after the last."""
    logits = np.zeros(0, np.float32)
    most = engine.capabilities.max_rows
    for start in range(0, len(token_ids), most):
        part = token_ids[start : start + most]
        logits = np.array(engine.forward([chain(sequence, part)]).logits(0, 0))
        engine.commit(sequence, range(len(part)))
    return logits


class Reference:
    """Logits after a text, from an engine that only ever saw that text."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.engine = load(path, **settings)
        self._known: dict[tuple[int, ...], Logits] = {}

    def __call__(self, token_ids: Sequence[int]) -> Logits:
        key = tuple(token_ids)
        if key not in self._known:
            sequence = self.engine.open()
            self._known[key] = feed(self.engine, sequence, key)
            self.engine.close_sequence(sequence)
        return self._known[key]


@pytest.fixture(scope="module")
def exact() -> Path:
    """The embedded draft with F32 weights: without rounded activations and cache, differences stay near 1e-5."""
    return in_f32(DRAFT)


@pytest.fixture(scope="module")
def reference(exact: Path) -> Iterator[Reference]:
    made = Reference(exact)
    yield made
    made.engine.close()


@pytest.fixture
def engine(exact: Path) -> Iterator[LlamaCppEngine]:
    made = load(exact, max_sequences=2)
    yield made
    made.close()


def assert_close(found: Any, wanted: Logits, tolerance: float = 1e-4) -> None:
    assert found.shape == wanted.shape
    assert float(np.abs(found - wanted).max()) <= tolerance


def record(monkeypatch: pytest.MonkeyPatch, name: str, calls: list[str]) -> None:
    """Append ``name`` to ``calls`` whenever the native function of that name is called."""
    real = getattr(api, name)

    def called(*arguments: Any) -> Any:
        calls.append(name)
        return real(*arguments)

    monkeypatch.setattr(api, name, called)


# --- any history of calls ---------------------------------------------------------------------------------------------


@dataclass
class Shadow:
    """What a sequence should hold."""

    committed: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    floor: int = 0

    def path(self, node: int) -> list[int]:
        nodes = []
        while node != COMMITTED_END:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def text(self, node: int) -> list[int]:
        return self.committed + [self.token_ids[at] for at in self.path(node)]

    def forget_pending(self) -> None:
        self.token_ids, self.parents = [], []


def check_ids(engine: LlamaCppEngine) -> None:
    """Every native id is free or in one role of one sequence, and its cells reach exactly as far as the role says."""
    last = api.llama_memory_seq_pos_max
    seen = list(engine._lines.unheld_ids())
    assert all(last(engine._memory, free) == -1 for free in seen)
    for state in engine._sequences.values():
        assert state.main in state.tips.values()
        for tip, line in state.tips.items():
            depth = 0 if tip == COMMITTED_END else state.pending.depths[tip]
            assert last(engine._memory, line) == state.committed + depth - 1
            seen.append(line)
        for line, follows in state.following.items():
            assert last(engine._memory, line) == follows - 1
            seen.append(line)
        if state.keeper is not None:
            assert last(engine._memory, state.keeper) == state.kept - 1 == state.committed - 1
            seen.append(state.keeper)
    assert sorted(seen) == list(range(len(seen)))
    assert not any(state.torn for state in engine._sequences.values())
    assert engine._batch.id_counts.min() == engine._batch.id_counts.max() == 1


class RandomCaller:
    """Calls an engine in any order the contract allows and compares all logits it gets with the plain ones."""

    def __init__(self, engine: LlamaCppEngine, reference: Reference, seed: int, tolerance: float) -> None:
        self.engine = engine
        self.reference = reference
        self.random = random.Random(seed)
        self.tolerance = tolerance
        self.shadows: dict[int, Shadow] = {}
        self.compared = self.branched = self.refused = self.moved = self.floored = 0
        self.vocabulary = list(range(1, 9))  # few tokens, so that different sequences share prefixes

    def run(self, calls: int) -> None:
        actions: list[tuple[Callable[[], None], int]] = [
            (self.open, 2),
            (self.forward, 12),
            (self.commit, 8),
            (self.fork, 2),
            (self.trim, 2),
            (self.move, 3),
            (self.close, 1),
        ]
        for _ in range(calls):
            if not self.shadows:
                self.open()
            self.random.choices([action for action, _ in actions], [weight for _, weight in actions])[0]()
            check_ids(self.engine)
            for handle, shadow in self.shadows.items():
                assert self.engine.length(handle) == len(shadow.committed)

    def pick(self) -> int:
        return self.random.choice(list(self.shadows))

    def room(self) -> bool:
        return len(self.shadows) < self.engine.capabilities.max_sequences

    def open(self) -> None:
        if self.room():
            self.shadows[self.engine.open()] = Shadow()

    def close(self) -> None:
        handle = self.pick()
        self.engine.close_sequence(handle)
        del self.shadows[handle]

    def fork(self) -> None:
        handle = self.pick()
        if self.room() and not self.shadows[handle].parents:
            shadow = self.shadows[handle]
            self.shadows[self.engine.fork(handle)] = Shadow(list(shadow.committed), floor=shadow.floor)

    def move(self) -> None:
        """To host memory and back, into whatever cells are free."""
        handle = self.pick()
        shadow = self.shadows[handle]
        if shadow.parents:
            return
        saved = self.engine.save(handle)
        assert saved.floor in (0, len(shadow.committed))
        self.engine.close_sequence(handle)
        self.shadows[self.engine.restore(saved)] = Shadow(list(shadow.committed), floor=saved.floor)
        del self.shadows[handle]
        self.moved += 1

    def trim(self) -> None:
        handle = self.pick()
        shadow = self.shadows[handle]
        length = self.random.randint(0, len(shadow.committed))
        if 0 < length < shadow.floor:
            with pytest.raises(CapabilityError, match="sliding windows"):
                self.engine.trim(handle, length)
            self.floored += 1
            return
        if length == 0:
            shadow.floor = 0
        self.engine.trim(handle, length)
        del shadow.committed[length:]
        shadow.forget_pending()

    def commit(self) -> None:
        handle = self.pick()
        shadow = self.shadows[handle]
        node = self.random.randint(COMMITTED_END, len(shadow.parents) - 1)
        self.engine.commit(handle, shadow.path(node))
        shadow.committed = shadow.text(node)
        shadow.forget_pending()

    def grow(self, handle: int) -> Step:
        shadow = self.shadows[handle]
        before = len(shadow.parents)
        rows = self.random.choice([1, 1, 2, 3, 5, 8])
        if not shadow.parents and self.random.random() < 0.2:
            rows = 20
        straight = self.random.random() < 0.4 or rows == 20
        parents: list[int] = []
        for row in range(rows):
            newest = before + row - 1
            parents.append(newest if straight else self.random.randint(max(COMMITTED_END, newest - 4), newest))
        outputs = [row for row in range(rows) if self.random.random() < 0.6]
        return Step(handle, self.random.choices(self.vocabulary, k=rows), parents, outputs)

    def forward(self) -> None:
        handles = self.random.sample(list(self.shadows), self.random.randint(1, len(self.shadows)))
        limit = self.engine.capabilities.context_length
        handles = [handle for handle in handles if len(self.shadows[handle].committed) + 60 < limit]
        handles = [handle for handle in handles if len(self.shadows[handle].parents) < 30]
        steps = [self.grow(handle) for handle in handles]
        if not steps:
            return
        try:
            output = self.engine.forward(steps)
        except NoRoomError:
            self.refused += 1
            return
        for index, step in enumerate(steps):
            shadow = self.shadows[step.sequence]
            before = len(shadow.parents)
            shadow.token_ids += step.token_ids
            shadow.parents += step.parents
            self.branched += len(set(shadow.parents)) < len(shadow.parents)
            for number, row in enumerate(step.outputs):
                found = np.array(output.logits(index, number))
                assert_close(found, self.reference(shadow.text(before + row)), self.tolerance)
                self.compared += 1


@pytest.mark.parametrize("seed", range(6))
def test_any_history_gives_the_logits_of_the_plain_text(exact: Path, reference: Reference, seed: int) -> None:
    engine = load(exact, max_sequences=4, branches=5, cells=400)
    caller = RandomCaller(engine, reference, seed, engine.capabilities.logit_tolerance)
    caller.run(200)
    assert caller.compared > 100
    assert caller.branched > 10
    assert caller.refused > 0
    assert caller.moved > 0
    engine.close()


def test_any_history_with_sliding_windows(tmp_path: Path) -> None:
    """Gemma 3 has windows, here of 48 tokens, whose cells llama.cpp would reuse too early."""
    path = write_model(tmp_path / "model.gguf", "gemma3")
    reference = Reference(path)
    floored = 0
    for seed in range(4):
        engine = load(path, max_sequences=3, branches=12)
        caller = RandomCaller(engine, reference, seed, tolerance=0.02)
        caller.run(300)
        assert caller.compared > 150
        floored += caller.floored
        engine.close()
    assert floored > 0
    reference.engine.close()


# --- directed cases of the same ---------------------------------------------------------------------------------------


def test_chains_cost_no_native_calls_unless_rejected(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    sequence = engine.open()
    for name in ("llama_memory_seq_rm", "llama_memory_seq_cp"):
        record(monkeypatch, name, calls)
    feed(engine, sequence, [1, 2, 3])
    engine.forward([chain(sequence, [4, 5, 6])])
    engine.commit(sequence, [0, 1, 2])
    assert calls == []
    engine.forward([chain(sequence, [4, 5, 6])])
    engine.commit(sequence, [0])
    assert calls == ["llama_memory_seq_rm"]


def test_branches_copy_only_what_is_new(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    real = api.llama_memory_seq_cp

    def copy(memory: Any, source: int, destination: int, first: int, end: int) -> None:
        copied.append(end - first)
        real(memory, source, destination, first, end)

    monkeypatch.setattr(api, "llama_memory_seq_cp", copy)
    sequence = engine.open()
    feed(engine, sequence, range(1, 101))
    for _ in range(4):
        engine.forward([Step(sequence, [1, 2, 3], [COMMITTED_END, 0, 0], [])])
        engine.commit(sequence, [0, 2])
    # The prefix once, for a first branch; from then on the two ids take turns and follow by two tokens a round.
    assert copied == [100, 2, 2, 2]


def test_sliding_windows_keep_what_stepping_back_needs(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "gemma3")
    reference = Reference(path)
    engine = load(path, max_sequences=3, cells=512)
    rng = random.Random(4)
    first, second, third = (rng.choices(range(1, 90), k=count) for count in (40, 120, 150))
    gone, kept = engine.open(), engine.open()
    feed(engine, gone, first)
    feed(engine, kept, second)
    engine.close_sequence(gone)
    # These rows fill the hole and then meet cells that have left the window of the sequence that is kept.
    feed(engine, engine.open(), third)
    engine.trim(kept, 60)
    assert_close(feed(engine, kept, [7, 8]), reference([*second[:60], 7, 8]), tolerance=0.02)


def test_what_windows_saw_before_is_not_saved(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "gemma3")
    reference = Reference(path)
    engine = load(path, max_sequences=2, cells=512)
    text = random.Random(5).choices(range(1, 90), k=120)
    sequence = engine.open()
    feed(engine, sequence, text[:48])
    assert engine.save(sequence).floor == 0, "no window has left anything behind"
    feed(engine, sequence, text[48:])
    saved = engine.save(sequence)
    assert saved.floor == 120
    engine.close_sequence(sequence)
    restored = engine.restore(saved)
    assert_close(feed(engine, restored, [7, 8]), reference([*text, 7, 8]), tolerance=0.02)
    fork = engine.fork(restored)
    for handle in (restored, fork):
        with pytest.raises(CapabilityError, match="restored with 120 tokens cannot be trimmed to 119"):
            engine.trim(handle, 119)
        engine.trim(handle, 120)
        assert_close(feed(engine, handle, [9]), reference([*text, 9]), tolerance=0.02)
    engine.trim(fork, 0)
    feed(engine, fork, [1, 2, 3])
    engine.trim(fork, 1)
    assert_close(feed(engine, fork, [9]), reference([1, 9]), tolerance=0.02)
    check_ids(engine)


def test_sliding_windows_need_a_second_sequence_to_be_saved(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path / "model.gguf", "gemma3"))
    sequence = engine.open()
    feed(engine, sequence, [1, 2, 3])
    with pytest.raises(CapabilityError, match="load it for two or more"):
        engine.save(sequence)


@pytest.mark.parametrize(
    "settings",
    [
        {"flash_attention": True},
        {"cache_type_k": "f16", "cache_type_v": "f16"},
        {"cache_type_k": "q8_0", "cache_type_v": "q4_0"},
        {"exact": True},
    ],
)
def test_every_kind_of_cache_can_be_saved(exact: Path, settings: dict[str, Any]) -> None:
    engine = load(exact, max_sequences=2, **settings)
    text = random.Random(6).choices(range(1, 4000), k=100)
    sequence = engine.open()
    feed(engine, sequence, text)
    saved = engine.save(sequence)
    engine.trim(sequence, 1)  # the others' cells are free, and the restored tokens take them behind this one
    assert_close(
        feed(engine, engine.restore(saved), [5]),
        feed(engine, sequence, [*text[1:], 5]),
        engine.capabilities.logit_tolerance,
    )


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_the_room_of_a_cache_is_foreseen_for_every_type(cache_type: CacheType, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"cache_type_k": cache_type, "cache_type_v": "f16", "context_length": 2048}
    load(DRAFT, **settings).close()
    made_bytes = native.log.buffers["KV"]
    each_bytes = cell_bytes(describe(DRAFT), ModelOptions(DRAFT, **settings))
    assert each_bytes is not None
    # llama.cpp says it to 0.01 MiB.
    assert abs(2048 * (each_bytes - BYTES_OF_BOOKKEEPING) - made_bytes) < 0.01 * (1 << 20)
    available_bytes = 2048 * each_bytes
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: available_bytes - 1)
    with pytest.raises(InputError, match="are free; take at most 2047 tokens"):
        load(DRAFT, **settings)


@pytest.mark.parametrize(
    ("most_mib", "free_mib", "unfused_rows"),
    # A row takes 32 KiB for its scores.
    [(16, 128, 512), (8, 128, 256), (8, 32, 128), (2, 128, None)],
)
def test_passes_have_fewer_rows_where_scores_would_take_too_much(
    most_mib: int, free_mib: int, unfused_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_settings, "_UNFUSED_ATTENTION_BYTES", (1 << 20, most_mib << 20))
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: free_mib << 20)
    engine = load(DRAFT, context_length=4096)
    if unfused_rows is None:
        assert (engine.fused_attention, engine.capabilities.max_rows) == (None, 512)
        return
    text = random.Random(5).choices(range(1, 4000), k=700)
    for fused, rows in ((False, unfused_rows), (True, 512), (False, unfused_rows)):
        engine.fuse_attention(fused)
        assert engine.capabilities.max_rows == rows
        feed(engine, engine.open(), text)
        engine.close_sequence(max(engine._sequences))


@pytest.mark.parametrize("which", ["cache_type_k", "cache_type_v"])
def test_a_quantised_cache_needs_fused_attention_and_heads_of_whole_blocks(
    which: str, exact: Path, tmp_path: Path
) -> None:
    assert load(exact).fused_attention is False
    assert load(exact, **{which: "q8_0"}).fused_attention is None
    with pytest.raises(InputError, match=f"`{which}` q8_0 needs fused attention"):
        load(exact, **{which: "q8_0"}, flash_attention=False)
    path = write_model(tmp_path / "model.gguf", "llama")
    with pytest.raises(InputError, match=r"take other types of keys and values \(`cache_type_k`, `cache_type_v`\)"):
        load(path, **{which: "q8_0"})


def test_what_was_saved_before_attention_was_fused_is_refused(exact: Path) -> None:
    engine = load(exact, max_sequences=2)
    sequence = engine.open()
    feed(engine, sequence, [1, 2, 3])
    saved = engine.save(sequence)
    engine.close_sequence(sequence)
    engine.fuse_attention(True)
    with pytest.raises(ValueError, match="another cache"):
        engine.restore(saved)


@pytest.mark.parametrize("call", ["llama_state_seq_get_data", "llama_state_seq_set_data"])
def test_an_interrupt_while_saving_or_restoring_changes_nothing(
    call: str, exact: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(exact, max_sequences=2)
    sequence = engine.open()
    feed(engine, sequence, [1, 2, 3])
    saved = engine.save(sequence)
    real = getattr(api, call)

    def interrupted(*arguments: Any) -> int:
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(api, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.save(sequence) if "get" in call else engine.restore(saved)
    check_ids(engine)
    for handle in (sequence, engine.restore(saved)):
        assert_close(feed(engine, handle, [4]), reference([1, 2, 3, 4]))


# --- no room, failures ------------------------------------------------------------------------------------------------


def test_no_branches_left_changes_nothing(exact: Path, reference: Reference) -> None:
    engine = load(exact, max_sequences=2, branches=2)
    first, second = engine.open(), engine.open()
    feed(engine, first, [1, 2])
    feed(engine, second, [3, 4])
    engine.forward([Step(first, [5, 6], [COMMITTED_END, COMMITTED_END], [])])
    with pytest.raises(NoRoomError, match="branches"):
        engine.forward(
            [Step(second, [5, 6], [COMMITTED_END] * 2, []), Step(first, [7, 8, 9], [0, 0, COMMITTED_END], [])]
        )
    check_ids(engine)
    output = engine.forward([Step(second, [5, 6], [COMMITTED_END] * 2, [0, 1]), chain(first, [7], after=1)])
    for step, number, text in [(0, 0, [3, 4, 5]), (0, 1, [3, 4, 6]), (1, 0, [1, 2, 6, 7])]:
        assert_close(output.logits(step, number), reference(text))


def test_idle_branches_of_other_sequences_are_taken(exact: Path, reference: Reference) -> None:
    engine = load(exact, max_sequences=2, branches=2)
    for text in ([1, 2], [3, 4], [1, 2]):
        sequence = engine.open()
        feed(engine, sequence, text)
        output = engine.forward([Step(sequence, [5, 6, 7], [COMMITTED_END] * 3, [0, 1, 2])])
        for number, token in enumerate([5, 6, 7]):
            assert_close(output.logits(0, number), reference([*text, token]))
        engine.commit(sequence, [1])
        check_ids(engine)
        if text == [3, 4]:
            engine.close_sequence(sequence)


def fail_by_abort(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    callbacks = [api.ggml_abort_callback(lambda _: True), api.ggml_abort_callback()]
    api.llama_set_abort_callback(engine._context, callbacks[0], None)
    return lambda: api.llama_set_abort_callback(engine._context, callbacks.pop(), None)


def fail_by_code(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Fail after the cells were written, which llama.cpp itself never does: the worst case for cleaning up."""
    real = api.llama_decode
    monkeypatch.setattr(api, "llama_decode", lambda *arguments: real(*arguments) - 3)
    return monkeypatch.undo


def fail_by_keyboard(engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    real = api.llama_decode

    def interrupted(*arguments: Any) -> int:
        real(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "llama_decode", interrupted)
    return monkeypatch.undo


@pytest.mark.parametrize("fail", [fail_by_abort, fail_by_code, fail_by_keyboard])
def test_a_failed_pass_changes_nothing(
    fail: Callable[[LlamaCppEngine, pytest.MonkeyPatch], Callable[[], None]],
    exact: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = load(exact, max_sequences=2)
    first, second = engine.open(), engine.open()
    feed(engine, first, [1, 2, 3])
    feed(engine, second, [4, 5])
    engine.forward([Step(first, [6, 7, 8], [COMMITTED_END, 0, 0], [])])
    repair = fail(engine, monkeypatch)
    with pytest.raises((EngineError, KeyboardInterrupt)):
        engine.forward([Step(first, [9, 10, 11, 12], [1, 1, 0, 2], []), chain(second, [13, 14])])
    repair()
    check_ids(engine)
    output = engine.forward(
        [Step(first, [15, 16], [1, 2], [0, 1]), Step(second, [17, 18], [COMMITTED_END] * 2, [0, 1])]
    )
    texts = [(0, 0, [1, 2, 3, 6, 7, 15]), (0, 1, [1, 2, 3, 6, 8, 16]), (1, 0, [4, 5, 17]), (1, 1, [4, 5, 18])]
    for step, number, text in texts:
        assert_close(output.logits(step, number), reference(text))
    engine.commit(first, [0, 2, 4])
    assert_close(feed(engine, first, [19]), reference([1, 2, 3, 6, 8, 16, 19]))


def test_without_branches_there_are_chains_only(exact: Path) -> None:
    engine = load(exact, branches=0)
    assert not engine.capabilities.trees
    with pytest.raises(ValueError, match="no trees"):
        engine.forward([Step(engine.open(), [1, 2], [COMMITTED_END, COMMITTED_END], [])])


# --- borrowed results, closing ----------------------------------------------------------------------------------------


def test_logits_are_borrowed_and_read_only(engine: LlamaCppEngine) -> None:
    sequence = engine.open()
    output = engine.forward([chain(sequence, [1, 2], outputs=[0, 1])])
    row = output.logits(0, 1)
    assert row.dtype == np.float32
    assert row.base is not None
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 0
    engine.forward([chain(sequence, [3], after=1)])
    output.wait()
    with pytest.raises(EngineError, match="another pass"):
        output.logits(0, 0)
    with pytest.raises(IndexError, match="outputs"):
        output.logits(0, 2)


def test_logits_are_those_of_so_many_rows(exact: Path) -> None:
    engine = load(exact, output_rows=4)
    with pytest.raises(ValueError, match=r"5 rows .* 4"):
        engine.forward([chain(engine.open(), [1] * 5, outputs=range(5))])


def test_after_closing_nothing_touches_freed_memory(exact: Path) -> None:
    engine = load(exact)
    vocabulary = engine.vocabulary
    sequence = engine.open()
    output = engine.forward([chain(sequence, [1])])
    output.logits(0, 0)
    engine.close()
    engine.close()
    for use in (
        lambda: engine.description,
        lambda: engine.vocabulary,
        lambda: engine.capabilities,
        lambda: output.logits(0, 0),
        output.wait,
        lambda: vocabulary.tokenize("text"),
        lambda: vocabulary.token_bytes(5),
        lambda: vocabulary.end_ids,
    ):
        with pytest.raises(ClosedError):
            use()


def test_an_engine_that_is_dropped_is_freed(exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[str] = []
    record(monkeypatch, "llama_model_free", freed)
    vocabulary = load(exact).vocabulary
    assert freed == ["llama_model_free"]
    with pytest.raises(ClosedError):
        vocabulary.tokenize("text")


def test_passes_run_on_as_many_threads_as_others_leave_cores_for(
    exact: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 2
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    monkeypatch.setattr(threads.SpareCores, "look", lambda self: free)
    engine, fixed = load(exact, threads=None), load(exact, threads=2)
    for free in (2, 1, 2):
        for made, expected in ((engine, free), (fixed, 2)):
            sequence = made.open()
            assert_close(feed(made, sequence, [5, 6, 7]), reference([5, 6, 7]))
            assert api.llama_n_threads(made._context) == api.llama_n_threads_batch(made._context) == expected
            made.close_sequence(sequence)


# --- recurrent models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "sequences", "expected"), [(5_400, 1, 16), (5_400, 4, 5), (5_400, 16, 4), (18_000, 4, 16)]
)
def test_recurrent_states_to_step_back_to_take_a_share_of_what_the_weights_take(
    weights: int, sequences: int, expected: int
) -> None:
    numbers = {
        "block_count": 33,
        "nextn_predict_layers": 1,
        "full_attention_interval": 4,
        "ssm.state_size": 128,
        "ssm.inner_size": 4096,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 16,
    }
    about = ModelDescription(
        Path("9b.gguf"),
        "gguf",
        num_bytes=weights << 20,
        architecture="qwen35",
        layers=33,
        metadata={f"qwen35.{key}": value for key, value in numbers.items()},
    )
    # The figures of the model's configuration: 50 MiB a row.
    assert model_settings._recurrent_state_bytes(about) / 2**20 == pytest.approx(50.25, abs=0.1)
    assert model_settings._count_snapshots(about, sequences) == expected


def test_a_recurrent_model_without_snapshots_decodes_plainly_or_not_at_all(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "mamba")
    for refused in (load, paceline.load):
        with pytest.raises(CapabilityError, match="`policy=NO_SPECULATION`"):
            refused(path)
    options = ModelOptions(path, threads=1, flash_attention=False)
    with paceline.load(options, policy=paceline.NO_SPECULATION) as model:
        assert len(model.generate([1, 2], max_tokens=4, ignore_end=True).token_ids) == 4
    reference = Reference(path, rollback=False)
    engine = load(path, max_sequences=3, rollback=False)
    assert (engine.capabilities.max_rollback, engine.capabilities.cells) == (0, None)
    sequence = engine.open()
    feed(engine, sequence, [1, 2, 3])
    assert_close(feed(engine, sequence, [5, 6]), reference([1, 2, 3, 5, 6]), 0.01)
    saved = engine.save(sequence)
    assert (saved.length, saved.floor) == (5, 5)
    feed(engine, sequence, [9, 9])
    restored = [engine.restore(saved), engine.restore(saved)]
    with pytest.raises(CapabilityError, match="step back"):
        engine.trim(restored[0], 4)
    engine.close_sequence(sequence)
    for token_id, handle in enumerate(restored, 10):
        assert_close(feed(engine, handle, [token_id]), reference([1, 2, 3, 5, 6, token_id]), 0.01)
    assert_close(feed(engine, engine.fork(restored[1]), [12]), reference([1, 2, 3, 5, 6, 11, 12]), 0.01)


@pytest.mark.parametrize("where", ["forward", "commit"])
@pytest.mark.parametrize("fault", [KeyboardInterrupt, EngineError])
def test_what_cuts_short_a_round_of_a_hybrid_model_touches_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException], where: str
) -> None:
    engine = load(write_model(tmp_path / "model.gguf", "lfm2"), max_sequences=3)
    with closing(engine):
        loop = DecodingLoop(engine, [SuffixDrafter()], paceline.FixedPolicy(4))
        rules = paceline.StopRules(30, ignore_end=True)
        prompts = [[1, 2, 3, 1, 2, 3], [4, 5, 4, 5, 4]]

        def add(prompt: list[int]) -> Request:
            return loop.add(prompt, paceline.SamplingParams(0.0), rules)

        undisturbed = []
        for prompt in prompts:
            request = add(prompt)
            while loop.active:
                loop.step()
            undisturbed.append(request.output_ids)
        real, calls = getattr(LlamaCppEngine, where), 0

        def failing(self: LlamaCppEngine, *arguments: Any) -> Any:
            nonlocal calls
            result = real(self, *arguments)
            calls += 1
            if calls % 7 == 0:
                raise fault("cut short")
            return result

        requests = [add(prompt) for prompt in prompts]
        monkeypatch.setattr(LlamaCppEngine, where, failing)
        cut_short = 0
        while loop.active:
            try:
                loop.step()
            except fault:
                cut_short += 1
        assert cut_short > 2
        monkeypatch.setattr(LlamaCppEngine, where, real)
        for request, expected in zip(requests, undisturbed, strict=True):
            assert request.output_ids == expected
        assert not engine._sequences


def test_a_sequence_that_was_torn_can_be_closed_and_all_its_ids_are_free(
    engine: LlamaCppEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, torn = engine.open(), engine.open()
    for sequence in (kept, torn):
        feed(engine, sequence, [5, 6, 7])
    engine.forward([Step(torn, [8, 9, 10], [COMMITTED_END] * 3, [0, 1, 2])])

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(api, "llama_memory_seq_rm", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.commit(torn, [1])
    for call in (lambda: engine.length(torn), lambda: engine.trim(torn, 2), lambda: engine.commit(torn, [])):
        with pytest.raises(EngineError, match="close it and open another"):
            call()
    engine.close_sequence(torn)
    check_ids(engine)
    assert engine.length(kept) == 3


# --- files that do not load -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"root:x:0", "is not a GGUF file: it begins with 'root'; convert the model"),
        (slice(0, -1), "truncated or damaged: its tensors end at byte"),
        ((b"llama", b"lxama"), "unknown model architecture: 'lxama'; a newer llama-cpp-python"),
        ((b"llama.block_count", b"llama.black_count"), "key not found in model: llama.block_count"),
    ],
)
def test_a_bad_file_gives_one_line(
    content: bytes | slice | tuple[bytes, bytes], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = DRAFT.read_bytes()
    if isinstance(content, slice):
        content = good[content]
    elif isinstance(content, tuple):
        content = good.replace(*content)
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=says) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    assert ";" in message  # a way out
    assert "\n" not in message
    assert capfd.readouterr() == ("", "")


def test_a_split_model_is_run_from_its_first_part(tmp_path: Path) -> None:
    parts = split_gguf(DRAFT, tmp_path)
    answers = []
    for path in (parts[0], DRAFT):
        options = ModelOptions(path, threads=1, flash_attention=False)
        with paceline.load(options, policy=paceline.NO_SPECULATION) as model:
            answers.append(model.generate("def f(x):", max_tokens=8, temperature=0).token_ids)
    assert answers[0] == answers[1]
    with pytest.raises(ModelFileError, match=f"is part 2 of a split model; give the first part, {parts[0].name}"):
        load(parts[1])
    parts[2].unlink()
    with pytest.raises(ModelFileError, match=f"beside it {parts[2].name} is missing"):
        load(parts[0])


def test_a_vocabulary_is_no_model(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match="a vocabulary and no weights; give the file of a whole model"):
        load(tmp_path / "vocabulary.gguf")


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no file"):
        load(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="is a directory"):
        load(tmp_path)


def test_encoder_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "llama_model_has_encoder", lambda model: True)
    with pytest.raises(CapabilityError, match="decoder-only"):
        load(DRAFT)
    monkeypatch.undo()
    monkeypatch.setattr(api, "llama_get_causal_attn", lambda context: False)
    with pytest.raises(CapabilityError, match="embedding model"):
        load(DRAFT)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"batch_rows": -1}, "batch_rows is -1"),
        ({"cells": 100}, "cells is 100, but one context is 256"),
        ({"max_sequences": 250, "branches": 20}, "270 sequence ids"),
        ({"devices": ("CUDA7",)}, "device 'CUDA7' is not available; choose from "),
        (
            {"override_tensors": (("ffn", "CUDA7"),)},
            "buffer type 'CUDA7' of ffn=CUDA7 .`override_tensors`. is unknown; choose from .*CPU",
        ),
        ({"context_length": 2**31 - 1}, "2147483647 tokens is more than the "),
        ({"cells": 2**31 - 1}, "GiB are free"),
    ],
)
def test_a_bad_setting_gives_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        load(DRAFT, **settings)
    assert "\n" not in str(caught.value)


def test_a_cache_that_does_not_fit_is_refused_before_the_system_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model.gguf", "llama")
    # Two layers of two heads, 16 numbers each, twice, of four bytes; and what llama.cpp notes about a cell.
    cell_bytes = 2 * 2 * 16 * 2 * 4 + 52
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: 256 * cell_bytes)
    load(path, stream=False, context_length=256).close()
    monkeypatch.setattr("paceline.engines.memory.available_memory", lambda: 100 * cell_bytes)
    with pytest.raises(
        InputError,
        match=r"take at most 100 tokens \(`context_length`, or ",
    ):
        load(path, stream=False, context_length=256)
    load(path, stream=False, context_length=100).close()


def test_the_default_context_is_the_trained_one_up_to_a_cap(tmp_path: Path) -> None:
    assert LlamaCppEngine(ModelOptions(DRAFT, threads=1)).capabilities.context_length == 4096
    path = write_model(tmp_path / "model.gguf", "llama")
    assert LlamaCppEngine(ModelOptions(path, threads=1)).capabilities.context_length == 256
    assert load(path, context_length=200).capabilities.context_length == 200
    with pytest.raises(ContextLengthError, match="300 tokens is more than the 256"):
        load(path, context_length=300)


def test_cpu_only_and_pinned_tensors(exact: Path, reference: Reference) -> None:
    engine = load(exact, devices=("none",), override_tensors=(("ffn_.*", "CPU"),))
    assert "on CPU" in engine.description
    assert "F32" in engine.description
    assert_close(feed(engine, engine.open(), [1, 2]), reference([1, 2]))


def test_a_gpu_is_described_by_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # The processor in a GPU's place: what costs were measured on must not be known by a name that every machine uses.
    processor = next(device for device in native._all_devices() if native._device_type(device) == 0)
    monkeypatch.setattr(native, "offload_devices", lambda: {"CUDA0": processor})
    (title,) = native.device_titles(("CUDA0",))
    assert title.startswith("CUDA0 (")
    assert len(title) > len("CUDA0 ()")


def test_flash_attention_only_rounds_differently(exact: Path, reference: Reference) -> None:
    engine = load(exact, flash_attention=True)
    assert engine.capabilities.logit_tolerance > load(exact).capabilities.logit_tolerance
    assert_close(feed(engine, engine.open(), [1, 2, 3]), reference([1, 2, 3]), engine.capabilities.logit_tolerance)


def test_the_log_is_silent_unless_asked_for(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load(DRAFT).close()
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(native.log, "verbose", False)  # restored afterwards
    load(DRAFT, verbose=True).close()
    assert "llama_model_loader" in capfd.readouterr().err


# --- vocabulary -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "def f(x):\n    return x + 1\n",
        " leading and trailing ",
        "naïve façade Ωμέγα",
        "日本語のテキスト",
        "👩‍👩‍👧 🎉🏳️‍🌈",
        "nul\0inside\0",
        "<|endoftext|> spelled out",
        "x" * 5000,
    ],
)
def test_tokens_spell_the_text(engine: LlamaCppEngine, text: str) -> None:
    vocabulary = engine.vocabulary
    token_ids = vocabulary.tokenize(text)
    assert b"".join(map(vocabulary.token_bytes, token_ids)).decode() == text
    assert not vocabulary.end_ids.intersection(token_ids)


def test_control_tokens_are_read_only_where_asked_and_add_no_text(engine: LlamaCppEngine) -> None:
    vocabulary = engine.vocabulary
    (end,) = vocabulary.end_ids
    assert vocabulary.tokenize("a<|endoftext|>", parse_special=True)[-1] == end
    assert vocabulary.token_bytes(end) == b""
    for wrong in (-1, vocabulary.size):
        with pytest.raises(ValueError, match=str(wrong)):
            vocabulary.token_bytes(wrong)


def test_an_answer_ends_where_llama_cpp_ends_it(tmp_path: Path) -> None:
    """A token that the file names is no end where llama.cpp knows it to close messages, as in gpt-oss."""
    path = with_last_tokens(tmp_path / "model.gguf", ["<|end|>", "<|return|>", "<|call|>"], eot_token_id=4093)
    engine = LlamaCppEngine(ModelOptions(path, context_length=64, threads=1))
    try:
        assert engine.vocabulary.end_ids == read_end_ids(path) == {0, 4094, 4095}
    finally:
        engine.close()


def test_what_the_vocabulary_says_of_itself(engine: LlamaCppEngine) -> None:
    vocabulary = engine.vocabulary
    assert (vocabulary.kind, vocabulary.size, vocabulary.end_ids) == ("bpe", 4096, frozenset({0}))
    with pytest.raises(InputError, match="character 2"):
        vocabulary.tokenize("ab\ud83d")


# So small a vocabulary lacks the special tokens that some kinds take for granted.
@pytest.mark.filterwarnings("ignore::paceline.core.errors.ModelWarning")
@pytest.mark.parametrize("tokenizer", ["llama", "gpt2", "bert", "t5"])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
def test_no_prompt_is_closed(tokenizer: str, add_bos: bool, add_eos: bool, tmp_path: Path) -> None:
    """llama.cpp ends a text with an end token where the file says so, and one of BERT's kind always."""
    path = write_model(
        tmp_path / "model.gguf", "llama", tokenizer=tokenizer, add_bos_token=add_bos, add_eos_token=add_eos
    )
    engine = load(path)
    vocabulary = engine.vocabulary
    begin, end = 1, 2
    closes = add_eos or tokenizer == "bert"
    opens = add_bos or tokenizer == "bert"
    for text in ("", "a", "ha", " hi ha"):
        body = vocabulary.tokenize(text, add_special=False)
        assert vocabulary.tokenize(text) == [begin] * opens + body
        as_llama_cpp_has_it = vocabulary._encode(text, add_special=True, parse_special=False)
        assert as_llama_cpp_has_it == [begin] * opens + body + [end] * closes
    closed = vocabulary.tokenize("ha</s>", parse_special=True)
    assert closed[-1] == end, "what the caller wrote stays"
    assert closed[-2] != end
    assert vocabulary.tokenize("</s>", parse_special=True) == [begin] * opens + [end]


@pytest.mark.filterwarnings("ignore::paceline.core.errors.ModelWarning")
@pytest.mark.parametrize("tokenizer", ["llama", "gpt2", "bert", "t5"])
def test_spellings_tell_control_tokens_apart_and_leave_out_padding(tokenizer: str, tmp_path: Path) -> None:
    engine = load(write_model(tmp_path / "model.gguf", "llama", tokenizer=tokenizer))
    vocabulary = engine.vocabulary
    spellings = [vocabulary.token_spelling(token_id) for token_id in range(vocabulary.size)]
    assert spellings[:6] == [b"<unk>", b"<s>", b"</s>", b"<turn>", b"<tool>", b"a"]
    assert spellings[34] == b"[PAD1]", "an ordinary token, whatever it looks like"
    assert spellings[35:] == [None] * (VOCABULARY_SIZE - 35)
    for token_id in (4, *range(5, 31)):
        assert vocabulary.token_bytes(token_id) == spellings[token_id]
    for wrong in (-1, vocabulary.size):
        with pytest.raises(ValueError, match=str(wrong)):
            vocabulary.token_spelling(wrong)


def test_a_file_without_tokenizer(tmp_path: Path) -> None:
    engine = load(write_model(tmp_path / "model.gguf", "llama"))
    vocabulary = engine.vocabulary
    assert (vocabulary.kind, vocabulary.size, vocabulary.end_ids) == ("none", VOCABULARY_SIZE, frozenset())
    assert vocabulary.token_bytes(3) == b""
    assert vocabulary.token_spelling(3) == b""
    assert relate_vocabularies(vocabulary, vocabulary).num_same == VOCABULARY_SIZE, (
        "its ids are all there is to compare"
    )
    with pytest.raises(CapabilityError, match="no tokenizer"):
        vocabulary.tokenize("text")


# --- quantising -------------------------------------------------------------------------------------------------------


def test_quantising_writes_a_model_of_that_type(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    plain = load(DRAFT)
    wanted = feed(plain, plain.open(), [1, 2, 3])
    for file_type, name, tolerance in (("f16", "F16", 0.1), ("Q4_K_M", "Q4_K - Medium", 2.0)):
        quantize_gguf(DRAFT, path, file_type)
        engine = load(path)
        assert name in engine.description
        assert_close(feed(engine, engine.open(), [1, 2, 3]), wanted, tolerance)
        engine.close()
    assert list(tmp_path.iterdir()) == [path]


def test_quantising_explains_itself(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(DRAFT.read_bytes()[:9000])
    with pytest.raises(InputError, match=r"'Q9' is unknown; choose from .*Q8_0"):
        quantize_gguf(DRAFT, tmp_path / "out.gguf", "Q9")
    with pytest.raises(InputError, match="no directory"):
        quantize_gguf(DRAFT, tmp_path / "missing" / "out.gguf", "F16")
    with pytest.raises(ModelFileError, match="truncated or damaged"):
        quantize_gguf(bad, tmp_path / "out.gguf", "F16")
    assert list(tmp_path.iterdir()) == [bad]


@pytest.mark.parametrize(
    ("compiler", "features", "doubtful"),
    [
        (b"GCC: (Debian 12.2.0-14+deb12u1) 12.2.0", b"CPU : AMX_INT8 = 1 | REPACK = 1", True),
        (b"GCC: (Ubuntu 13.3.0-6ubuntu2~24.04) 13.3.0", b"CPU : AMX_INT8 = 1", True),
        (b"GCC: (GNU) 14.1.0", b"CPU : AMX_INT8 = 1", False),
        (b"GCC: (Debian 12.2.0-14+deb12u1) 12.2.0\0" + native._MENDED, b"CPU : AMX_INT8 = 1", False),
        (b"Debian clang version 14.0.6", b"CPU : AMX_INT8 = 1", False),
        (b"GCC: (Debian 12.2.0-14+deb12u1) 12.2.0", b"CPU : AVX2 = 1", False),
    ],
)
def test_builds_whose_amx_code_crashes_are_refused(
    compiler: bytes, features: bytes, doubtful: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"\x7fELF\0" + compiler + b"\0")
    monkeypatch.setattr("llama_cpp.llama_cpp.llama_print_system_info", lambda: features)
    monkeypatch.setattr(native, "_cpu_libraries", lambda: [library])
    # Not the remembered verdict about the libraries that are installed.
    check = native.check_build.__wrapped__
    # These do not crash, whoever compiled them.
    check()
    monkeypatch.setattr(native, "_WIDE_PASS", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    if not doubtful:
        check()
        return
    with pytest.raises(CapabilityError, match="compiled its AMX code wrongly") as refused:
        check()
    assert "paceline engine --build cpu" in str(refused.value)
    monkeypatch.setattr(native, "_WIDE_PASS", "raise SystemExit('anything else that goes wrong shows itself later')")
    check()
