"""Engines for heads of GGUF models, which share the target's weights or cache (:mod:`.heads` loads them).

::

    HeadEngine      reads tokens with states: MTP, EAGLE-3
    CacheReader     and the target's cache beside them: assistants of Gemma 4
    BlockEngine     reads states alone, and says a block of tokens in one pass: DFlash, DSpark, where each token
                    depends on the one before

The cache of a block engine holds what the head makes of the target's states. A pass of it has either states, which are
of text and stay, or blocks, which go as soon as they were said::

    cache   h0  h1  ...  h(n-2)          states of the text, without its last token
    block                        t(n-1)  mask  mask  mask        every row sees every other
                                   │      d1    d2    d3         DFlash says d1 at the first mask,
                                   d1     d2    d3    d4         and DSpark already at the root

llama.cpp tells the two kinds of passes apart by whether rows have tokens. It says nothing where a block has only some
outputs, has more rows than the head was trained for, or is still there when states come: none of that can be asked for.

Source: https://arxiv.org/abs/2602.06036 (DFlash), https://arxiv.org/abs/2607.05147 (DSpark).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import llama_cpp.llama_cpp as api
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, EngineError, ModelFileError
from paceline.engines.base import COMMITTED_END, LentSequences, Step, check_lent
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.engine import LlamaCppEngine
from paceline.engines.llama_cpp.heads import load_head
from paceline.engines.llama_cpp.lines import NativeSequence, Placement
from paceline.engines.llama_cpp.loading import LoadedModel
from paceline.engines.llama_cpp.states import BlockForm, own_head, read_head, read_token_ids
from paceline.engines.options import OUTPUT_STATE
from paceline.engines.process_forks import native_threads
from paceline.models.gguf_header import GgufHeader, read_gguf_header

_LEAST_CHANCE: Final = 1e-7
"""Confidences nearer to 0 or 1 are rounded away."""

_SECTIONS: Final = 4
"""Positions of a row, where they have several sections; of text the first three are the same and the last is 0."""


def open_head(target: LlamaCppEngine, path: Path | None = None) -> LlamaCppEngine:
    """Return an engine for a head, which reads the states of a target (``ModelOptions.hold_states``).

    Either may be closed first. The head is the MTP layer of the target's own file, which must have one, or in a file of
    its own. Raises as :func:`read_head` and :func:`load_head` do.
    """
    target._check_open()
    kind = own_head(target._path) if path is None else read_head(path)
    if kind is None or kind.layers != target._loaded.options.hold_states:
        raise CapabilityError(
            f"{path or target._path} has no head that reads the states {target._path} was loaded with"
        )
    if kind.reads_cache and target._sequences:
        raise EngineError(
            f"{path} cannot be opened while {len(target._sequences)} sequences of {target._path} are: that would empty "
            "their cache"
        )
    loaded = load_head(target._loaded, kind, path)
    if kind.block is not None:
        return BlockEngine(loaded, kind.block)
    return CacheReader(loaded, target) if kind.reads_cache else HeadEngine(loaded)


class HeadEngine(LlamaCppEngine):
    """A head that reads tokens with states."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._start(loaded)


