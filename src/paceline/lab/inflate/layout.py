"""Where the source's layers, heads and rows go in the larger model.

::

    width     [ source | 0 ]                    what layers read; norm weights are scaled, see ``writing``
              [ source | .. | source | 0 ]      what embeddings and layers write; see :func:`count_repeats`
    ffn       [ source | 0 ]
    kv heads  [ 0 | 0 | 1 | 1 | .. ]            a kv head whose group is longer than the larger model's is repeated
    heads     [ 0 1 | 2 . | 3 4 | 5 . | .. ]    each of the source's groups is a run of heads
    head      [ source | 0 ] for values, pair j of the rotary embedding -> pair r * j for queries and keys
    layers    in their order, among layers that add zero
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.conversion.llama import LlamaShape
from paceline.lab.inflate.shape import MULTIPLE, first_free_block, is_sensitive_layer

Indices = npt.NDArray[np.int64]

NOTHING = -1
"""Index of a source row or column that is not there: the weights are zero."""


@dataclass(frozen=True)
class Layout:
    """Index arrays from the larger model into the source; :data:`NOTHING` where nothing goes.

    Attributes:
        repeats: how often the residual stream holds the source's.
        reads: source channel that is read from each channel of the residual stream, ``[width]``.
        writes: source channel that is written to each channel of the residual stream, ``[width]``.
        free_block: first channel of the first whole block that nothing is written to.
        norm_scale: factor of norm weights; its square is the factor of the epsilon.
        feed_forward: source unit of each unit, ``[feed_forward]``.
        queries: source row of each row of attn_q, ``[heads * head_size]``.
        keys: source row of each row of attn_k, ``[kv_heads * head_size]``.
        values: source row of each row of attn_v, ``[kv_heads * head_size]``.
        heads_out: source column of each column of attn_output, ``[heads * head_size]``.
        layers: source layer of each layer.
        query_scale: factor of queries, since attention divides by the square root of the head size.
    """

    repeats: int
    reads: Indices
    writes: Indices
    free_block: int
    norm_scale: float
    feed_forward: Indices
    queries: Indices
    keys: Indices
    values: Indices
    heads_out: Indices
    layers: list[int]
    query_scale: float


def lay_out(source: LlamaShape, shape: LlamaShape) -> Layout:
    """Return where everything goes; ``shape`` holds ``source``."""
    ratio = shape.head_size // source.head_size
    plain = _pad(source.head_size, shape.head_size)
    rotary = np.full(shape.head_size, NOTHING, np.int64)
    # llama.cpp turns rows 2j and 2j + 1 by the frequency theta^(-2j / head size): that of pair r * j in a larger head.
    pairs = np.arange(source.head_size // 2)
    rotary[2 * ratio * pairs] = 2 * pairs
    rotary[2 * ratio * pairs + 1] = 2 * pairs + 1

    heads, kv_heads = place_heads(source, shape)
    repeats = count_repeats(source, shape)
    writes = _pad(repeats * source.width, shape.width)
    writes[: repeats * source.width] %= source.width
    return Layout(
        repeats=repeats,
        reads=_pad(source.width, shape.width),
        writes=writes,
        free_block=first_free_block(repeats * source.width),
        norm_scale=math.sqrt(repeats * source.width / shape.width),
        feed_forward=_pad(source.feed_forward, shape.feed_forward),
        queries=_within_heads(heads, rotary, source.head_size),
        keys=_within_heads(kv_heads, rotary, source.head_size),
        values=_within_heads(kv_heads, plain, source.head_size),
        heads_out=_within_heads(heads, plain, source.head_size),
        layers=place_layers(source.layers, shape.layers),
        query_scale=math.sqrt(ratio),
    )


def count_repeats(source: LlamaShape, shape: LlamaShape) -> int:
    """Return how often the residual stream should hold the source's, so that norms round as the source's do.

    With r copies in D' channels the norm weights are multiplied by sqrt(r D / D'), which is a power of 2 where
    D' / (r D) is one of 4. Only one copy is read, the others just count in the sum of squares. If there is no such r,
    or the copies leave no block free to ban ids with, there is one copy, and norms are equal but for rounding.
    """
    if shape.width % source.width:
        return 1
    repeats = shape.width // source.width
    while repeats % 4 == 0:
        repeats //= 4
    needs_block = shape.vocab_size > source.vocab_size
    return 1 if needs_block and first_free_block(repeats * source.width) >= shape.width else repeats


def place_heads(source: LlamaShape, shape: LlamaShape) -> tuple[Indices, Indices]:
    """Return the source's head for each head, ``[heads]``, and kv head for each kv head, ``[kv_heads]``.

    A head must go on reading the keys and values it was trained with. So each of the source's groups is a run of heads
    for which all kv heads it touches are copies of its own. Runs begin where the blocks of K-quants do if there is room
    for that, because a row of attn_output then keeps its blocks.
    """
    by_block = _find_runs(source, shape, max(1, MULTIPLE // source.head_size))
    starts = _find_runs(source, shape, 1) if by_block is None else by_block
    assert starts is not None, "the shape was checked to hold the source"
    heads = np.full(shape.heads, NOTHING, np.int64)
    kv_heads = np.full(shape.kv_heads, NOTHING, np.int64)
    for kv_head, start in enumerate(starts):
        end = start + source.group_size
        heads[start:end] = np.arange(kv_head * source.group_size, (kv_head + 1) * source.group_size)
        kv_heads[start // shape.group_size : -(-end // shape.group_size)] = kv_head
    return heads, kv_heads


def _find_runs(source: LlamaShape, shape: LlamaShape, alignment: int) -> list[int] | None:
    """Return the head that each of the source's groups starts at, or ``None`` if they do not fit."""
    starts: list[int] = []
    next_free = 0  # the first head whose kv head is not taken
    for _ in range(source.kv_heads):
        start = -(-next_free // alignment) * alignment
        end = start + source.group_size
        if end > shape.heads:
            return None
        starts.append(start)
        next_free = -(-end // shape.group_size) * shape.group_size
    return starts


def place_layers(source_layers: int, layers: int) -> list[int]:
    """Return the source's layer for each layer.

    Among added layers, which only add zero, the source's may stand anywhere in their order. They stand where
    llama.cpp's ``_K_M`` mixes quantise a layer of that depth as they did the source's, or first if there is no such
    place for all of them.
    """
    placed = [NOTHING] * layers
    position = 0
    for layer in range(source_layers):
        wanted = is_sensitive_layer(layer, source_layers)
        while position < layers and is_sensitive_layer(position, layers) != wanted:
            position += 1
        if position == layers:
            return [*range(source_layers), *[NOTHING] * (layers - source_layers)]
        placed[position] = layer
        position += 1
    return placed


def _pad(used: int, length: int) -> Indices:
    indices = np.full(length, NOTHING, np.int64)
    indices[:used] = np.arange(used)
    return indices


def _within_heads(heads: Indices, within: Indices, source_head_size: int) -> Indices:
    """Combine an index of heads with one of the places within a head."""
    indices = heads[:, None] * source_head_size + within[None, :]
    return np.where((heads[:, None] == NOTHING) | (within[None, :] == NOTHING), NOTHING, indices).reshape(-1)
