"""What every engine promises: one suite over all of them, the exact scripted one included.

The reference for any row is the same tokens fed as a plain chain to a sequence of their own. Engines in floating point
may differ from it by what their capabilities call rounding, and by nothing more.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import random
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest
from tests.engines.tiny_models import write_model
from tests.models.helpers import in_f32
from tests.tiers import by_tier, some_long

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, ClosedError, ModelWarning, NoRoomError
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.options import OUTPUT_STATE, ModelOptions
from paceline.engines.scripted import ScriptedEngine, ScriptedVocabulary, random_model
from paceline.models.embedded import embedded_draft

MAX_ROWS = 32
PROMPT = [11, 42, 7, 99, 3, 3, 250, 17]


def scripted(cells: int | None = None, max_rollback: int | None = None) -> Engine:
    return ScriptedEngine(
        random_model(300, seed=5, order=4),
        ScriptedVocabulary.of_size(300, end_ids=[0]),
        context_length=128,
        max_rows=MAX_ROWS,
        max_sequences=4,
        cells=cells,
        max_rollback=max_rollback,
        state_of=lambda tokens: np.array([len(tokens), sum(tokens), tokens[-1]], np.float32),
        state_width=3,
    )


@functools.cache
def draft_folder() -> Path:
    """The embedded draft as a Hugging Face folder, written once: transformers takes a second to open the GGUF file."""
    from paceline.conversion.convert import gguf_to_folder

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    gguf_to_folder(embedded_draft(), folder / "draft", dtype="F32")
    return folder / "draft"


def llama_cpp(cells: int | None = None) -> Engine:
    return _exact_llama_cpp(embedded_draft(), cells)


def streamed(cells: int | None = None) -> Engine:
    """llama.cpp with most of its layers read for every pass."""
    return _streamed_llama_cpp(embedded_draft(), cells, 1 << 17)


def _streamed_llama_cpp(source: Path, cells: int | None, section_bytes: int) -> Engine:
    from tests.engines.streamed import ASKED_BYTES, mostly_streamed

    if sys.platform != "linux":
        pytest.skip("weights are streamed on Linux alone")
    with mostly_streamed(section_bytes):
        return _exact_llama_cpp(source, cells, ASKED_BYTES)


def _exact_llama_cpp(
    source: Path, cells: int | None, memory_bytes: int | None = None, *, hold_states: tuple[int, ...] = ()
) -> Engine:
    from paceline.engines.llama_cpp import LlamaCppEngine

    options = dataclasses.replace(_exact_options(source, cells), memory=memory_bytes, hold_states=hold_states)
    return LlamaCppEngine(options, batch_rows=MAX_ROWS)


def _exact_options(source: Path, cells: int | None, workers: tuple[str, ...] = ()) -> ModelOptions:
    # Nothing is rounded with F32 weights and cache: rows have to be equal.
    return ModelOptions(
        in_f32(source),
        context_length=128,
        max_sequences=4,
        cells=cells,
        branches=12,
        threads=1,
        cache_type_k="f32",
        cache_type_v="f32",
        rpc=workers,
        flash_attention=False if workers else None,  # as over RPC, where llama.cpp would fuse it as on a GPU
    )


def in_a_process(cells: int | None = None, workers: tuple[str, ...] = ()) -> Engine:
    """llama.cpp in a process of its own, as it is where layers lie on other machines."""
    from paceline.engines.rpc.engine import RpcEngine

    return RpcEngine(_exact_options(embedded_draft(), cells, workers), batch_rows=MAX_ROWS)


def hybrid_in_a_process(cells: int | None = None, workers: tuple[str, ...] = ()) -> Engine:
    from paceline.engines.rpc.engine import RpcEngine

    return RpcEngine(_exact_options(tiny("qwen35"), cells, workers), batch_rows=MAX_ROWS)


def failed_over(cells: int | None = None, workers: tuple[str, ...] = ()) -> Engine:
    """llama.cpp in this process, after the one that had the model was lost."""
    from paceline.engines.rpc.engine import RpcEngine
    from paceline.engines.rpc.failover import FailoverEngine

    first = RpcEngine(_exact_options(embedded_draft(), cells, workers), batch_rows=MAX_ROWS)
    engine = FailoverEngine(first, lambda: llama_cpp(cells))
    first._process._lose_worker("a worker was lost")
    with pytest.warns(ModelWarning, match="a worker was lost: going on with"):
        engine.close_sequence(engine.open())
    return engine


@functools.cache
def tiny(architecture: str) -> Path:
    """A random model of an architecture that no embedded model has, written once."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    return write_model(folder / f"{architecture}.gguf", architecture, tokenizer="bytes", mtp=architecture == "qwen35")


def windowed(cells: int | None = None) -> Engine:
    """llama.cpp with layers that look back 48 tokens."""
    return _exact_llama_cpp(tiny("gemma3"), cells)


def hybrid(cells: int | None = None) -> Engine:
    """llama.cpp with layers of attention and of a recurrent state."""
    return _exact_llama_cpp(tiny("qwen35"), cells)


def hybrid_with_states(cells: int | None = None) -> Engine:
    return _exact_llama_cpp(tiny("qwen35"), cells, hold_states=(OUTPUT_STATE,))


