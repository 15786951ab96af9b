"""The torch engine: a Hugging Face model run over packed rows of many sequences, trees included."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.core.errors import CapabilityError, ClosedError, EngineError, ModelFileError
from paceline.core.numbers import shown
from paceline.engines.base import COMMITTED_END, EngineCapabilities, SavedSequence, Step
from paceline.engines.context_length import choose_context_length
from paceline.engines.options import ModelOptions, check_range
from paceline.engines.pending_tree import check_pass
from paceline.engines.process_forks import native_threads
from paceline.engines.threads import SpareCores, count_cores, usable_cores
from paceline.engines.torch_hf.cells import CellPool, SequenceCells
from paceline.engines.torch_hf.loading import (
    LoadedModel,
    load_model,
    longest_context,
    one_line,
    refuse_unsupported,
)
from paceline.engines.torch_hf.masks import AttentionPattern
from paceline.engines.torch_hf.pool import PoolCache
from paceline.engines.torch_hf.states import DeviceTrack, StateCapture
from paceline.engines.torch_hf.vocabulary import TokenizerVocabulary
from paceline.engines.warming import warm_up
from paceline.models.files import explain_damaged_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.core.arrays import BoolArray, FloatArray, Int64Array

P = ParamSpec("P")
T = TypeVar("T")

WIDTH_STEP = 64
"""Attention reads the pool in steps of so many cells: few shapes, and rows aligned for the GPU's masked kernels."""

ATTENTION_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All kernels of torch but cuDNN's, which makes a plan for every new shape.

That takes 40 to 50 ms on an H100 for each number of rows and each width of the pool, and a text goes through many.
"""

LOGIT_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.0625, torch.bfloat16: 0.5}
"""Largest logit difference that rounding explains. In half precision the logits themselves are rounded, so these are
four units in the last place of a logit between 16 and 32."""

_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Largest logit difference that the check at load allows, relative to the largest logit: it looks for wrong attention.
"""


_MAX_ROWS: Final = 512
"""Most rows in one forward pass, by default."""

_SMALLEST_CONTEXT: Final = 4
"""Cells and context that the check made at load needs."""

_INT32_MAX: Final = 2**31 - 1


def _refuse_foreign(options: ModelOptions) -> None:
    """Refuse options that this engine does not know."""
    unused = {
        "threads for batches (`threads_batch`)": options.threads_batch is not None,
        "fused attention (`flash_attention`)": options.flash_attention is not None,
        "a type of the cache (`cache_type_k`, `cache_type_v`)": (options.cache_type_k, options.cache_type_v)
        != (None, None),
        "exactness (`exact`)": options.exact,
        "tensor overrides (`override_tensors`)": bool(options.override_tensors),
        "a number of GPU layers (`gpu_layers`)": options.gpu_layers != -1,
        "streaming within so much memory (`memory`)": options.memory is not None,
        "several devices": len(options.devices) > 1,
    }
    for option, given in unused.items():
        if given:
            raise CapabilityError(f"{option} has no effect on torch_hf: leave it out, or use `engine='llama_cpp'`")


def _check_limits(context_length: int | None, max_rows: int, max_sequences: int, cells: int | None) -> None:
    for name, value, lowest, highest in (
        ("context_length", context_length, _SMALLEST_CONTEXT, _INT32_MAX),
        ("max_rows", max_rows, 1, 1 << 16),
        ("max_sequences", max_sequences, 1, _INT32_MAX),
        ("cells", cells, _SMALLEST_CONTEXT, _INT32_MAX),
    ):
        check_range(name, value, lowest, highest)


