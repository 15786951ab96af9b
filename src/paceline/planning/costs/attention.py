"""Whether attention is one fused kernel where both ways are open: by what the rounds of requests cost either way.

What a round costs is a straight line in the context, for every number of rows, and the two lines cross: on some
machines the fused kernel is faster after few tokens and slower after many, and for wide passes the more so. So rounds
are timed at two contexts, plain ones and ones as wide as drafts make them, of one request and of several, whose cells
all rows are scored against unless attention is fused::

    one context of the model at a time      unfused │ fused │ fused │ unfused
    rounds in each                          after 32 tokens: 1 row, 8 rows, of several: 1 row each, 4 rows each
                                            after 1,024: the same

The order makes up for a machine that becomes faster or slower meanwhile. Where there is no time for four, the first two
decide, by one lap each: a slope is told by its contexts, and repeats only make it surer. A context is filled by copying
cells, which takes no time, where the engine can do that. Where it cannot (recurrent states, keys that cannot be turned
to another place), it is read, and ends up as long as there was time for, but never by fewer than :data:`_MIN_LEVER`
tokens longer than the short one, however long that takes: less would tell no slope, and a wrong choice is paid for with
every token.

What is kept are the times, and what is chosen by them is up to each load (:meth:`AttentionTimes.is_fusing_faster`):
with a draft model mostly the wide rounds decide, else mostly the plain ones.

It stays as it is from one request to the next, though the better one may depend on their lengths: switching cannot pay.
It takes another context of the model, which loses all that is cached. A choice that is better by 5 % saves 130 ms of an
answer of 200 tokens at 13 ms each; with 3 ms to read a token, that is gone where 40 tokens of a conversation have to be
read again. Nor may a text depend on which requests came before it, and fused sums are rounded otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

from paceline.core.clock import Clock, WallClock
from paceline.core.errors import CapabilityError, NoRoomError
from paceline.engines.base import Engine
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions, engine_for
from paceline.planning.costs.meter import Meter, ProfilingBudget, Report
from paceline.planning.costs.subject import Subject, open_subject
from paceline.planning.disk_cache import entry_path, load_entry, model_key, store_entry

MIN_GAIN: Final = 0.02
"""Share of the time that fusing must save. Less is lost in the noise of a few passes, and not worth the near-ties:
llama.cpp's fused kernel rounds more, and by where tokens lie in the cache, which trees change."""

MAX_S: Final = 3.0
"""Seconds for all of it, from the end of each context's first pass, where passes take less than some 60 ms."""

_VERSION: Final = 3
"""Of what is kept. The second knew plain rounds after 32 tokens, and preferred one choice for several requests."""

_MIN_CONTEXT: Final = 64
"""Tokens; in less there is nothing to gain, nor room to measure in."""

_ORDER: Final = (False, True, True, False)
"""Whether attention is fused, turn by turn."""

_SHORT: Final = 32
"""Tokens of the short context."""

_LONG: Final = 1024
"""Tokens of the long context, at most."""

_MIN_LEVER: Final = 256
"""Tokens by which the contexts differ at least, where the model has so many: llama.cpp runs attention over the next
multiple of so many cells."""
_FILL_SHARE: Final = 0.5
"""Of the seconds of one context, for reading the longer text."""
_SHARES: Final = (0.2, 0.4, 0.7, 1.0)
"""Of the seconds of one context, after which no further lap is made: of one request and of several, at the short
context and at the long one."""
_PAIR_SHARE: Final = 0.6
"""Of all the seconds, within which the first two turns must be over for there to be two more."""

_MAX_LAPS: Final = 5
"""Laps of one kind of round in a turn."""

_LAP: Final = 2
"""Narrow rounds of a lap, before a wide one: after another width llama.cpp plans the first of them anew."""
_SLOW_S: Final = 0.1
"""A plain round that takes more is not repeated, as planning is little of it. Nor are wide rounds of several requests
timed then: those of one tell what rows cost, and plain ones of several what the cells of others do."""

