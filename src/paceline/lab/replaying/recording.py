"""Recordings: what every drafter would have proposed at every position of a text, for replay without a model.

Under ``coupled``, and greedily, the text does not depend on what is drafted. So one request needs recording once: its
tokens, and at every position what each drafter would propose there with the text so far as its history. Whatever a
policy decides, the rounds it would have had can be put together from that (``replay.py``).

What a drafter proposes at a position is a chain, with runners-up beside each of its tokens::

    position   history            chain (best proposals)      siblings at each depth
    t          prompt + t tokens  c1 ── c2 ── c3 ── ...        s1, s2, s3, ...

A draft model's chain is what it says with its whole history in its context: a model whose context overflows forgets
its oldest half at moments that depend on the policy, and a recording holds only one of those pasts.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from paceline.atomic_output import atomic_file
from paceline.core.errors import InputError
from paceline.core.tree import Evidence

RECORDING_VERSION: Final = 2
"""Raised whenever recordings are written in another way; older ones are made again."""

RECORDED_DEPTH: Final = 16
"""Deepest proposals that are recorded."""

RECORDED_SIBLINGS: Final = 4
"""Most proposals that are recorded for one position."""

_FORMAT: Final = "paceline-recordings"
_NOTHING: Final = -1
# Of a recording, as it is.
_IN_THE_HEADER: Final = ("name", "num_prompt", "max_tokens", "ignore_end", "temperature", "vocab_size")
# What numpy, zip, JSON and our own reading raise over bytes that are not what they should be.
_DAMAGE: Final = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    EOFError,
    OSError,
    NotImplementedError,
    OverflowError,
    MemoryError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class Level:
    """What a drafter proposes at one depth of its chain.

    Attributes:
        token_ids: the chain's own token, then its siblings.
        margins: for each, as the rest in :class:`~paceline.core.tree.Evidence`; ``None`` where it is not known.
    """

    token_ids: tuple[int, ...]
    margins: tuple[float | None, ...]
    probability: float | None = None
    match_length: int | None = None
    count: int | None = None
    resumed: bool = False

    def __post_init__(self) -> None:
        if not self.token_ids or len(self.margins) != len(self.token_ids):
            raise ValueError(f"a level of {len(self.token_ids)} tokens with {len(self.margins)} margins")


Chain = tuple[Level, ...]
"""A drafter's proposals at one position, from the first depth downwards; empty where it has none."""