def streamed_hybrid(cells: int | None = None) -> Engine:
    return _streamed_llama_cpp(tiny("qwen35"), cells, 1 << 14)


def convolved(cells: int | None = None) -> Engine:
    """llama.cpp with layers of attention and of a convolution."""
    return _exact_llama_cpp(tiny("lfm2"), cells)


def scripted_hybrid(cells: int | None = None) -> Engine:
    return scripted(cells, max_rollback=16)


def torch_hf(cells: int | None = None) -> Engine:
    pytest.importorskip("torch", reason="needs paceline[torch]")
    from paceline.engines.torch_hf import TorchHFEngine

    return TorchHFEngine(
        ModelOptions(draft_folder(), context_length=128, max_sequences=4, threads=1, cells=cells), max_rows=MAX_ROWS
    )


WITH_TREES = [scripted, llama_cpp, in_a_process, failed_over, streamed, torch_hf, windowed]
BOUNDED = [scripted_hybrid, hybrid, hybrid_in_a_process, hybrid_with_states, streamed_hybrid, convolved]
"""Those that step back over rows of their latest pass alone."""
IN_A_PROCESS = [in_a_process, hybrid_in_a_process, failed_over]
"""Those whose layers lie on the workers of ``--rpc`` where that is given."""


def only(engines: Sequence[Callable[..., Engine]]) -> pytest.MarkDecorator:
    """Run a test over some engines alone."""
    return pytest.mark.parametrize("make_engine", engines, indirect=True, ids=lambda make: make.__name__)


