"""A family is what Prometheus calls one name with its type, its meaning and its values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from paceline.serving.metrics.totals import AnswerTotals, Distribution, RoundTotals, ServerLoad

Value: TypeAlias = float | Mapping[tuple[str, ...], float] | Distribution
"""One number, numbers by the values of a family's labels, or a histogram."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """What families are read from: the totals at the moment of a scrape.

    Attributes:
        rounds: sums over rounds.
        answers: sums over choices that are over.
        refused: requests that were refused, by status and kind.
        load: what the server is busy with.
        read_per_second: prompt tokens for each second of reading, of choices that ended since the scrape before.
        written_per_second: tokens for each second of writing, of choices that ended since the scrape before.
        context_length: most tokens of one prompt and its answer.
        max_running: most choices that run at once.
        started_s: when the server started, in Unix seconds.
    """

    rounds: RoundTotals
    answers: AnswerTotals
    refused: Mapping[tuple[str, ...], int]
    load: ServerLoad
    read_per_second: float
    written_per_second: float
    context_length: int
    max_running: int
    started_s: float


@dataclass(frozen=True, slots=True)
class Family:
    """One name.

    Attributes:
        name: as the text format has it: that of a counter ends with ``_total``, with one exception.
        kind: type of the metric.
        meaning: the metric's HELP line.
        read: returns its value, which must be a copy: it is looked at after the totals have changed.
        labels: names of labels that tell values of the family apart.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    read: Callable[[Scrape], Value]
    labels: tuple[str, ...] = ()

    @property
    def is_bare_counter(self) -> bool:
        """Whether this is the exception: llama-server has a counter whose name says nothing of a total."""
        return self.kind == "counter" and not self.name.endswith("_total")


def metric_of(family: Family, value: Value, constants: Mapping[str, str]) -> Metric:
    """Return a family with its value, as prometheus_client writes it.

    Args:
        family: the family. A bare counter becomes a gauge, which is what it is to OpenMetrics.
        value: what it read.
        constants: labels, with their values, that all values of it have.
    """
    names, given = [*constants, *family.labels], list(constants.values())
    if isinstance(value, Distribution):
        histogram = HistogramMetricFamily(family.name, family.meaning, labels=names)
        borders = [*map(floatToGoString, value.borders), "+Inf"]
        buckets = list(zip(borders, accumulate(value.counts), strict=True))
        histogram.add_metric(given, buckets, value.total)
        return histogram
    is_counter = family.kind == "counter" and not family.is_bare_counter
    metric = (CounterMetricFamily if is_counter else GaugeMetricFamily)(family.name, family.meaning, labels=names)
    for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
        metric.add_metric([*given, *labels], number)
    return metric


def by_position(accepted_by_depth: Counter[int]) -> Mapping[tuple[str, ...], float]:
    """Return counts by depth as values by ``position``, from 0 to the deepest that was accepted."""
    deepest = max(accepted_by_depth, default=0)
    return {(str(depth),): accepted_by_depth[depth] for depth in range(deepest + 1)}