class CacheReader(LentSequences, HeadEngine):
    """A head that reads the cache of its target beside states.

    A row is read behind all committed tokens of the target, however many drafts there are before it, and leaves nothing
    in the cache. So drafts are pending here, for their states alone, until a commit of whatever path forgets them.
    """

    def __init__(self, loaded: LoadedModel, lender: LlamaCppEngine) -> None:
        self.lender: LlamaCppEngine = lender
        self._drafts: dict[int, NativeSequence] = {}
        super().__init__(loaded)

    def open(self) -> int:
        """Open a sequence of the target to measure passes with; it holds one token, as a row needs one to read."""
        lender = self.lender
        sequence = lender._open(lender.capabilities.max_sequences + (not lender._loaded.settings.apart))
        try:
            self.lengthen(sequence, 1)
        except BaseException:
            lender.close_sequence(sequence)
            raise
        return sequence

    def lengthen(self, sequence: int, length: int) -> bool:
        """Have the target read tokens, or copy some, until the sequence has ``length``."""
        lender = self.lender
        if length - lender.length(sequence) > lender.capabilities.max_rows:
            # What follows in a pass has llama.cpp turn copied keys to their places.
            lender.lengthen(sequence, length - 1)
        while (rows := min(length - lender.length(sequence), lender.capabilities.max_rows)) > 0:
            lender.forward([Step(sequence, [0] * rows, range(COMMITTED_END, COMMITTED_END + rows), ())])
            lender.commit(sequence, range(rows))
        return True

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        if (drafts := self._drafts.pop(sequence, None)) is not None:
            drafts.pending.check_path(path)

    def _state(self, sequence: int, *, even_torn: bool = False) -> NativeSequence:
        self._check_open()
        of_target = self.lender._state(sequence, even_torn=even_torn)
        check_lent(sequence, of_target.committed, len(of_target.pending))
        drafts = self._drafts.get(sequence)
        if drafts is None:
            drafts = self._drafts[sequence] = NativeSequence(of_target.main, None, self._state_rows.new_track())
        drafts.main, drafts.committed = of_target.main, of_target.committed
        return drafts

    def _decode(
        self, steps: Sequence[Step], states: Sequence[NativeSequence], placements: list[Placement], length: int = 0
    ) -> None:
        batch, row = self._batch, 0
        unread: list[tuple[NativeSequence, int, int]] = []
        self._state_rows.copy_expected()
        self._generation += 1  # where there is no pass, the rows of the latest one are gone all the same
        self._state_rows.write(batch, steps, states)
        for state, step in zip(states, steps, strict=True):
            end = row + len(step.token_ids)
            batch.tokens[row:end] = step.token_ids
            batch.positions[row:end] = state.committed
            batch.ids[row:end, 0] = state.main
            unread.append((state, row, end - row))
            row = end
        batch.wanted[:row] = 1
        # On a GPU nothing else has it wait for the cells that the target's latest pass writes.
        api.llama_synchronize(self.lender._context)
        self._call(row, ())
        self._state_rows.expect(unread, row)


