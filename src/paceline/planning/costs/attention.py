"""Whether attention is one fused kernel where both ways are open: decided once, by what plain rounds cost.

Plain decoding is what every gain is measured against, and what people have today, so it decides. Passes that verify
drafts may be dearer for it over long contexts; planning knows what they cost, because the profile is measured after
this. Where plain rounds tell no difference attention is not fused, which keeps those passes cheap, unless several
requests share passes: unfused, every row is scored against the cells of all of them, so that rounds become dearer the
more run, by a fifth with four on a CPU, which rounds of one row do not tell::

    one context of the model at a time      unfused │ fused │ fused │ unfused
    passes of one row in each               after a few tokens, and after more where there is time to read them

The order makes up for a machine that becomes faster or slower meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import NoRoomError
from paceline.engines.base import Engine
from paceline.engines.loading import ModelOptions, engine_for, open_engine
from paceline.planning.costs.meter import Meter, ProfilingBudget, Report
from paceline.planning.costs.subject import Subject, opened
from paceline.planning.keeping import load_entry, model_key, store_entry

LEAST_GAIN: Final = 0.02
"""Share of a plain round that fusing must save. Less is lost in the noise of a few passes, and not worth the near-ties:
llama.cpp's fused kernel rounds more, and by where tokens lie in the cache, which trees change."""

MOST_LOSS: Final = 0.02
"""Share of a plain round that fusing may cost where several requests share passes: no more than noise."""

MAX_S: Final = 2.0
"""Seconds for all of it, from the end of each context's first pass."""

_VERSION: Final = 2
"""Of what is kept. The first chose for several requests as for one."""

_LEAST_CONTEXT: Final = 64
"""Tokens; in less there is nothing to gain, nor room to measure in."""
_ORDER: Final = (False, True, True, False)
_PASSES: Final = 8
_SHORT: Final = 32
_LONG: Final = 1024
_LEAST_LONG: Final = 384
"""Tokens; what fewer add is lost in the noise."""
_FILL_SHARE: Final = 0.5
"""Of the seconds of one context, for reading the longer text."""


class EitherAttention(Engine, Protocol):
    """An engine that can fuse attention or not."""

    @property
    def fused_attention(self) -> bool | None:
        """Whether it does; ``None`` where that is not open."""
        ...

    def fuse_attention(self, fused: bool) -> None:
        """Change that, while no sequence is open; all that is cached is lost."""
        ...


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """An engine, and what it was opened with.

    Attributes:
        engine: the engine.
        options: as they were asked for, with whether attention is fused where that was open.
        measured: that was measured just now, which took some of the time that a first load may take.
    """

    engine: Engine
    options: ModelOptions
    measured: bool = False


def open_model(
    options: ModelOptions, *, force: bool = False, clock: Clock | None = None, report: Report | None = None
) -> OpenedModel:
    """Open a model with the attention that is faster here.

    What is found is kept on this machine, for this model, this context length and these threads.

    Args:
        options: the model, and how to run it.
        force: measure even if it was measured before.
        clock: where times come from.
        report: told about progress of measuring.

    Raises:
        InputError: as :func:`~paceline.engines.loading.open_engine` does.
        EngineError: a pass failed.
    """
    if not _runs_gguf(options) or options.flash_attention is not None or options.exact:
        return OpenedModel(open_engine(options), options)
    key = model_key(options)
    kept = None if force else load_entry("attention", key, _read)
    if kept is not None:
        chosen = dataclasses.replace(options, flash_attention=kept)
        return OpenedModel(open_engine(chosen), chosen)
    engine = open_engine(options)
    if not _is_open(engine) or engine.capabilities.context_length < _LEAST_CONTEXT:
        return OpenedModel(engine, options)
    try:
        fused = measure_attention(engine, clock=clock, report=report)
        engine.fuse_attention(fused)
    except BaseException:
        engine.close()
        raise
    store_entry("attention", key, {"version": _VERSION, "fused": fused})
    return OpenedModel(engine, dataclasses.replace(options, flash_attention=fused), measured=True)


def like_target(draft: ModelOptions, target: ModelOptions) -> ModelOptions:
    """Return a draft model's options with its target's attention, where nothing was said of its own.

    Its passes are of few rows, too, and measuring both would take twice as long.
    """
    fused = target.flash_attention
    if fused is None or target.exact or draft.exact or draft.flash_attention is not None:
        return draft
    if not (_runs_gguf(draft) and _runs_gguf(target)) or draft.devices != target.devices:
        return draft
    return dataclasses.replace(draft, flash_attention=fused)


def _runs_gguf(options: ModelOptions) -> bool:
    return (options.engine or engine_for(Path(options.path))) == "llama_cpp"


def measure_attention(engine: EitherAttention, *, clock: Clock | None = None, report: Report | None = None) -> bool:
    """Return whether plain rounds are faster with fused attention, by at least :data:`LEAST_GAIN`.

    Where the engine holds several requests they may be slower, by up to :data:`MOST_LOSS`.

    Args:
        engine: where both are open; no sequence is. Its attention may be another afterwards.
        clock: where times come from.
        report: told about progress.

    Raises:
        EngineError: a pass failed.
    """
    clock = clock or WallClock()
    times_s: dict[bool, dict[int, list[float]]] = {fused: {} for fused in _ORDER}
    for number, fused in enumerate(_ORDER):
        engine.fuse_attention(fused)
        meter = Meter(clock, ProfilingBudget(MAX_S / len(_ORDER), None), lambda share: None)
        with opened(engine, meter, random.Random(0), verifies=True) as subject:
            for context, seconds in _time_plain_rounds(subject, meter).items():
                times_s[fused].setdefault(context, []).extend(seconds)
        if report is not None:
            report((number + 1) / len(_ORDER))
    ratios = [
        statistics.median(times_s[True][context]) / statistics.median(times_s[False][context])
        for context in times_s[False]
        if context in times_s[True]
    ]
    most = 1.0 + MOST_LOSS if engine.capabilities.max_sequences > 1 else 1.0 - LEAST_GAIN
    return statistics.mean(ratios) <= most


def _time_plain_rounds(subject: Subject, meter: Meter) -> Mapping[int, list[float]]:
    """Return the seconds of passes of one row, by the context before them, ``_SHORT`` or ``_LONG``."""
    subject.warm_up()
    meter.start()
    subject.fill(_SHORT, 1.0)
    times_s = {_SHORT: [subject.time_pass(1)]}
    with contextlib.suppress(NoRoomError):
        while len(times_s[_SHORT]) < _PASSES and meter.allows(1.0 - _FILL_SHARE):
            times_s[_SHORT].append(subject.time_pass(1))
        if subject.reachable(_LONG, _FILL_SHARE) >= _LEAST_LONG:
            subject.fill(_LONG, _FILL_SHARE)
            times_s[_LONG] = [subject.time_pass(1)]
            while len(times_s[_LONG]) < _PASSES and meter.allows(1.0):
                times_s[_LONG].append(subject.time_pass(1))
    return times_s


def _is_open(engine: Engine) -> TypeGuard[EitherAttention]:
    return getattr(engine, "fused_attention", None) is not None


def _read(data: Any) -> bool:
    fused = data["fused"]
    if data["version"] != _VERSION or not isinstance(fused, bool):
        raise ValueError(f"{data!r} does not say whether attention is fused")
    return fused
