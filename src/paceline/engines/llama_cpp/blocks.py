"""Heads of GGUF models that say a block of tokens in one pass: DFlash, and DSpark where each depends on the one before.

The cache holds what the head makes of the target's states. A pass of it has either states, which are of text and stay,
or blocks, which go as soon as they were said::

    cache   h0  h1  ...  h(n-2)          states of the text, without its last token
    block                        t(n-1)  mask  mask  mask        every row sees every other
                                   │      d1    d2    d3         DFlash says d1 at the first mask,
                                   d1     d2    d3    d4         and DSpark already at the root

llama.cpp tells the two kinds of passes apart by whether rows have tokens. It says nothing where a block has only some
outputs, has more rows than the head was trained for, or is still there when states come: none of that can be asked for.

Source: https://arxiv.org/abs/2602.06036 (DFlash), https://arxiv.org/abs/2607.05147 (DSpark).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from paceline.core.arrays import FloatArray
from paceline.core.errors import ModelFileError
from paceline.engines.llama_cpp.states import BlockForm, read_token_ids
from paceline.models.gguf_header import GgufHeader, read_gguf_header

_LEAST_CHANCE: Final = 1e-7
"""Confidences nearer to 0 or 1 are rounded away."""


class BlockRows(Protocol):
    """The rows of a pass of blocks."""

    def logits(self, row: int) -> FloatArray:
        """Return the logits ``[vocab]`` of a row; ``EngineError`` after another pass."""
        ...

    def confidence(self, row: int) -> float:
        """Return the confidence that a row says."""
        ...


class Block:
    """What a pass said of one sequence. See :class:`~paceline.engines.base.Block` for the contract.

    Args:
        rows: of the pass.
        first: the row of what follows the root.
        form: of the block.
        follow: what each token adds to the next; ``None`` for nothing.
    """

    def __init__(self, rows: BlockRows, first: int, form: BlockForm, follow: Follow | None) -> None:
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
