"""States in llama.cpp's buffers: copied to the sequences that they are of, and written for rows that a head reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import llama_cpp.llama_cpp as api
import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.errors import EngineError
from paceline.engines.base import Step
from paceline.engines.llama_cpp import native
from paceline.engines.llama_cpp.lines import NativeBatch, NativeSequence
from paceline.engines.llama_cpp.loading import LoadedModel
from paceline.engines.options import OUTPUT_STATE
from paceline.engines.state_track import MAX_STATES, StateTrack, states_for_rows

_FEW: Final = 16
"""States that are held for a head that reads the cache of its target: it needs the last one, wherever that is then."""


class StateRows:
    """The states of a context's rows.

    Attributes:
        width: numbers of the states that are held of a token; 0 for none.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        self._context = loaded.context
        self._capabilities = loaded.capabilities
        # Layers whose states are noted of every pass; of a head its own.
        self._layers = loaded.options.hold_states
        self._layer_width = int(api.llama_model_n_embd_out(loaded.model))
        self.width = len(self._layers) * self._layer_width
        self._most = _FEW if loaded.settings.lends else MAX_STATES
        self._encodes = loaded.encodes
        self._encoder_batch: NativeBatch | None = None
        # Of the latest native call, whose states lie in llama.cpp's buffer: sequences, the first row of each, its rows.
        self._unread: list[tuple[NativeSequence, int, int]] = []
        self._unread_rows = 0

    def new_track(self, start: int = 0) -> StateTrack | None:
        """Return where to hold states of a sequence from its token ``start`` on; ``None`` if none are held."""
        return StateTrack(self.width, start, self._most) if self.width else None

    def expect(self, unread: list[tuple[NativeSequence, int, int]], rows: int) -> None:
        """Note of whom the rows of a native call are: sequences, the first row of each, its number of rows."""
        self._unread, self._unread_rows = unread, rows

    def copy_expected(self) -> None:
        """Copy the states of the latest native call, which the next one overwrites, to the sequences that they are of.

        They are copied when they are needed, so that a pass can go on while rows are sampled.
        """
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        api.llama_synchronize(self._context)
        rows = np.concatenate(
            [native.state_rows(self._context, layer, self._unread_rows, self._layer_width) for layer in self._layers],
            axis=1,
        )
        for state, first, count in unread:
            if state.track is not None:
                state.track.append(rows[first : first + count])

    def write(self, batch: NativeBatch, steps: Sequence[Step], states: Sequence[NativeSequence]) -> None:
        """Write what a head reads of the states of rows into the batch: those given, or its own."""
        width = self._capabilities.state_width
        read = [
            states_for_rows(step, state.track, len(state.pending), width)
            for step, state in zip(steps, states, strict=True)
        ]
        if self._encodes and (
            given := [rows for rows, step in zip(read, steps, strict=True) if step.states is not None]
        ):
            fused, first = self._encode(np.concatenate(given)), 0
            for index, step in enumerate(steps):
                if step.states is not None:
                    read[index] = fused[first : first + len(step.token_ids)]
                    first += len(step.token_ids)
        row = 0
        for rows in read:
            batch.states[row : row + len(rows)] = rows
            row += len(rows)

    def _encode(self, states: FloatArray) -> FloatArray:
        """Return what a head's encoder fuses states ``[rows, state_width]`` to, ``[rows, own width]``."""
        batch = self._encoder_batch
        if batch is None:
            batch = NativeBatch(self._capabilities.max_rows, 1, states.shape[1])
            batch.native.token = None
            self._encoder_batch = batch
        rows = len(states)
        memory: Any = api.llama_get_memory(self._context)
        # The encoder does not use them, but they must go on from those of some sequence.
        first = api.llama_memory_seq_pos_max(memory, 0) + 1
        batch.positions[:rows] = np.arange(first, first + rows)
        batch.states[:rows] = states
        batch.wanted[:rows] = 1
        batch.native.n_tokens = rows
        status = api.llama_encode(self._context, batch.native)
        if status != 0:
            raise EngineError(f"llama.cpp failed to encode {rows} states (code {status})")
        api.llama_synchronize(self._context)
        return native.state_rows(self._context, OUTPUT_STATE, rows, self.width).copy()
