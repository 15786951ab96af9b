"""The cache a transformers model writes to: a pool of cells shared by every sequence."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache


class PoolCache(Cache):  # type: ignore[misc]
    """Keys and values ``[1, heads, cells, head_dim]`` of each layer, written where a pass is aimed.

    A model calls :meth:`update` once a layer; it writes the pass's rows into their cells and returns the pool up to
    the highest cell in use. Order in the pool means nothing: positions are in the keys already (rotary embeddings are
    applied before) and the mask alone says who sees whom. Written against transformers 5.23 and 5.24.
    """

    def __init__(self, cells: int) -> None:
        super().__init__(layers=[])
        self._size = cells
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._cells: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self._width = 0

    def aim(self, cells: torch.Tensor, width: int) -> None:
        """Make the next pass write its rows to ``cells`` and read the first ``width`` cells."""
        self._cells = cells
        self._width = width

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the rows ``[1, heads, rows, head_dim]`` of a layer and return the part of its pool in use."""
        if layer_idx not in self._pools:
            # Zeros, not empty memory: a hidden cell has weight 0, and 0 times a stray nan would still be nan. For the
            # same reason a model that overflows to nan spoils later passes, until other tokens take those cells.
            self._pools[layer_idx] = (self._like(key_states), self._like(value_states))
        keys, values = self._pools[layer_idx]
        keys.index_copy_(2, self._cells, key_states)
        values.index_copy_(2, self._cells, value_states)
        return keys[:, :, : self._width], values[:, :, : self._width]

    def layer(self, layer_idx: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._pools[layer_idx]
        return keys[:, :, :width], values[:, :, :width]

    @property
    def cell_bytes(self) -> int:
        """Bytes of one token over all layers; 0 before the first pass."""
        pools = [pool for layer in self._pools.values() for pool in layer]
        return sum(pool[0, :, 0].numel() * pool.element_size() for pool in pools)

    def read(self, cells: torch.Tensor) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return copies of ``cells`` on the host: keys and values ``[1, heads, len(cells), head_dim]`` by layer."""
        return {
            layer: (keys.index_select(2, cells).cpu(), values.index_select(2, cells).cpu())
            for layer, (keys, values) in self._pools.items()
        }

    def write(self, cells: torch.Tensor, layers: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Put into ``cells`` what :meth:`read` returned for as many."""
        for layer, (keys, values) in layers.items():
            pool_keys, pool_values = self._pools[layer]
            pool_keys.index_copy_(2, cells, keys.to(pool_keys.device))
            pool_values.index_copy_(2, cells, values.to(pool_values.device))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Cells that were there before the pass. Models ask, but with positions given they have no use for it."""
        return self._width - len(self._cells)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Columns that :meth:`update` returns, and the offset of the first."""
        return self._width, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self._size

    def _like(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = states.shape
        return torch.zeros((batch, heads, self._size, width), dtype=states.dtype, device=states.device)
