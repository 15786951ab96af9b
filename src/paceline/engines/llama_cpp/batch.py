"""The rows of a native call."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as api
import numpy as np
import numpy.typing as npt


class NativeBatch:
    """A ``llama_batch``: numpy arrays that llama.cpp reads in place.

    ``id_counts`` is 1 everywhere between passes, so that rows of one sequence need not write it. ``states`` are those
    that a head reads; of width 0 for a model that is none.
    """

    def __init__(self, rows: int, max_ids: int, state_width: int = 0) -> None:
        self.tokens: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self.positions: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self.id_counts: npt.NDArray[np.int32] = np.ones(rows, np.int32)
        self.ids: npt.NDArray[np.int32] = np.zeros((rows, max_ids), np.int32)
        self.wanted: npt.NDArray[np.int8] = np.zeros(rows, np.int8)
        self.states: npt.NDArray[np.float32] = np.zeros((rows, state_width), np.float32)
        self._id_rows: npt.NDArray[np.uintp] = (
            self.ids.ctypes.data + np.arange(rows, dtype=np.uintp) * self.ids.strides[0]
        ).astype(np.uintp)
        int32_pointer = ctypes.POINTER(ctypes.c_int32)
        self.native: Any = api.llama_batch(
            n_tokens=0,
            token=self.tokens.ctypes.data_as(int32_pointer),
            pos=self.positions.ctypes.data_as(int32_pointer),
            n_seq_id=self.id_counts.ctypes.data_as(int32_pointer),
            seq_id=self._id_rows.ctypes.data_as(ctypes.POINTER(int32_pointer)),
            logits=self.wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )
        if state_width:
            self.native.embd = self.states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