class BlockEngine(HeadEngine):
    """A head that says a block of tokens in one pass; the contract is that of ``BlockHead``."""

    def __init__(self, loaded: LoadedModel, block: BlockForm) -> None:
        self._block = block
        self._follow = Follow(Path(loaded.options.path), block) if block.follows else None
        super().__init__(loaded)

    @property
    def block_size(self) -> int:
        return self._block.size

    @property
    def block_rows(self) -> int:
        return self._block.rows

    def draft_blocks(self, roots: Sequence[tuple[int, int]]) -> Sequence[Block]:
        self._check_open()
        native_threads.use()
        block, batch = self._block, self._batch
        states = self._check_roots(roots)
        for number, (state, (_, root)) in enumerate(zip(states, roots, strict=True)):
            first = number * block.rows
            rows = slice(first, first + block.rows)
            batch.tokens[rows] = block.mask_id
            batch.tokens[first] = root
            batch.positions[rows] = np.arange(state.committed, state.committed + block.rows)
            batch.ids[rows, 0] = state.main
            batch.wanted[rows] = 1
        for state in states:
            state.torn = True
        try:
            self._call(len(roots) * block.rows, ())
        finally:
            for state in states:
                api.llama_memory_seq_rm(self._memory, state.main, state.committed, -1)
                state.torn = False
        said = _BlockRows(self, self._generation)
        return [Block(said, number * block.rows + block.first, block, self._follow) for number in range(len(roots))]

    def _check_roots(self, roots: Sequence[tuple[int, int]]) -> list[NativeSequence]:
        """Return the sequences of roots; changes nothing."""
        states = [self._state(sequence) for sequence, _ in roots]
        rows = len(roots) * self._block.rows
        if not 0 < rows <= self._capabilities.max_rows:
            raise ValueError(f"{len(roots)} blocks have {rows} rows, and a pass has 1 to {self._capabilities.max_rows}")
        if len({sequence for sequence, _ in roots}) < len(roots):
            raise ValueError("a pass has one block a sequence")
        for state, (sequence, root) in zip(states, roots, strict=True):
            if not state.committed or state.pending.parents:
                raise ValueError(
                    f"sequence {sequence} has {state.committed} committed states and {len(state.pending)} pending: a "
                    "block follows one or more, and none that is pending"
                )
            if state.committed + self._block.rows > self._capabilities.context_length:
                raise ValueError(
                    f"{state.committed} states and a block exceed the context of {self._capabilities.context_length}"
                )
            if not 0 <= root < self._vocabulary_size:
                raise ValueError(f"token {root} is not in a vocabulary of {self._vocabulary_size}")
        return states

    def _use_context(self) -> None:
        super()._use_context()
        has_sections = api.llama_model_rope_type(self._loaded.model) == api.LLAMA_ROPE_TYPE_MROPE
        size = _SECTIONS * self._loaded.settings.native_rows if has_sections else 0
        self._positions: npt.NDArray[np.int32] = np.zeros(size, np.int32)

    def _warm_up(self) -> None:
        """Blocks have one width."""

    def _check_steps(self, steps: Sequence[Step]) -> tuple[list[NativeSequence], int]:
        for step in steps:
            if step.states is None or len(step.outputs):
                raise ValueError("this head reads states, and what it says of them is asked for by blocks")
        return super()._check_steps(steps)

    def _call(self, rows: int, placements: Sequence[Placement]) -> None:
        """Make a native call of states, which are placed, or of blocks, which are not."""
        batch, positions = self._batch, self._batch.positions
        batch.native.token = None if placements else _pointer(batch.tokens, ctypes.c_int32)
        batch.native.embd = _pointer(batch.states, ctypes.c_float) if placements else None
        if placements and len(self._positions):
            positions = self._positions
            positions[: 3 * rows] = np.tile(batch.positions[:rows], 3)
            positions[3 * rows : 4 * rows] = 0
        batch.native.pos = _pointer(positions, ctypes.c_int32)
        super()._call(rows, placements)


class _BlockRows:
    """The rows of a pass of a block head, in llama.cpp's own buffers."""

    def __init__(self, engine: BlockEngine, generation: int) -> None:
        self._engine = engine
        self._generation = generation

    def logits(self, row: int) -> FloatArray:
        logits: FloatArray = self._engine._logit_rows(self._generation)[row]
        return logits

    def confidence(self, row: int) -> float:
        engine = self._engine
        engine._logit_rows(self._generation)  # waits for the pass, and knows whether there was another
        width = int(api.llama_model_n_embd_out(engine._loaded.model))
        return float(native.state_rows(engine._context, OUTPUT_STATE, row + 1, width)[row, 0])


