"""Attention masks for packed rows, sliding windows included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import CapabilityError

if TYPE_CHECKING:
    from paceline.core.arrays import BoolArray, Int64Array

FULL = "full_attention"
"""transformers' name for layers that attend to all positions before."""
SLIDING = "sliding_attention"
"""transformers' name for layers that attend to a window of positions."""


@dataclass(frozen=True, slots=True)
class AttentionPattern:
    """Which masks a model wants.

    Attributes:
        window: positions that a sliding layer looks back, its own included; ``None`` if no layer slides within the
            context.
        per_layer_type: whether the model takes a mask for each type of layer by name, instead of one for all.
    """

    window: int | None
    per_layer_type: bool

    @classmethod
    def of(cls, config: Any, context_length: int) -> AttentionPattern:
        """Read the pattern from a model's text configuration.

        Raises ``CapabilityError`` where some layers are neither full nor sliding-window attention.
        """
        layer_types = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        others = set(layer_types or ()) - {FULL, SLIDING}
        if layer_types is None and getattr(config, "attention_chunk_size", None) is not None:
            others.add("chunked_attention")
        if others:
            raise CapabilityError(
                f"{config.model_type} has {', '.join(sorted(others))} layers, whose state the torch engine cannot "
                "roll back; use a GGUF file with the llama_cpp engine"
            )
        slides = SLIDING in layer_types if layer_types is not None else window is not None
        # A window no shorter than the context never hides anything, so all layers are full.
        if not slides or (isinstance(window, int) and window >= context_length):
            return cls(window=None, per_layer_type=False)
        if not isinstance(window, int):
            raise CapabilityError(
                f"{config.model_type} has sliding windows of {window!r}; the torch engine knows one length for all"
            )
        return cls(window=window, per_layer_type=layer_types is not None)

    def masks(
        self,
        visible: BoolArray,
        row_positions: Int64Array,
        cell_positions: Int64Array,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Any:
        """Return ``attention_mask``: ``[1, 1, rows, width]``, added to scores; or a dictionary of such by layer type.

        ``visible`` ``[rows, width]`` says whether a row may see a cell, windows aside; positions are ``[rows]`` and
        ``[width]``.
        """
        if self.window is None:
            return _additive(visible, dtype, device)
        in_window = visible & (cell_positions[None, :] > row_positions[:, None] - self.window)
        if not self.per_layer_type:
            return _additive(in_window, dtype, device)
        return {FULL: _additive(visible, dtype, device), SLIDING: _additive(in_window, dtype, device)}


def _additive(visible: BoolArray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Every row sees itself, so -inf never fills a whole row and no softmax turns to nan.
    hidden = torch.from_numpy(~visible).to(device)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf"))[None, None]