_WIDE: Final = 8
"""Rows of a round with drafts."""

_REQUESTS: Final = 4
"""Requests that share a round, where several do."""

_WIDE_EACH: Final = 4
"""Rows of each request's drafts where several share a round."""

_MAX_COUNT: Final = 1 << 31
_SHORTEST_S: Final = 1e-9
_LONGEST_S: Final = 1e6

_WEIGHTS: Final = {128: 1, 256: 2, 512: 3, 1024: 2, 2048: 1}
"""Contexts, and how much what a round costs there counts: instructions and a turn or two of a conversation are some
hundred tokens, and so is an answer. Contexts that are longer than the model's are left out."""

_COPIES_SHARE: Final = 0.15
"""Share of a request's time that goes to rounds with drafts where there is no draft model, so that drafts are copies:
where those are three tokens of ten, and six come of a round that takes as long as two or three plain ones, it is one
part in seven. It counts without speculation too, so that a text is rounded alike with it and without."""
_DRAFTS_SHARE: Final = 0.75
"""Share of a request's time that goes to rounds with drafts where there is a draft model: most rounds."""


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
class RoundTimes:
    """What one kind of round takes.

    Attributes:
        requests: how many share it.
        rows: of each request.
        context: tokens of each request before it.
        unfused_s: seconds with attention that is not fused.
        fused_s: seconds with fused attention.
    """

    requests: int
    rows: int
    context: int
    unfused_s: float
    fused_s: float

    def __post_init__(self) -> None:
        counts, times_s = (self.requests, self.rows, self.context), (self.unfused_s, self.fused_s)
        if not (min(counts) >= 1 and max(counts) <= _MAX_COUNT):
            raise ValueError(f"{counts} requests, rows and tokens: give 1 to {_MAX_COUNT}")
        if not (min(times_s) >= _SHORTEST_S and max(times_s) <= _LONGEST_S):
            raise ValueError(f"{times_s} s: a round takes {_SHORTEST_S} to {_LONGEST_S}")


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """What rounds take with either attention.

    Attributes:
        context_length: most tokens of a request.
        rounds: at one or two contexts of each kind.
    """

    context_length: int
    rounds: tuple[RoundTimes, ...]

    def __post_init__(self) -> None:
        if self.context_length < 1:
            raise ValueError(f"a context of {self.context_length} tokens: the least is 1")
        if not any(each.requests == each.rows == 1 for each in self.rounds):
            raise ValueError("no plain round of one request was timed")

    def is_fusing_faster(self, wide_share: float) -> bool:
        """Return whether requests take less time with fused attention, by at least :data:`MIN_GAIN`.

        It is the ratio of times that is averaged, so that every context and number of requests counts by its weight and
        not by how long its rounds take: one request and several alike.

        Args:
            wide_share: of a request's time, what goes to rounds with drafts.
        """
        requests = {each.requests for each in self.rounds}
        return statistics.mean(self._log_ratio(number, wide_share) for number in requests) < math.log1p(-MIN_GAIN)

    def plain_s(self, *, fused: bool) -> float:
        """Return the seconds of a plain round of one request after few tokens."""
        plain = min((e for e in self.rounds if e.requests == e.rows == 1), key=lambda each: each.context)
        return plain.fused_s if fused else plain.unfused_s

    def _log_ratio(self, requests: int, wide_share: float) -> float:
        """Return the mean logarithm of fused over unfused seconds, of rounds of so many requests."""
        narrow, wide = (
            [e for e in self.rounds if e.requests == requests and (e.rows > 1) is is_wide] for is_wide in (False, True)
        )
        if not (narrow and wide):
            return self._log_ratio_of(narrow or wide)
        return (1.0 - wide_share) * self._log_ratio_of(narrow) + wide_share * self._log_ratio_of(wide)

    def _log_ratio_of(self, rounds: Sequence[RoundTimes]) -> float:
        contexts = {context: weight for context, weight in _WEIGHTS.items() if context <= self.context_length}
        contexts = contexts or {self.context_length: 1}
        unfused = [(each.context, each.unfused_s) for each in rounds]
        fused = [(each.context, each.fused_s) for each in rounds]
        logs = (weight * math.log(_on_line(fused, c) / _on_line(unfused, c)) for c, weight in contexts.items())
        return sum(logs) / sum(contexts.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain data for :func:`json.dumps`."""
        return {"version": _VERSION, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> AttentionTimes:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: it is of another version, or its figures make no sense.
        """
        if data["version"] != _VERSION:
            raise ValueError(f"version {data['version']} is not {_VERSION}")
        return cls(_count(data["context_length"]), tuple(_round_times(each) for each in data["rounds"]))


def _on_line(points: Sequence[tuple[int, float]], context: int) -> float:
    """Return the seconds after a context, on the line through those at one or two others.

    It never falls: no cache makes a pass faster, but noise can make it look so.
    """
    (short, short_s), (long, long_s) = min(points), max(points)
    if long_s <= short_s or long == short:
        return (short_s + long_s) / 2
    # A line that is steep may pass below zero where nothing was timed.
    return max(short_s + (context - short) * (long_s - short_s) / (long - short), short_s / 2)


def _round_times(data: Any) -> RoundTimes:
    requests, rows, context = (_count(data[name]) for name in ("requests", "rows", "context"))
    return RoundTimes(requests, rows, context, float(data["unfused_s"]), float(data["fused_s"]))


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


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
    options: ModelOptions,
    *,
    has_draft: bool = False,
    force: bool = False,
    clock: Clock | None = None,
    report: Report | None = None,
) -> OpenedModel:
    """Open a model with the attention that is faster here.

    What is found is kept on this machine, for this model, this context length and these threads.

    Args:
        has_draft: a draft model will draft for it.

    Raises:
        InputError: as :func:`~paceline.engines.loading.open_engine` does.
        EngineError: a pass failed.
    """
    if not _runs_gguf(options) or options.flash_attention is not None or options.exact:
        return OpenedModel(open_engine(options), options)
    wide_share = _DRAFTS_SHARE if has_draft else _COPIES_SHARE
    key = model_key(options)
    kept = None if force else load_entry("attention", key, AttentionTimes.from_json)
    if kept is not None:
        chosen = dataclasses.replace(options, flash_attention=kept.is_fusing_faster(wide_share))
        return OpenedModel(open_engine(chosen), chosen)
    engine = open_engine(options)
    if not _is_open(engine) or engine.capabilities.context_length < _MIN_CONTEXT:
        return OpenedModel(engine, options)
    try:
        times = measure_attention(engine, clock=clock, report=report)
        fused = times.is_fusing_faster(wide_share)
        engine.fuse_attention(fused)
    except BaseException:
        engine.close()
        raise
    store_entry("attention", key, times.to_json())
    return OpenedModel(engine, dataclasses.replace(options, flash_attention=fused), measured=True)