class Block:
    """What a pass said of one sequence. See :class:`~paceline.engines.base.Block` for the contract.

    Args:
        rows: of the pass.
        first: the row of what follows the root.
        form: of the block.
        follow: what each token adds to the next; ``None`` for nothing.
    """

    def __init__(self, rows: _BlockRows, first: int, form: BlockForm, follow: Follow | None) -> None:
        self._rows = rows
        self._first = first
        self._form = form
        self._follow = follow

    def logits(self, drafted: Sequence[int]) -> FloatArray:
        logits = self._rows.logits(self._row(drafted))
        taken = self._taken(drafted)
        if taken is None or self._follow is None:
            return logits
        return logits + self._follow.difference(drafted[-1], taken)

    def confidence(self, drafted: Sequence[int]) -> float | None:
        row = self._row(drafted)
        if not self._form.says_confidence:
            return None
        said = self._rows.confidence(row)
        taken = self._taken(drafted)
        if taken is None or self._follow is None:
            return said
        said = min(max(said, _LEAST_CHANCE), 1.0 - _LEAST_CHANCE)
        log_odds = math.log(said / (1.0 - said)) + self._follow.confidence_difference(drafted[-1], taken)
        return 1.0 / (1.0 + math.exp(-log_odds))

    def _row(self, drafted: Sequence[int]) -> int:
        if len(drafted) >= self._form.size:
            raise IndexError(f"a block has {self._form.size} tokens: none follows {len(drafted)} drafts")
        return self._first + len(drafted)

    def _taken(self, drafted: Sequence[int]) -> int | None:
        """Return the token that llama.cpp took for the latest draft, the likeliest; ``None`` where it was that one.

        Each row has it that the row before was followed by what is likeliest after all before were.
        """
        if self._follow is None or not drafted:
            return None
        taken = int(self._rows.logits(self._first + len(drafted) - 1).argmax())
        return None if taken == drafted[-1] else taken


class Follow:
    """What DSpark adds to a row for the token before it: a product of two tables, of which llama.cpp keeps none apart.

    The second table is read to memory when it is first needed, which under greedy decoding is never.
    """

    def __init__(self, path: Path, block: BlockForm) -> None:
        header = read_gguf_header(path)
        num_tokens = header.array_lengths["tokenizer.ggml.tokens"]
        self._ids = read_token_ids(path)
        self._num_tokens = num_tokens
        self._before = _Table(path, header, "markov_w1.weight", num_tokens)
        self._after = _Table(path, header, "markov_w2.weight", num_tokens if self._ids is None else len(self._ids))
        self._scale = 1.0
        if "markov_w2.scale" in header.tensors:
            self._scale = float(_Table(path, header, "markov_w2.scale", 1).rows([0])[0, 0])
        self._confidence = _Table(path, header, "conf_proj.weight", 1) if block.says_confidence else None

    @cached_property
    def _all_after(self) -> FloatArray:
        return self._after.rows(slice(None)) * np.float32(self._scale)

    def difference(self, token_id: int, other_id: int) -> FloatArray:
        """Return what a row ``[vocab]`` has more after one token than after another."""
        added = self._all_after @ self._step(token_id, other_id)
        if self._ids is None:
            return added
        by_id = np.zeros(self._num_tokens, np.float32)
        by_id[self._ids] = added
        return by_id

    def confidence_difference(self, token_id: int, other_id: int) -> float:
        """Return by how much the log-odds of a row are higher after one token than after another."""
        assert self._confidence is not None
        step = self._step(token_id, other_id)
        return float(self._confidence.rows([0])[0, -len(step) :] @ step)

    def _step(self, token_id: int, other_id: int) -> FloatArray:
        of_token, of_other = self._before.rows([token_id, other_id])
        step: FloatArray = of_token - of_other
        return step


class _Table:
    """A tensor in a file, of which rows are read as they are needed."""

    def __init__(self, path: Path, header: GgufHeader, name: str, num_rows: int) -> None:
        if name not in header.spans:
            raise ModelFileError(f"{path} lacks {name}: convert it anew")
        start, end = header.spans[name]
        if (end - start) % num_rows:
            raise ModelFileError(f"{path} has {name} of {end - start} bytes for {num_rows} tokens: convert it anew")
        self._kind = GGMLQuantizationType(header.tensors[name])
        self._data = np.memmap(path, np.uint8, "r", start, (num_rows, (end - start) // num_rows))

    def rows(self, index: Sequence[int] | slice) -> FloatArray:
        data = np.asarray(self._data[index])
        if self._kind == GGMLQuantizationType.F32:
            return data.view(np.float32)
        rows: FloatArray = dequantize(data, self._kind)
        return rows


def _pointer(array: npt.NDArray[Any], kind: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(kind))