@pytest.fixture(params=[*WITH_TREES, *BOUNDED], ids=lambda make: make.__name__)
def make_engine(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    make: Callable[..., Engine] = request.param
    workers = request.config.getoption("--rpc")
    return functools.partial(make, workers=tuple(workers.split(","))) if workers and make in IN_A_PROCESS else make


@pytest.fixture
def engine(make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    engine.close()


def chain(sequence: int, token_ids: Sequence[int], outputs: Sequence[int] | None = None, first: int = -1) -> Step:
    """A step that feeds ``token_ids`` one after the other, below pending node ``first``."""
    rows = range(len(token_ids)) if outputs is None else outputs
    return Step(sequence, token_ids, range(first, first + len(token_ids)), rows)


def reference(engine: Engine, token_ids: Sequence[int]) -> FloatArray:
    """The row after ``token_ids``, by a sequence of its own."""
    sequence = engine.open()
    for start in range(0, len(token_ids), MAX_ROWS):
        chunk = token_ids[start : start + MAX_ROWS]
        output = engine.forward([chain(sequence, chunk, outputs=[len(chunk) - 1])])
        engine.commit(sequence, range(len(chunk)))
    row: FloatArray = output.logits(0, 0).copy()
    engine.close_sequence(sequence)
    return row


def rounding(engine: Engine) -> float:
    # Gemma's activation is read from a table of half precision, also with weights in F32.
    return max(engine.capabilities.logit_tolerance, 2e-3 if "gemma" in engine.description else 0.0)


def states_after(engine: Engine, token_ids: Sequence[int]) -> FloatArray:
    """The states of ``token_ids``, by a sequence of its own."""
    sequence = engine.open()
    for start in range(0, len(token_ids), MAX_ROWS):
        chunk = token_ids[start : start + MAX_ROWS]
        engine.forward([chain(sequence, chunk, outputs=[])])
        engine.commit(sequence, range(len(chunk)))
    states = engine.states(sequence, 0, len(token_ids)).copy()
    engine.close_sequence(sequence)
    return states


def assert_same_states(engine: Engine, sequence: int, token_ids: Sequence[int], by: Engine) -> None:
    """Compare what an engine holds of some tokens with what another one makes of them."""
    if engine.capabilities.state_width and token_ids:
        held = engine.states(sequence, engine.first_state(sequence), len(token_ids))
        assert engine.first_state(sequence) == 0
        np.testing.assert_allclose(held, states_after(by, token_ids), rtol=0, atol=rounding(engine))


def assert_same_row(engine: Engine, actual: FloatArray, expected: FloatArray) -> None:
    assert actual.shape == (engine.vocabulary.size,)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(engine))


def prefilled(engine: Engine, token_ids: Sequence[int] = PROMPT) -> int:
    sequence = engine.open()
    engine.forward([chain(sequence, token_ids, outputs=[])])
    engine.commit(sequence, range(len(token_ids)))
    return sequence


def test_a_chain_gives_the_row_of_every_prefix(engine: Engine) -> None:
    sequence = engine.open()
    output = engine.forward([chain(sequence, PROMPT)])
    output.wait()
    rows = [output.logits(0, row).copy() for row in range(len(PROMPT))]
    for length, row in enumerate(rows, start=1):
        assert_same_row(engine, row, reference(engine, PROMPT[:length]))


def test_rows_differ_by_more_than_rounding(engine: Engine) -> None:
    """The comparisons of this suite could not fail if every row looked alike."""
    other = [*PROMPT[:-1], PROMPT[-1] + 1]
    difference = np.abs(reference(engine, PROMPT) - reference(engine, other)).max()
    assert difference > 10 * max(rounding(engine), 1e-6)


def test_only_requested_rows_are_returned_in_their_order(engine: Engine) -> None:
    sequence = engine.open()
    output = engine.forward([chain(sequence, PROMPT, outputs=[1, 4])])
    second, fifth = output.logits(0, 0).copy(), output.logits(0, 1).copy()
    assert_same_row(engine, second, reference(engine, PROMPT[:2]))
    assert_same_row(engine, fifth, reference(engine, PROMPT[:5]))


@only(WITH_TREES)
def test_a_tree_gives_each_node_its_own_path(engine: Engine) -> None:
    sequence = prefilled(engine)
    #   0 ─┬─ 1 ─── 3
    #      └─ 2 ─┬─ 4
    #            └─ 5
    tokens, parents = [20, 21, 22, 23, 24, 25], [COMMITTED_END, 0, 0, 1, 2, 2]
    output = engine.forward([Step(sequence, tokens, parents, range(6))])
    rows = [output.logits(0, node).copy() for node in range(6)]
    for node, path in enumerate([[20], [20, 21], [20, 22], [20, 21, 23], [20, 22, 24], [20, 22, 25]]):
        assert_same_row(engine, rows[node], reference(engine, PROMPT + path))


@only(WITH_TREES)
def test_a_tree_grows_over_several_passes_below_any_pending_node(engine: Engine) -> None:
    sequence = prefilled(engine)
    engine.forward([Step(sequence, [20], [COMMITTED_END], [0])])
    engine.forward([Step(sequence, [21, 22], [0, 0], [0, 1])])
    engine.forward([Step(sequence, [23, 24], [1, 1], [])])
    # Below a node that was a leaf, below one that was not, and below the committed end again.
    output = engine.forward([Step(sequence, [25, 26, 27], [2, 0, COMMITTED_END], range(3))])
    rows = [output.logits(0, row).copy() for row in range(3)]
    for row, path in zip(rows, [[20, 22, 25], [20, 26], [27]], strict=True):
        assert_same_row(engine, row, reference(engine, PROMPT + path))


@only(WITH_TREES)
@pytest.mark.parametrize(
    ("path", "tokens"),
    [([], []), ([0], [20]), ([0, 1, 3], [20, 21, 23]), ([0, 2], [20, 22]), ([0, 2, 5], [20, 22, 25])],
)
def test_commit_keeps_one_path_and_forgets_the_rest(engine: Engine, path: list[int], tokens: list[int]) -> None:
    sequence = prefilled(engine)
    step = Step(sequence, [20, 21, 22, 23, 24, 25], [COMMITTED_END, 0, 0, 1, 2, 2], [])
    engine.forward([step])
    engine.commit(sequence, path)
    assert engine.length(sequence) == len(PROMPT) + len(path)
    output = engine.forward([Step(sequence, [30, 31], [COMMITTED_END, COMMITTED_END], range(2))])
    rows = [output.logits(0, row).copy() for row in range(2)]
    assert_same_row(engine, rows[0], reference(engine, [*PROMPT, *tokens, 30]))
    assert_same_row(engine, rows[1], reference(engine, [*PROMPT, *tokens, 31]))


@only(WITH_TREES)
def test_commit_refuses_what_is_not_a_path(engine: Engine) -> None:
    sequence = prefilled(engine)
    engine.forward([Step(sequence, [20, 21, 22], [COMMITTED_END, 0, 0], [])])
    for path in ([1], [0, 1, 2], [0, 3], [-1]):
        with pytest.raises(ValueError, match="path"):
            engine.commit(sequence, path)
    engine.commit(sequence, [0, 2])
    assert engine.length(sequence) == len(PROMPT) + 2


@only(WITH_TREES)
def test_sequences_share_passes_and_nothing_else(engine: Engine) -> None:
    texts = [[5, 6, 7], [5, 6, 8, 9], [77]]
    sequences = [engine.open() for _ in texts]
    engine.forward([chain(s, t, outputs=[]) for s, t in zip(sequences, texts, strict=True)])
    for sequence, text in zip(sequences, texts, strict=True):
        engine.commit(sequence, range(len(text)))
    engine.close_sequence(sequences.pop(1))
    del texts[1]
    output = engine.forward([Step(s, [33, 34], [COMMITTED_END, COMMITTED_END], [0, 1]) for s in sequences])
    rows = [[output.logits(step, row).copy() for row in range(2)] for step in range(2)]
    for text, (first, second) in zip(texts, rows, strict=True):
        assert_same_row(engine, first, reference(engine, [*text, 33]))
        assert_same_row(engine, second, reference(engine, [*text, 34]))


def test_a_fork_goes_its_own_way(engine: Engine) -> None:
    sequence = prefilled(engine)
    fork = engine.fork(sequence)
    assert engine.length(fork) == len(PROMPT)
    engine.forward([chain(sequence, [40, 41], outputs=[])])
    engine.commit(sequence, [0, 1])
    engine.close_sequence(sequence)
    output = engine.forward([chain(fork, [50])])
    row = output.logits(0, 0).copy()
    assert_same_row(engine, row, reference(engine, [*PROMPT, 50]))


@only(WITH_TREES)
def test_trim_takes_committed_and_pending_tokens_back(engine: Engine) -> None:
    sequence = prefilled(engine)
    engine.forward([Step(sequence, [20, 21], [COMMITTED_END, COMMITTED_END], [])])
    engine.trim(sequence, 3)
    assert engine.length(sequence) == 3
    row = engine.forward([chain(sequence, [60])]).logits(0, 0).copy()
    assert_same_row(engine, row, reference(engine, [*PROMPT[:3], 60]))
    engine.trim(sequence, 0)
    row = engine.forward([chain(sequence, [61])]).logits(0, 0).copy()
    assert_same_row(engine, row, reference(engine, [61]))
    with pytest.raises(ValueError, match="keep"):
        engine.trim(sequence, 5)


@only(WITH_TREES)
def test_what_was_saved_goes_on_where_it_stood(engine: Engine) -> None:
    sequence = prefilled(engine)
    saved = engine.save(sequence)
    assert (saved.length, saved.floor) == (len(PROMPT), 0)
    assert saved.num_bytes == engine.saved_bytes(sequence) > 0
    engine.close_sequence(sequence)
    prefilled(engine, [9, 9, 9])  # takes the cells
    restored = engine.restore(saved)
    assert engine.length(restored) == len(PROMPT)
    step = Step(restored, [20, 21, 22, 23], [COMMITTED_END, COMMITTED_END, 0, 0], range(4))
    output = engine.forward([step])
    rows = [output.logits(0, row).copy() for row in range(4)]
    for row, path in zip(rows, [[20], [21], [20, 22], [20, 23]], strict=True):
        assert_same_row(engine, row, reference(engine, PROMPT + path))
    engine.commit(restored, [0, 3])
    engine.trim(restored, len(PROMPT) + 1)
    row = engine.forward([chain(restored, [24])]).logits(0, 0).copy()
    assert_same_row(engine, row, reference(engine, [*PROMPT, 20, 24]))
    engine.trim(restored, 3)
    row = engine.forward([chain(restored, [25])]).logits(0, 0).copy()
    assert_same_row(engine, row, reference(engine, [*PROMPT[:3], 25]))


def test_saving_changes_nothing_and_serves_more_than_once(engine: Engine) -> None:
    sequence = prefilled(engine)
    fork = engine.fork(sequence)
    saved = engine.save(fork)
    engine.forward([chain(sequence, [40, 41], outputs=[])])
    engine.commit(sequence, [0, 1])
    restored = [engine.restore(saved), engine.restore(saved)]
    tokens = {sequence: [*PROMPT, 40, 41], fork: PROMPT, restored[0]: PROMPT, restored[1]: PROMPT}
    output = engine.forward([chain(handle, [50 + at]) for at, handle in enumerate(tokens)])
    rows = [output.logits(at, 0).copy() for at in range(4)]
    for handle in restored:
        engine.close_sequence(handle)
    for at, (row, text) in enumerate(zip(rows, tokens.values(), strict=True)):
        assert_same_row(engine, row, reference(engine, [*text, 50 + at]))


def test_an_empty_sequence_can_be_saved(engine: Engine) -> None:
    saved = engine.save(engine.open())
    assert saved.length == 0
    restored = engine.restore(saved)
    row = engine.forward([chain(restored, [60])]).logits(0, 0).copy()
    assert_same_row(engine, row, reference(engine, [60]))


def test_pending_nodes_and_the_saved_of_others_are_refused(make_engine: Callable[..., Engine], engine: Engine) -> None:
    sequence = prefilled(engine)
    other = make_engine()
    foreign = other.save(prefilled(other))
    with pytest.raises(ValueError, match="saved"):
        engine.restore(foreign)
    other.close()
    engine.forward([chain(sequence, [20], outputs=[])])
    for ask in (engine.save, engine.fork):
        with pytest.raises(ValueError, match="pending"):
            ask(sequence)


def test_without_room_nothing_is_restored_and_nothing_changes(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(256)  # llama.cpp takes cells by so many
    assert engine.capabilities.cells == 256
    text = list(range(1, 31))
    sequence = prefilled(engine, text)
    saved = engine.save(sequence)
    others = [prefilled(engine, text) for _ in range(3)]
    with pytest.raises(CapabilityError, match="4"):
        engine.restore(saved)
    engine.close_sequence(sequence)
    engine.close_sequence(others.pop())
    for other in others:
        for _ in range(3):
            engine.forward([chain(other, text, outputs=[])])
            engine.commit(other, range(30))
    with pytest.raises(NoRoomError, match="cells"):
        engine.restore(saved)
    engine.close_sequence(others.pop())
    output = engine.forward([chain(engine.restore(saved), [70]), chain(others[0], [71])])
    roomy = make_engine()
    for step, expected in enumerate([[*text, 70], [*text * 4, 71]]):
        row = output.logits(step, 0).copy()
        assert_same_row(engine, row, reference(roomy, expected))
    roomy.close()
    engine.close()


def test_cells_that_forks_share_count_once(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(256)
    sequence = prefilled(engine, range(1, 31))
    for _ in range(3):
        engine.forward([chain(sequence, range(1, 31), outputs=[])])
        engine.commit(sequence, range(30))
    forks = [engine.fork(sequence) for _ in range(3)]
    assert sum(map(engine.length, [sequence, *forks])) == 480
    engine.forward([chain(handle, range(1, 9), outputs=[]) for handle in [sequence, *forks]])
    engine.close()


def test_a_step_that_breaks_the_contract_changes_nothing(engine: Engine) -> None:
    sequence = prefilled(engine)
    bad_steps = [
        [Step(sequence, [1], [0], [])],  # follows a node that is not pending
        [Step(sequence, [1, 2], [COMMITTED_END, 1], [])],  # follows itself
        [Step(sequence, [1], [COMMITTED_END], [1])],  # wants a row that is not there
        [Step(sequence, [1, 2], [COMMITTED_END, 0], [1, 0])],  # wants rows out of order
        [Step(sequence, [], [], [])],  # has no rows
        [Step(sequence, [engine.vocabulary.size], [COMMITTED_END], [])],  # an unknown token
        [Step(sequence, [-1], [COMMITTED_END], [])],
        [chain(sequence, [1] * (MAX_ROWS + 1), outputs=[])],  # more rows than a pass takes
        [chain(sequence, [1], outputs=[]), chain(sequence, [2], outputs=[])],  # two steps for one sequence
        [],
    ]
    for steps in bad_steps:
        with pytest.raises(ValueError, match=r"."):
            engine.forward(steps)
    with pytest.raises(ClosedError):
        engine.forward([chain(sequence + 9, [1])])
    row = engine.forward([chain(sequence, [70])]).logits(0, 0).copy()
    assert_same_row(engine, row, reference(engine, [*PROMPT, 70]))


def test_the_context_is_a_limit(engine: Engine) -> None:
    sequence = engine.open()
    for _ in range(4):
        engine.forward([chain(sequence, [9] * 31, outputs=[])])
        engine.commit(sequence, range(31))
    with pytest.raises(ValueError, match="context"):
        engine.forward([chain(sequence, [9] * 5, outputs=[])])
    engine.forward([chain(sequence, [9] * 4, outputs=[])])
    engine.commit(sequence, range(4))
    assert engine.length(sequence) == 128


def test_sequences_are_a_limit_and_come_back(engine: Engine) -> None:
    sequences = [engine.open() for _ in range(4)]
    with pytest.raises(CapabilityError, match="4"):
        engine.open()
    with pytest.raises(CapabilityError, match="4"):
        engine.fork(sequences[0])
    engine.close_sequence(sequences[2])
    assert engine.length(engine.open()) == 0


def test_after_closing_everything_says_so(make_engine: Callable[[], Engine]) -> None:
    engine = make_engine()
    sequence = engine.open()
    saved = engine.save(sequence)
    closed = engine.open()
    engine.close_sequence(closed)
    with pytest.raises(ClosedError):
        engine.length(closed)
    engine.close()
    engine.close()
    for use in (
        engine.open,
        lambda: engine.forward([chain(sequence, [1])]),
        lambda: engine.commit(sequence, []),
        lambda: engine.length(sequence),
        lambda: engine.states(sequence, 0, 0),
        lambda: engine.first_state(sequence),
        lambda: engine.fork(sequence),
        lambda: engine.trim(sequence, 0),
        lambda: engine.saved_bytes(sequence),
        lambda: engine.save(sequence),
        lambda: engine.restore(saved),
        lambda: engine.close_sequence(sequence),
    ):
        with pytest.raises(ClosedError):
            use()


def test_states_are_held_or_refused(engine: Engine) -> None:
    sequence = prefilled(engine)
    if not engine.capabilities.state_width:
        for ask in (lambda: engine.states(sequence, 0, 1), lambda: engine.first_state(sequence)):
            with pytest.raises(CapabilityError, match="states"):
                ask()
        return
    assert engine.first_state(sequence) == 0
    states = engine.states(sequence, 2, 5)
    assert states.shape == (3, engine.capabilities.state_width)
    assert not np.array_equal(states[0], states[1])
    with pytest.raises(ValueError, match="not held"):
        engine.states(sequence, 0, len(PROMPT) + 1)


def test_only_heads_are_fed_states(engine: Engine) -> None:
    sequence = engine.open()
    with pytest.raises(ValueError, match="no head"):
        engine.forward([Step(sequence, [1], [COMMITTED_END], [0], np.zeros((1, 3), np.float32))])
    assert_same_row(engine, engine.forward([chain(sequence, [1])]).logits(0, 0), reference(engine, [1]))


@only([hybrid])
def test_holding_states_changes_no_bit_of_a_row(engine: Engine) -> None:
    holding = hybrid_with_states()
    for one in (engine, holding):
        assert one.open() == 0
    for tokens, outputs in ((PROMPT, [7]), ([3, 4, 5], [0, 1, 2]), ([6], [0])):
        rows = []
        for one in (engine, holding):
            output = one.forward([chain(0, tokens, outputs)])
            rows.append(np.stack([output.logits(0, row) for row in range(len(outputs))]))
            one.commit(0, range(len(tokens)))
        np.testing.assert_array_equal(rows[0], rows[1])
    holding.close()


def test_the_vocabulary_spells_out_its_text(engine: Engine) -> None:
    vocabulary = engine.vocabulary
    text = "def#f(x):return[x]"
    token_ids = vocabulary.tokenize(text)
    assert 0 <= vocabulary.fewest_tokens(text) <= len(token_ids)
    assert all(0 <= token_id < vocabulary.size for token_id in token_ids)
    assert b"".join(vocabulary.token_bytes(token_id) for token_id in token_ids).decode() == text
    for token_id in token_ids:
        assert vocabulary.token_spelling(token_id) == vocabulary.token_bytes(token_id)
    for end_id in vocabulary.end_ids:
        assert vocabulary.token_bytes(end_id) == b""
        assert vocabulary.token_spelling(end_id)


def test_any_thread_may_use_the_vocabulary(engine: Engine) -> None:
    vocabulary = engine.vocabulary
    texts = ["def#f(x):return[x]"[place:] * 20 for place in range(8)]
    expected = [vocabulary.tokenize(text) for text in texts]
    spelled = [vocabulary.token_spelling(token_id) for token_id in range(vocabulary.size)]
    wrong: list[object] = []
    barrier = threading.Barrier(4)

    def read(number: int) -> None:
        barrier.wait()
        for turn in range(20):
            which = (number + turn) % len(texts)
            if vocabulary.tokenize(texts[which]) != expected[which]:
                wrong.append(texts[which])
            for token_id in range(turn, vocabulary.size, 20):
                if vocabulary.token_spelling(token_id) != spelled[token_id]:
                    wrong.append(token_id)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert wrong == []


@only(WITH_TREES)
def test_any_history_of_passes_leaves_the_right_rows(engine: Engine) -> None:
    """Random trees over several passes, commits, trims, forks, saves and closings, each against a plain chain."""
    rng = random.Random(20)
    committed: dict[int, list[int]] = {}
    # What sequences that were restored can be trimmed to, but for none at all.
    floors: dict[int, int] = {}
    for _ in range(60):
        if not committed or (len(committed) < 3 and rng.random() < 0.2):
            committed[engine.open()] = []
        elif len(committed) == 3 and rng.random() < 0.2:
            closed = rng.choice(list(committed))
            engine.close_sequence(closed)
            del committed[closed]
        elif len(committed) < 3 and rng.random() < 0.2:
            original = rng.choice(list(committed))
            fork = engine.fork(original)
            committed[fork], floors[fork] = list(committed[original]), floors.get(original, 0)
        elif rng.random() < 0.2:
            # To host memory and back, into whatever cells are free.
            moved = rng.choice(list(committed))
            saved = engine.save(moved)
            engine.close_sequence(moved)
            restored = engine.restore(saved)
            committed[restored], floors[restored] = committed.pop(moved), saved.floor
        for sequence, tokens in committed.items():
            if len(tokens) > 90:
                keep = rng.randrange(len(tokens))
                if keep < floors.get(sequence, 0):
                    keep = floors[sequence] = 0
                engine.trim(sequence, keep)
                del tokens[keep:]
        # For each pending node: the nodes and the tokens of its path.
        pending: dict[int, list[tuple[list[int], list[int]]]] = {sequence: [] for sequence in committed}
        for _ in range(rng.randint(1, 3)):
            steps, wanted = [], []
            for sequence in rng.sample(list(committed), rng.randint(1, len(committed))):
                nodes = pending[sequence]
                new_tokens, parents = [], []
                for _ in range(rng.randint(1, 4)):
                    # A recent parent more often than an old one, so that chains, branches and siblings all occur.
                    parent = max(rng.randint(-1, len(nodes) - 1) for _ in range(2)) if nodes else COMMITTED_END
                    token = rng.randrange(1, 250)
                    above_nodes, above_tokens = ([], []) if parent == COMMITTED_END else nodes[parent]
                    nodes.append(([*above_nodes, len(nodes)], [*above_tokens, token]))
                    new_tokens.append(token)
                    parents.append(parent)
                steps.append(Step(sequence, new_tokens, parents, range(len(new_tokens))))
                wanted.append([committed[sequence] + path for _, path in nodes[-len(new_tokens) :]])
            output = engine.forward(steps)
            rows = [[output.logits(i, row).copy() for row in range(len(paths))] for i, paths in enumerate(wanted)]
            checked = rng.randrange(len(steps))
            row = rng.randrange(len(wanted[checked]))
            assert_same_row(engine, rows[checked][row], reference(engine, wanted[checked][row]))
        for sequence, nodes in pending.items():
            if not nodes or rng.random() < 0.1:
                engine.commit(sequence, [])
                continue
            path, path_tokens = rng.choice(nodes)
            engine.commit(sequence, path)
            committed[sequence] += path_tokens
            assert engine.length(sequence) == len(committed[sequence])
            assert_same_states(engine, sequence, committed[sequence], by=engine)


# --- engines that step back over rows of their latest pass alone ------------------------------------------------------


@pytest.fixture
def fresh(make_engine: Callable[..., Engine]) -> Iterator[Callable[[Sequence[int]], FloatArray]]:
    """Returns the row after some tokens, by an engine that only ever reads one text after the other."""
    engine = make_engine()
    known: dict[tuple[int, ...], FloatArray] = {}

    def row_after(token_ids: Sequence[int]) -> FloatArray:
        key = tuple(token_ids)
        if key not in known:
            known[key] = reference(engine, key)
        return known[key]

    yield row_after
    engine.close()


def text_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=length)


@only(BOUNDED)
@pytest.mark.parametrize("number", some_long([2, 3, 4], quick=[3]))
def test_steps_of_any_lengths_in_any_order_step_back(
    engine: Engine, fresh: Callable[[Sequence[int]], FloatArray], number: int
) -> None:
    """llama.cpp moves states of sequences that have as few rows as others; see ``engines/llama_cpp/engine.py``."""
    cases = list(product(product((1, 2, 4), repeat=number), permutations(range(number)), ("root", "some")))
    # Where layers are streamed, or lie on other machines, each takes as long as a hundred elsewhere.
    is_slow = engine.description.endswith("streamed") or " on RPC0" in engine.description
    most = by_tier(100, quick=30) if is_slow else by_tier(2000, quick=250)
    cases = random.Random(number).sample(cases, min(len(cases), most))
    prompts = [text_of(index, 3 + index) for index in range(number)]
    for lengths, order, keep in cases:
        sequences = [prefilled(engine, prompt) for prompt in prompts]
        drafts = [text_of(10 + index, length) for index, length in enumerate(lengths)]
        output = engine.forward([chain(sequences[index], drafts[index]) for index in order])
        for at, index in enumerate(order):
            assert_same_row(engine, output.logits(at, lengths[index] - 1), fresh(prompts[index] + drafts[index]))
        kept = [1 if keep == "root" else 1 + index % length for index, length in enumerate(lengths)]
        for index in range(number):
            engine.commit(sequences[index], range(kept[index]))
        output = engine.forward([chain(sequence, [7]) for sequence in sequences])
        for index in range(number):
            text = [*prompts[index], *drafts[index][: kept[index]], 7]
            assert_same_row(engine, output.logits(index, 0), fresh(text))
        for sequence in sequences:
            engine.close_sequence(sequence)


@only(BOUNDED)
def test_prompts_are_read_beside_steps_that_step_back(
    engine: Engine, fresh: Callable[[Sequence[int]], FloatArray]
) -> None:
    assert engine.capabilities.max_rollback == 16
    long, short = text_of(1, 20), text_of(2, 3)
    reading, verifying, plain = engine.open(), prefilled(engine), prefilled(engine, short)
    steps = [chain(plain, [5]), chain(reading, long, outputs=[4, 19]), chain(verifying, [20, 21, 22])]
    output = engine.forward(steps)
    assert_same_row(engine, output.logits(0, 0), fresh([*short, 5]))
    assert_same_row(engine, output.logits(1, 0), fresh(long[:5]))
    assert_same_row(engine, output.logits(1, 1), fresh(long))
    for row in range(3):
        assert_same_row(engine, output.logits(2, row), fresh([*PROMPT, 20, 21, 22][: len(PROMPT) + row + 1]))
    with pytest.raises(CapabilityError, match="back"):
        engine.commit(reading, range(19))
    engine.commit(reading, range(20))
    engine.commit(verifying, [0])
    engine.commit(plain, [0])
    output = engine.forward([chain(reading, [6]), chain(verifying, [23, 24]), chain(plain, [8])])
    assert_same_row(engine, output.logits(0, 0), fresh([*long, 6]))
    assert_same_row(engine, output.logits(1, 1), fresh([*PROMPT, 20, 23, 24]))
    assert_same_row(engine, output.logits(2, 0), fresh([*short, 5, 8]))


@only(BOUNDED)
def test_a_pass_of_others_ends_what_can_be_stepped_back(
    engine: Engine, fresh: Callable[[Sequence[int]], FloatArray]
) -> None:
    sequences = [prefilled(engine, text_of(index, 4)) for index in range(3)]
    engine.forward([chain(sequence, [9, 10, 11, 12][: 4 - index]) for index, sequence in enumerate(sequences[:2])])
    engine.forward([chain(sequences[2], [13, 14])])
    with pytest.raises(CapabilityError, match="back"):
        engine.commit(sequences[0], [0])
    with pytest.raises(CapabilityError, match="back"):
        engine.trim(sequences[0], 4)
    engine.commit(sequences[0], range(4))  # it did not change
    engine.commit(sequences[1], range(3))
    engine.commit(sequences[2], [0])
    output = engine.forward([chain(sequence, [7]) for sequence in sequences])
    for index, drafted in enumerate(([9, 10, 11, 12], [9, 10, 11], [13])):
        assert_same_row(engine, output.logits(index, 0), fresh([*text_of(index, 4), *drafted, 7]))


@only(BOUNDED)
def test_what_was_stepped_back_is_forked_and_what_was_forked_not_stepped_back(
    engine: Engine, fresh: Callable[[Sequence[int]], FloatArray]
) -> None:
    sequence = prefilled(engine)
    engine.forward([chain(sequence, [20, 21, 22])])
    engine.commit(sequence, [0])
    fork = engine.fork(sequence)
    output = engine.forward([chain(fork, [26, 27]), chain(sequence, [23, 24, 25])])
    assert_same_row(engine, output.logits(0, 1), fresh([*PROMPT, 20, 26, 27]))
    assert_same_row(engine, output.logits(1, 2), fresh([*PROMPT, 20, 23, 24, 25]))
    engine.commit(fork, [0])
    engine.close_sequence(fork)
    engine.commit(sequence, range(3))
    fork = engine.fork(sequence)
    for handle in (sequence, fork):  # they share one state
        with pytest.raises(CapabilityError, match="back"):
            engine.trim(handle, engine.length(handle) - 1)
    text = [*PROMPT, 20, 23, 24, 25]
    output = engine.forward([chain(sequence, [30, 31]), chain(fork, [32, 33, 34])])
    assert_same_row(engine, output.logits(0, 1), fresh([*text, 30, 31]))
    assert_same_row(engine, output.logits(1, 2), fresh([*text, 32, 33, 34]))
    engine.commit(sequence, [0])
    engine.commit(fork, [0])
    output = engine.forward([chain(fork, [35]), chain(sequence, [36])])
    assert_same_row(engine, output.logits(0, 0), fresh([*text, 32, 35]))
    assert_same_row(engine, output.logits(1, 0), fresh([*text, 30, 36]))


@only(BOUNDED)
def test_a_pass_without_room_changes_nothing_of_a_state(
    make_engine: Callable[..., Engine], fresh: Callable[[Sequence[int]], FloatArray]
) -> None:
    engine = make_engine(256)
    prompts = [text_of(index, 115) for index in range(2)]
    sequences = [engine.open() for _ in prompts]
    for start in range(0, 115, 30):
        parts = [prompt[start : start + 30] for prompt in prompts]
        for sequence, part in zip(sequences, parts, strict=True):
            engine.forward([chain(sequence, part, outputs=[])])
            engine.commit(sequence, range(len(part)))
    other = engine.open()
    for rows in (19, 24):
        with pytest.raises(NoRoomError):
            engine.forward([chain(other, [5] * rows), *(chain(sequence, [6, 7, 8, 9]) for sequence in sequences)])
    output = engine.forward([chain(other, [5] * 18), *(chain(sequence, [6, 7, 8, 9]) for sequence in sequences)])
    assert_same_row(engine, output.logits(0, 17), fresh([5] * 18))
    for index, prompt in enumerate(prompts):
        assert_same_row(engine, output.logits(1 + index, 3), fresh([*prompt, 6, 7, 8, 9]))
    engine.close()


@only(BOUNDED)
def test_any_history_of_bounded_passes_leaves_the_right_rows(
    engine: Engine, make_engine: Callable[..., Engine], fresh: Callable[[Sequence[int]], FloatArray]
) -> None:
    """Chains of any lengths and prompts over several passes, with what the contract allows, and what it refuses."""
    rng = random.Random(21)
    most = engine.capabilities.max_rollback
    assert most
    committed: dict[int, list[int]] = {}
    num_stepped_back = num_refused = 0
    by = make_engine()
    for _ in range(by_tier(400, quick=100)):
        if not committed or (len(committed) < 4 and rng.random() < 0.3):
            committed[engine.open()] = []
        elif len(committed) == 4 and rng.random() < 0.2:
            closed = rng.choice(list(committed))
            engine.close_sequence(closed)
            del committed[closed]
        elif len(committed) < 4 and rng.random() < 0.3:
            original = rng.choice(list(committed))
            committed[engine.fork(original)] = list(committed[original])
        elif rng.random() < 0.1:
            moved = rng.choice(list(committed))
            saved = engine.save(moved)
            assert saved.floor == len(committed[moved])
            engine.close_sequence(moved)
            committed[engine.restore(saved)] = committed.pop(moved)
        for sequence, tokens in committed.items():
            if len(tokens) > 60:
                engine.trim(sequence, 0)
                tokens.clear()
        pending: dict[int, list[int]] = {sequence: [] for sequence in committed}
        undoable: dict[int, int] = {}
        for _ in range(rng.choice((1, 1, 1, 2))):
            sequences = rng.sample(list(committed), rng.randint(1, len(committed)))
            lengths = [rng.choice((1, 1, 2, 3, 5)) for _ in sequences]
            if rng.random() < 0.3:
                lengths[0] = rng.choice((15, 17, 19))
            steps = []
            for sequence, length in zip(sequences, lengths, strict=True):
                tokens = rng.choices(range(3, 250), k=length)
                steps.append(chain(sequence, tokens, first=len(pending[sequence]) - 1))
                pending[sequence] += tokens
            output = engine.forward(steps)
            undoable = {
                sequence: min(most, length - 1) if length <= most + 1 or len(steps) == 1 else 0
                for sequence, length in zip(sequences, lengths, strict=True)
            }
            for at, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
                row = rng.randrange(length)
                end = len(pending[sequence]) - length + row + 1
                assert_same_row(engine, output.logits(at, row), fresh(committed[sequence] + pending[sequence][:end]))
        for sequence in rng.sample(list(pending), len(pending)):
            tokens = pending[sequence]
            if not tokens:
                continue
            kept = len(tokens) - rng.choice((0, 1, 2, 4))
            if kept > 0 and len(tokens) - kept > undoable.get(sequence, 0):
                num_refused += 1
                with pytest.raises(CapabilityError, match="back"):
                    engine.commit(sequence, range(kept))
                kept = len(tokens)
            kept = max(kept, len(tokens) - undoable.get(sequence, 0))
            engine.commit(sequence, range(kept))
            num_stepped_back += kept < len(tokens)
            committed[sequence] += tokens[:kept]
            assert engine.length(sequence) == len(committed[sequence])
        seen = random.Random(num_stepped_back).choice(list(committed))
        assert_same_states(engine, seen, committed[seen], by=by)
    assert num_stepped_back > 20
    assert num_refused > 5
    by.close()