@dataclass(frozen=True, slots=True)
class DrafterTrace:
    """What one drafter would have proposed at every position of a text.

    Attributes:
        is_model: whether each level costs a pass of a draft model; else everything is proposed at once.
        end_ids: tokens after which a draft model proposes nothing.
        chains: ``chains[i]`` is proposed when ``i + 1`` tokens of the answer are out.
    """

    name: str
    is_model: bool
    end_ids: frozenset[int]
    chains: tuple[Chain, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """One request, as every policy would meet it.

    Attributes:
        name: of the prompt, for tables.
        token_ids: the answer.
        end_ids: the target's end tokens.
        depth: deepest proposals recorded.
        siblings: most proposals recorded for one position.
        traces: one for each drafter, in the order they are asked.
    """

    name: str
    num_prompt: int
    token_ids: tuple[int, ...]
    max_tokens: int
    ignore_end: bool
    end_ids: frozenset[int]
    temperature: float
    vocab_size: int
    depth: int
    siblings: int
    traces: tuple[DrafterTrace, ...]

    def __post_init__(self) -> None:
        if self.num_prompt < 1 or not 1 <= len(self.token_ids) <= self.max_tokens:
            raise ValueError(f"{len(self.token_ids)} of {self.max_tokens} tokens after a prompt of {self.num_prompt}")
        if self.depth < 1 or self.siblings < 1:
            raise ValueError(f"depth {self.depth} and {self.siblings} siblings: both are at least 1")
        if not all(0 <= token_id < self.vocab_size for token_id in self.token_ids):
            raise ValueError(f"the text has tokens outside the vocabulary of {self.vocab_size}")
        for trace in self.traces:
            if len(trace.chains) != len(self.token_ids) - 1:
                raise ValueError(f"{len(trace.chains)} positions of {trace.name} in {len(self.token_ids)} tokens")


def read_evidence(level: Level, index: int) -> Evidence:
    """Return what the drafter knew of one proposal of a level."""
    return Evidence(level.probability, level.match_length, level.count, level.margins[index], level.resumed)


def save_recordings(path: Path, recordings: Sequence[Recording]) -> None:
    """Write recordings made with the same drafters to one file (numpy's ``.npz``); all of it or nothing.

    Raises:
        InputError: there are none, their drafters differ, or the file cannot be written.
    """
    if not recordings:
        raise InputError("there are no recordings to save: record a prompt first")
    shapes = {(r.depth, r.siblings, tuple((t.name, t.is_model, t.end_ids) for t in r.traces)) for r in recordings}
    if len(shapes) > 1:
        raise InputError("recordings of different drafters or depths: save each kind to a file of its own")
    first = recordings[0]
    header = {
        "format": _FORMAT,
        "version": RECORDING_VERSION,
        "depth": first.depth,
        "siblings": first.siblings,
        "drafters": [{"name": t.name, "is_model": t.is_model, "end_ids": sorted(t.end_ids)} for t in first.traces],
        "recordings": [
            {name: getattr(r, name) for name in _IN_THE_HEADER}
            | {"num_tokens": len(r.token_ids), "end_ids": sorted(r.end_ids)}
            for r in recordings
        ],
    }
    arrays: dict[str, npt.NDArray[Any]] = {
        "header": np.frombuffer(json.dumps(header).encode(), dtype=np.uint8),
        "token_ids": np.concatenate([np.array(r.token_ids, dtype=np.int32) for r in recordings]),
    }
    for index in range(len(first.traces)):
        chains = [chain for r in recordings for chain in r.traces[index].chains]
        for key, values in _packed(chains, first.depth, first.siblings).items():
            arrays[f"{index}.{key}"] = values
    # mypy takes the arrays for the keyword that allows pickles.
    with atomic_file(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def load_recordings(path: Path) -> list[Recording]:
    """Read what :func:`save_recordings` wrote.

    Raises:
        InputError: the file cannot be read, is something else, damaged, or of another version.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the recordings {path}: {error.strerror}") from error
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        header = json.loads(arrays["header"].tobytes())
        if header["format"] != _FORMAT:
            raise ValueError(f"the format is {header['format']!r}")
        version = header["version"]
    except _DAMAGE as error:
        raise _damaged(path, error) from None
    if version != RECORDING_VERSION:
        raise InputError(
            f"the recordings {path} are of version {version}, and only {RECORDING_VERSION} can be read: make them again"
        )
    try:
        return _unpacked(header, arrays)
    except _DAMAGE as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path} is not a file of recordings, or it is damaged ({type(error).__name__}: {error}): "
        "make it with python -m benchmarks record"
    )


def _packed(chains: Sequence[Chain], depth: int, siblings: int) -> dict[str, npt.NDArray[Any]]:
    """Lay chains side by side: tokens and margins ``[chains, depth, siblings]``, the rest ``[chains, depth]``."""
    tokens = np.full((len(chains), depth, siblings), _NOTHING, dtype=np.int32)
    margins = np.full((len(chains), depth, siblings), math.nan, dtype=np.float32)
    # In full, as policies compare it with thresholds that are counts' ratios.
    probabilities = np.full((len(chains), depth), math.nan, dtype=np.float64)
    matches = np.full((len(chains), depth), _NOTHING, dtype=np.int32)
    counts = np.full((len(chains), depth), _NOTHING, dtype=np.int32)
    resumed = np.zeros((len(chains), depth), dtype=np.bool_)
    for row, chain in enumerate(chains):
        for column, level in enumerate(chain):
            width = len(level.token_ids)
            tokens[row, column, :width] = level.token_ids
            margins[row, column, :width] = [math.nan if margin is None else margin for margin in level.margins]
            if level.probability is not None:
                probabilities[row, column] = level.probability
            if level.match_length is not None:
                matches[row, column] = level.match_length
            if level.count is not None:
                counts[row, column] = level.count
            resumed[row, column] = level.resumed
    return {
        "token_ids": tokens,
        "margins": margins,
        "probabilities": probabilities,
        "match_lengths": matches,
        "counts": counts,
        "resumed": resumed,
    }


def _unpacked(header: Any, arrays: dict[str, npt.NDArray[Any]]) -> list[Recording]:
    depth, siblings = int(header["depth"]), int(header["siblings"])
    texts = arrays["token_ids"].tolist()
    positions = sum(entry["num_tokens"] - 1 for entry in header["recordings"])
    if len(texts) != positions + len(header["recordings"]):
        raise ValueError(f"{len(texts)} tokens of text for {positions} positions")
    chains = [_chains(arrays, index, (positions, depth, siblings)) for index in range(len(header["drafters"]))]
    recordings = []
    text_start = chain_start = 0
    for entry in header["recordings"]:
        text_end = text_start + entry["num_tokens"]
        chain_end = chain_start + entry["num_tokens"] - 1
        traces = tuple(
            DrafterTrace(
                drafter["name"],
                bool(drafter["is_model"]),
                frozenset(drafter["end_ids"]),
                tuple(recorded[chain_start:chain_end]),
            )
            for drafter, recorded in zip(header["drafters"], chains, strict=True)
        )
        recordings.append(
            Recording(
                **{name: entry[name] for name in _IN_THE_HEADER},
                token_ids=tuple(texts[text_start:text_end]),
                end_ids=frozenset(entry["end_ids"]),
                depth=depth,
                siblings=siblings,
                traces=traces,
            )
        )
        text_start, chain_start = text_end, chain_end
    return recordings


def _chains(arrays: dict[str, npt.NDArray[Any]], index: int, shape: tuple[int, int, int]) -> list[Chain]:
    tokens, margins = arrays[f"{index}.token_ids"], arrays[f"{index}.margins"]
    flat = [arrays[f"{index}.{key}"] for key in ("probabilities", "match_lengths", "counts", "resumed")]
    if any(array.shape != shape for array in (tokens, margins)) or any(array.shape != shape[:2] for array in flat):
        raise ValueError(f"arrays of drafter {index} are not of the shape {shape}")
    widths = (tokens >= 0).sum(axis=2)
    lengths = (widths > 0).sum(axis=1).tolist()
    rows = zip(
        lengths, widths.tolist(), tokens.tolist(), margins.tolist(), *(array.tolist() for array in flat), strict=True
    )
    return [
        tuple(
            Level(
                tuple(token_ids[column][: width[column]]),
                tuple(_known(margin) for margin in margin_row[column][: width[column]]),
                _known(probability[column]),
                None if match_length[column] < 0 else match_length[column],
                None if count[column] < 0 else count[column],
                bool(resumed[column]),
            )
            for column in range(length)
        )
        for length, width, token_ids, margin_row, probability, match_length, count, resumed in rows
    ]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