def drop_unless_holds(options: ModelOptions, holds: Callable[[float], bool]) -> None:
    """Drop what is kept of a model's attention where it was measured on a machine that was not as it is now.

    So the next load measures it anew. To do so at once would take another context of the model, after what opening it
    and checking its profile have taken already.

    Args:
        holds: whether plain rounds, which took so many seconds then, take about as long now.
    """
    if options.flash_attention is None or options.exact or not _runs_gguf(options):
        return
    key = model_key(dataclasses.replace(options, flash_attention=None))
    kept = load_entry("attention", key, AttentionTimes.from_json)
    if kept is not None and not holds(kept.plain_s(fused=options.flash_attention)):
        with contextlib.suppress(OSError):
            entry_path("attention", key).unlink(missing_ok=True)


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


def measure_attention(
    engine: EitherAttention, *, clock: Clock | None = None, report: Report | None = None
) -> AttentionTimes:
    """Time rounds with attention fused and not.

    Args:
        engine: where both are open; no sequence is. Its attention may be another afterwards.

    Raises:
        EngineError: a pass failed.
    """
    clock = clock or WallClock()
    report = report or (lambda share: None)
    turns: dict[bool, list[dict[tuple[int, int, int], float]]] = {fused: [] for fused in _ORDER}
    long: int | None = None
    took_s = 0.0
    for number, fused in enumerate(_ORDER):
        if number == len(turns) and took_s > _PAIR_SHARE * MAX_S:
            break
        engine.fuse_attention(fused)
        meter = Meter(clock, ProfilingBudget(MAX_S / len(_ORDER), None), lambda share: None)
        with open_subject(engine, meter, random.Random(0), verifies=True) as subject:
            turns[fused].append({})
            long = _time_rounds(subject, meter, long, turns[fused][-1])
        meter.stop()
        took_s += meter.took_s
        report((number + 1) / len(_ORDER))
    report(1.0)
    kinds = [kind for kind in turns[False][0] if all(kind in turn for each in turns.values() for turn in each)]
    return AttentionTimes(
        engine.capabilities.context_length,
        tuple(
            RoundTimes(
                *kind,
                *(
                    statistics.geometric_mean(max(turn[kind], _SHORTEST_S) for turn in turns[fused])
                    for fused in (False, True)
                ),
            )
            for kind in kinds
        ),
    )