class TorchHFEngine:
    """Any causal language model of transformers whose layers attend fully or over sliding windows.

    Rows of all sequences run side by side at batch size 1, with explicit positions and a prepared mask, over one pool
    of cells (:mod:`~paceline.engines.torch_hf.cells`). Trees, forks and rollback are bookkeeping; nothing is moved.

    A model may accept masks and positions and yet ignore them, so loading ends with a check: a small tree in
    shuffled cells must give the logits of the plain forward of its paths.

    Args:
        options: what to load and how. Without ``dtype`` weights have the checkpoint's type on CUDA, and float32 on the
            CPU, where half precision is seldom faster and always less exact. ``threads`` are those of torch's CPU
            operations, for the whole process.
        max_rows: most rows in one forward pass.
    """

    _spare_cores: SpareCores | None = None
    """Chooses torch's threads; ``None`` where the user did, or where a GPU makes the passes."""
    _set_threads: int | None = None
    """Threads as the user set them; torch has one number for the process, which another engine may have changed."""
    _thread: ThreadPoolExecutor | None = None
    """Where passes are made beside llama.cpp."""
    _states: StateCapture | None = None
    """Reads the states of passes, where they are held."""

    def __init__(self, options: ModelOptions, *, max_rows: int = _MAX_ROWS) -> None:
        _refuse_foreign(options)
        _check_limits(options.context_length, max_rows, options.max_sequences, options.cells)
        own_threads = _own_threads()
        if options.threads is not None:
            torch.set_num_threads(options.threads)
            self._set_threads = options.threads
        loaded = load_model(options)
        if options.threads is None and loaded.model.device.type == "cpu":
            self._spare_cores = SpareCores(min(own_threads, usable_cores()), count_cores())
        with explain_damaged_entries(Path(options.path)):
            self._start(loaded, options, max_rows)

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        context_length: int | None = None,
        max_rows: int = _MAX_ROWS,
        max_sequences: int = 1,
        cells: int | None = None,
        hold_states: tuple[int, ...] = (),
    ) -> TorchHFEngine:
        """Run a model that is loaded already, where it is and in its dtype.

        It is put in evaluation mode, and where states are held gets a hook, which :meth:`close` takes off again.
        """
        name = model.config.name_or_path or type(model).__name__
        _check_limits(context_length, max_rows, max_sequences, cells)
        options = ModelOptions(
            name, context_length=context_length, max_sequences=max_sequences, cells=cells, hold_states=hold_states
        )
        engine = cls.__new__(cls)
        engine._start(LoadedModel(model.eval(), tokenizer, name), options, max_rows)
        return engine

    def _start(self, loaded: LoadedModel, options: ModelOptions, max_rows: int) -> None:
        model = loaded.model
        config = model.config.get_text_config()
        refuse_unsupported(model.config, model)
        if config._attn_implementation not in {"sdpa", "eager"}:
            raise CapabilityError(
                f"attention {config._attn_implementation!r} takes no prepared mask; load the model with "
                "attn_implementation='sdpa' or 'eager'"
            )
        context_length = choose_context_length(
            options.context_length,
            longest_context(config),
            model=loaded.name,
            may_shrink=options.context_may_shrink,
        )
        parameters = inspect.signature(type(model).forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        # Renamed in transformers 5.24; a model that brings its own code may keep the old name for long.
        self._cache_parameter = "cache" if "cache" in parameters else "past_key_values"
        self._held = options.hold_states
        self._states = StateCapture(model, self._held) if self._held else None
        cells = context_length * options.max_sequences + max_rows if options.cells is None else options.cells
        dtype = model.dtype  # transformers walks the weights for it
        capabilities = EngineCapabilities(
            context_length=context_length,
            max_rows=max_rows,
            max_outputs=max_rows,
            max_sequences=options.max_sequences,
            cells=cells,
            trees=True,
            max_rollback=None,
            logit_tolerance=LOGIT_TOLERANCE.get(dtype, LOGIT_TOLERANCE[torch.float32]),
            state_width=len(self._held) * config.hidden_size,
        )
        self._begin(model, model.device, dtype, capabilities)
        try:
            vocab_size = self._check_against_plain_forward()
            end_ids = [*_end_ids(model), *loaded.end_ids]
            self._vocabulary = TokenizerVocabulary(loaded.tokenizer, size=vocab_size, end_ids=end_ids)
            if self._device.type == "cuda":
                warm_up(self)
        except BaseException:
            self.close()
            raise
        self._description = f"{loaded.name} ({config.model_type}, {self._type_name()}) on {self._where()}, torch"

    def _begin(self, model: Any, device: torch.device, dtype: torch.dtype, capabilities: EngineCapabilities) -> None:
        """Begin with no sequences, over a pool of as many cells as the capabilities say."""
        assert capabilities.cells is not None
        self._model: Any = model
        self._device = device
        self._dtype = dtype
        self._capabilities = capabilities
        self._track_width = capabilities.state_width
        self._pattern = AttentionPattern.of(model.config.get_text_config(), capabilities.context_length)
        self._pool = CellPool(capabilities.cells)
        self._cache: Any = PoolCache(capabilities.cells)
        self._attention_kernels = (
            functools.partial(sdpa_kernel, ATTENTION_KERNELS) if device.type == "cuda" else contextlib.nullcontext
        )
        # Of the latest pass: its states on the device, and whose rows they are.
        self._unread: tuple[torch.Tensor, list[tuple[SequenceCells, slice]]] | None = None
        self._sequences: dict[int, SequenceCells] = {}
        self._next_handle = 0
        # Sequences are being changed; if set between calls, an interrupt cut that short.
        self._torn = False
        self._closed = False

    @property
    def description(self) -> str:
        return self._description

    @property
    def held_layers(self) -> tuple[int, ...]:
        return self._held

    @property
    def num_cells(self) -> int:
        return len(self._pool)

    @property
    def vocabulary(self) -> TokenizerVocabulary:
        return self._vocabulary

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    def open(self) -> int:
        return self.open_within(self._capabilities.max_sequences)

    def open_within(self, limit: int) -> int:
        """Open a sequence where fewer than so many are open."""
        self._check_open()
        if len(self._sequences) >= limit:
            raise CapabilityError(
                f"{len(self._sequences)} sequences are open and max_sequences is {limit}; close one or raise it"
            )
        handle = self._next_handle
        self._next_handle += 1
        track = DeviceTrack(self._track_width, self._device, self._dtype) if self._track_width else None
        self._sequences[handle] = SequenceCells(self._capabilities.context_length, track)
        return handle

    def forward(self, steps: Sequence[Step]) -> TorchOutput:
        """Append the rows of ``steps``; also raises ``ValueError`` for a token outside the vocabulary."""
        self._check_open()
        states = [self._sequence(step.sequence) for step in steps]
        sequences = [(state.pending, state.length) for state in states]
        check_pass(steps, sequences, self._capabilities, self._vocabulary.size)
        return self._run(steps)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        state = self._sequence(sequence)
        state.pending.check_path(path)
        self._read_states()
        self._torn = True
        self._pool.release(state.keep(path))
        self._torn = False

    def length(self, sequence: int) -> int:
        return self._sequence(sequence).length

    def states(self, sequence: int, start: int, stop: int) -> FloatArray:
        return self._track(sequence).read(start, stop)

    def first_state(self, sequence: int) -> int:
        return self._track(sequence).start

    def _track(self, sequence: int) -> DeviceTrack:
        track = self._sequence(sequence).track
        if track is None:
            raise CapabilityError("this model was loaded without its states: ask for them to draft from them")
        return track

    def _read_states(self) -> None:
        """Give the states of the latest pass to the sequences that they are of."""
        if self._unread is None:
            return
        (states, rows_of), self._unread = self._unread, None
        for state, rows in rows_of:
            if state.track is not None:
                state.track.append(states[rows])

    def fork(self, sequence: int) -> int:
        state = self._sequence(sequence)
        if len(state.pending):
            raise ValueError(f"sequence {sequence} has {len(state.pending)} pending nodes; commit before a fork")
        handle = self.open()
        self._torn = True
        self._sequences[handle].append_committed(state.committed)
        self._sequences[handle].track = None if state.track is None else state.track.copy()
        self._pool.share(state.committed)
        self._torn = False
        return handle

    def trim(self, sequence: int, length: int) -> None:
        state = self._sequence(sequence)
        if not 0 <= length <= state.length:
            raise ValueError(f"cannot keep {length} of the {state.length} tokens of sequence {sequence}")
        self._read_states()
        self._torn = True
        self._pool.release(state.keep([]))
        self._pool.release(state.truncate(length))
        self._torn = False

    def saved_bytes(self, sequence: int) -> int:
        state = self._sequence(sequence)
        return state.length * int(self._cache.cell_bytes) + (0 if state.track is None else state.track.num_bytes)

    def save(self, sequence: int) -> SavedSequence:
        state = self._sequence(sequence)
        if len(state.pending):
            raise ValueError(f"sequence {sequence} has {len(state.pending)} pending nodes; commit before saving it")
        track = None if state.track is None else state.track.copy(torch.device("cpu"))
        with torch.inference_mode():
            layers = self._cache.read(torch.from_numpy(state.committed).to(self._device))
        return SavedSequence(state.length, self.saved_bytes(sequence), 0, _Saved(self._cache, layers, track))

    def restore(self, saved: SavedSequence) -> int:
        self._check_open()
        if not isinstance(saved.state, _Saved) or saved.state.cache is not self._cache:
            raise ValueError("another engine saved this sequence: feed its tokens")
        if self._torn:
            self._repair()
        cells = self._pool.find(saved.length)
        handle = self.open()
        self._torn = True
        with torch.inference_mode():
            self._cache.write(torch.from_numpy(cells).to(self._device), saved.state.layers)
        self._pool.positions[cells] = np.arange(saved.length)
        self._sequences[handle].append_committed(cells)
        self._sequences[handle].track = None if saved.state.track is None else saved.state.track.copy(self._device)
        self._pool.share(cells)
        self._torn = False
        return handle

    def close_sequence(self, sequence: int) -> None:
        self.trim(sequence, 0)
        del self._sequences[sequence]

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown()
        on_cuda = self._device.type == "cuda"
        if self._states is not None:
            self._states.remove()
        self._unread = None
        self._sequences.clear()
        self._model = self._cache = None
        if on_cuda:
            torch.cuda.empty_cache()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the torch engine is closed")

    def _sequence(self, handle: int) -> SequenceCells:
        self._check_open()
        if self._torn:
            self._repair()
        try:
            return self._sequences[handle]
        except KeyError:
            raise ClosedError(f"sequence {handle} is not open") from None

    def _repair(self) -> None:
        self._unread = None
        for state in self._sequences.values():
            state.drop_unpaired()
        self._pool.recount([state.held for state in self._sequences.values()])
        self._torn = False

    def _run(self, steps: Sequence[Step], width_step: int = WIDTH_STEP) -> TorchOutput:
        native_threads.use()
        return self._apart(self._run_here, steps, width_step)

    def _apart(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Have torch compute in a thread of this engine's own, where llama.cpp computes in the caller's.

        Both configure the tiles of a processor with AMX, and release them, thread by thread. llama.cpp does so once and
        takes it that they stay: its next pass after one of torch's in bfloat16 or int8 would end the process.
        """
        if self._device.type != "cpu" or "llama_cpp" not in sys.modules:
            return work(*args, **kwargs)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "paceline-torch")
        return self._thread.submit(work, *args, **kwargs).result()

    def _run_here(self, steps: Sequence[Step], width_step: int) -> TorchOutput:
        """Run checked steps. Cells are taken only when the pass has succeeded, so a failure has little to undo."""
        threads = self._set_threads if self._spare_cores is None else self._spare_cores.look()
        if threads is not None and threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        self._read_states()
        states = [self._sequences[step.sequence] for step in steps]
        cells = self._pool.find(sum(len(step.token_ids) for step in steps))
        self._torn = True
        for step, state in zip(steps, states, strict=True):
            state.pending.append(step.parents)
        try:
            with torch.inference_mode(), self._attention_kernels():
                output, own_states = self._compute(self._pack(steps, states, cells, width_step))
        except BaseException:
            for state in states:
                state.pending.truncate(len(state.pending_cells))
            self._torn = False
            raise
        self._pool.share(cells)
        for state, rows in zip(states, row_ranges(steps), strict=True):
            state.pending_cells += cells[rows].tolist()
        if own_states is not None:
            self._unread = (own_states, list(zip(states, row_ranges(steps), strict=True)))
        self._torn = False
        return output

    def _pack(
        self, steps: Sequence[Step], states: Sequence[SequenceCells], cells: Int64Array, width_step: int
    ) -> PackedRows:
        width = min(-(-self._pool.width_with(cells) // width_step) * width_step, len(self._pool))
        visible: BoolArray = np.empty((len(cells), width), dtype=np.bool_)
        for step, state, rows in zip(steps, states, row_ranges(steps), strict=True):
            depths = state.pending.depths[len(state.pending_cells) :]
            self._pool.positions[cells[rows]] = np.array(depths) + (state.length - 1)
            state.mark_visible(visible[rows], step.parents, cells[rows])
        return self._packed(steps, states, cells, visible)

    def _packed(
        self, steps: Sequence[Step], states: Sequence[SequenceCells], cells: Int64Array, visible: BoolArray
    ) -> PackedRows:
        token_ids = [token_id for step in steps for token_id in step.token_ids]
        outputs = [
            rows.start + row for step, rows in zip(steps, row_ranges(steps), strict=True) for row in step.outputs
        ]
        return PackedRows(
            np.array(token_ids, dtype=np.int64),
            cells,
            visible,
            np.array(outputs, dtype=np.int64),
            np.cumsum([0, *(len(step.outputs) for step in steps)]).tolist(),
            self._read_by_head(steps, states),
        )

    def _read_by_head(self, steps: Sequence[Step], states: Sequence[SequenceCells]) -> Any:
        return None

    def _compute(self, packed: PackedRows) -> tuple[TorchOutput, torch.Tensor | None]:
        """Run the model over packed rows, and return the states ``[rows, width]`` that they leave where they are held.

        Raises ``EngineError`` where it fails, as without memory on the device.
        """
        device = self._device
        positions = self._pool.positions[packed.cells]
        inputs = torch.from_numpy(np.stack([packed.token_ids, positions, packed.cells])).to(device)
        keep = torch.from_numpy(packed.outputs).to(device)
        width = packed.visible.shape[1]
        self._cache.aim(inputs[2], width)
        mask = self._masks(packed.visible, positions)
        try:
            logits, states = self._call_model(inputs[:1], inputs[1:2], mask, keep, packed.states)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"no memory for a pass of {len(packed.cells)} rows over a pool of {len(self._pool)} cells; lower "
                "max_rows, context_length or cells"
            ) from error
        except Exception as error:
            raise EngineError(f"the pass of {len(packed.cells)} rows failed: {one_line(error)}") from error
        return TorchOutput(packed.first_outputs, logits), states

    def _masks(self, visible: BoolArray, positions: Int64Array) -> Any:
        cell_positions = self._pool.positions[: visible.shape[1]]
        return self._pattern.masks(visible, positions, cell_positions, self._dtype, self._device)

    def _call_model(
        self, token_ids: torch.Tensor, positions: torch.Tensor, mask: Any, keep: torch.Tensor, states: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits of the rows to keep, and the states of all rows; a head reads them with states."""
        logits = self._model(
            input_ids=token_ids,
            position_ids=positions,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_parameter: self._cache},
            **({"logits_to_keep": keep} if self._keeps_rows else {}),
        ).logits[0]
        held = None if self._states is None else self._states.take()
        return logits if self._keeps_rows else logits[keep], held

    def _check_against_plain_forward(self) -> int:
        """Compare a small tree with the plain forward of its paths and return the length of a row of logits.

        A model may take masks and positions and still place rows by their column (ALiBi, older causal masks, state
        beside the cache). So the tree's ancestors sit in higher cells than its branches, and width is not rounded::

            cell        0  1  2  3
            first pass  c  d  a ─ b       a and b are committed, which frees 0 and 1
            second pass c  d              both follow b
        """
        count = self._model.get_input_embeddings().weight.shape[0]
        a, b, c, d = (count * share // 5 for share in range(1, 5))
        end = COMMITTED_END
        architecture = self._model.config.model_type
        way_out = "use a GGUF file with the llama_cpp engine"
        sequence = self.open()
        try:
            self._run([Step(sequence, [c, d, a, b], [end, end, end, 2], [])], width_step=1)
            self.commit(sequence, [2, 3])
            output = self._run([Step(sequence, [c, d], [end, end], [0, 1])], width_step=1)
        except EngineError as error:
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise
            raise CapabilityError(f"{architecture} does not run over a pool of cells ({error}); {way_out}") from error
        finally:
            self.close_sequence(sequence)
        plain = [self._apart(self._plain_logits, token_ids) for token_ids in ([a, b, c], [a, b, d])]
        largest = max(float(np.abs(logits).max()) for logits in plain)
        difference = max(float(np.abs(output.logits(0, row) - logits).max()) for row, logits in enumerate(plain))
        # Written so that nan fails too.
        if not difference <= largest * _CHECK_TOLERANCE.get(self._dtype, 1e-3):
            raise CapabilityError(
                f"{architecture} gives other logits over a pool of cells than in a plain forward (off by "
                f"{difference:.2g} of {largest:.2g}), so it ignores masks or positions; {way_out}"
            )
        return len(plain[0])

    def _type_name(self) -> str:
        return str(self._dtype).removeprefix("torch.")

    def _where(self) -> str:
        """Return the device, with the name its maker gave it where that is known, or the threads on a quiet machine."""
        if self._device.type == "cuda":
            return f"{self._device} ({torch.cuda.get_device_name(self._device)})"
        if self._device.type != "cpu":
            return str(self._device)
        threads = torch.get_num_threads() if self._spare_cores is None else self._spare_cores.most
        return f"cpu, {threads} threads"

    def _plain_logits(self, token_ids: list[int]) -> FloatArray:
        with torch.inference_mode():
            input_ids = torch.tensor([token_ids], device=self._device)
            logits: FloatArray = self._model(input_ids=input_ids, use_cache=False).logits[0, -1].float().cpu().numpy()
        return logits


@functools.cache
def _own_threads() -> int:
    """Return torch's own choice, or the user's: how many threads it has before an engine changes that."""
    return int(torch.get_num_threads())


class TorchOutput:
    """Logits of the rows asked for. On CUDA their way to the host starts at once, without waiting."""

    def __init__(self, first_outputs: Sequence[int], logits: torch.Tensor) -> None:
        self._first_outputs = first_outputs
        self._ready: Any = None
        if logits.is_cuda:
            host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
            host.copy_(logits.float(), non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()
        else:
            host = logits.float()
        self._logits = _read_only(host)

    def wait(self) -> None:
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None

    def logits(self, step: int, output: int) -> FloatArray:
        self.wait()
        row: FloatArray = self._logits[self._index(step, output)]
        return row

    def _index(self, step: int, output: int) -> int:
        first, past = self._first_outputs[step], self._first_outputs[step + 1]
        if not 0 <= output < past - first:
            raise IndexError(f"step {step} has {past - first} outputs, there is no {output}")
        return first + output


class _Saved(NamedTuple):
    """Keys and values of saved tokens, by layer, the cache that they are from, and states where they are held."""

    cache: PoolCache
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]]
    track: DeviceTrack | None


class PackedRows(NamedTuple):
    """One pass: ``[rows]`` tokens and cells, ``[rows, width]`` who sees what, ``[outputs]`` rows wanted."""

    token_ids: Int64Array
    cells: Int64Array
    visible: BoolArray
    outputs: Int64Array
    first_outputs: list[int]
    states: Any
    """What a head reads rows with."""


def row_ranges(steps: Sequence[Step]) -> Iterator[slice]:
    start = 0
    for step in steps:
        yield slice(start, start + len(step.token_ids))
        start += len(step.token_ids)


def _read_only(tensor: torch.Tensor) -> FloatArray:
    array: FloatArray = tensor.numpy()
    array.flags.writeable = False
    return array


def _end_ids(model: Any) -> list[int]:
    """Return the end-of-generation tokens of the generation configuration, else those of the model's."""
    for config in (getattr(model, "generation_config", None), model.config.get_text_config()):
        end = getattr(config, "eos_token_id", None)
        if end is not None:
            ends = end if isinstance(end, list) else [end]
            if not all(type(token_id) is int for token_id in ends):
                raise ModelFileError(
                    f"{model.config.name_or_path} ends answers at eos_token_id {shown(end)}, and token ids are whole "
                    "numbers; fetch generation_config.json and config.json again"
                )
            return ends
    return []