def _time_rounds(subject: Subject, meter: Meter, long: int | None, times_s: dict[tuple[int, int, int], float]) -> int:
    """Time rounds at both contexts, ``long`` where an earlier turn has settled the longer one, which is returned.

    ``times_s`` takes the least seconds of all laps, by requests, rows of each and context.
    """
    capabilities = subject.engine.capabilities
    subject.warm_up()
    meter.start()
    subject.fill(_SHORT, 1.0)
    least = min(subject.context + _MIN_LEVER, capabilities.context_length - subject.widest)
    with contextlib.suppress(NoRoomError):
        is_slow = subject.time_pass(1) > _SLOW_S
        _time_laps(subject, meter, _SHARES[:2], times_s, is_slow=is_slow)
        subject.fill_to(long or max(subject.reachable(_LONG, _FILL_SHARE), least))
        long = subject.context
        _time_laps(subject, meter, _SHARES[2:], times_s, is_slow=is_slow)
    return subject.context if long is None else long


def _time_laps(
    subject: Subject,
    meter: Meter,
    shares: Sequence[float],
    times_s: dict[tuple[int, int, int], float],
    *,
    is_slow: bool,
) -> None:
    """Time rounds of one request and of several, each in laps: as its share of the seconds allows, but one at least."""

    def time_laps(others: Sequence[int], wide: int | None, share: float) -> None:
        widths = [*[1] * (1 if is_slow else _LAP), *([] if wide is None else [wide])]
        lap_s = 0.0
        for lap in range(_MAX_LAPS):
            if lap > 0 and not meter.allows(share, lap_s):
                return
            started_s = meter.clock.now_s()
            for rows in widths:
                kind = 1 + len(others), rows, subject.context
                times_s[kind] = min(subject.time_round(rows, others), times_s.get(kind, math.inf))
            lap_s = meter.clock.now_s() - started_s

    capabilities = subject.engine.capabilities
    several = min(_REQUESTS, capabilities.max_sequences) if capabilities.shares_passes else 1
    if several == 1 or 2 * several > subject.widest:
        time_laps((), min(_WIDE, subject.widest), shares[1])
        return
    time_laps((), min(_WIDE, subject.widest), shares[0])
    with contextlib.suppress(NoRoomError, CapabilityError), subject.copies(several - 1) as others:
        time_laps(others, None if is_slow else min(_WIDE_EACH, subject.widest // several), shares[1])


def _is_open(engine: Engine) -> TypeGuard[EitherAttention]:
    return getattr(engine, "fused_attention", None) is not None
