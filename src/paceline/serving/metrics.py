"""What a server counts, as Prometheus reads it: under llama-server's names, vLLM's, and paceline's own.

::

    engine's thread   observe(record) ──> RoundTotals  ──┐
    HTTP side         request_over()  ──> AnswerTotals ──┤
                      refused()       ──> refused      ──┼──> FAMILIES ──> render()
                      load()          ──> ServerLoad   ──┘

Totals are plain numbers behind one lock, and a scrape reads all of them at one moment: counters of the three families
agree with each other. prometheus_client's own counters have a lock each.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from paceline.core.request import FinishReason
from paceline.core.stats import RequestStats
from paceline.planning.base import RoundRecord
from paceline.serving.metric_families import LLAMA_SERVER, OWN, VLLM, Family, Scrape, Value, to_prometheus
from paceline.serving.metric_totals import AnswerTotals, RoundTotals, ServerLoad

FAMILIES: Final[Sequence[Family]] = (*LLAMA_SERVER, *VLLM, *OWN)
"""All metrics, in the order in which they are written."""

_TEXT: Final = "text/plain"
# By default prometheus_client 0.26 writes the colons of names as underscores in OpenMetrics' samples.
_OPENMETRICS: Final = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"


@dataclass(frozen=True, slots=True)
class _Collected:
    """Metrics as prometheus_client's writers take them."""

    metrics: Sequence[Metric]

    def collect(self) -> Sequence[Metric]:
        return self.metrics


@dataclass(frozen=True, slots=True)
class _Speeds:
    """Sums by which the speeds between two scrapes are reckoned."""

    read: int = 0
    read_s: float = 0.0
    written: int = 0
    written_s: float = 0.0


class ServerMetrics:
    """Counts what a server does.

    Any thread may call any method. :meth:`observe` is called on the engine's thread after every round; the others are
    for the HTTP side. A scrape holds a round up only while the numbers are read, not while they are written out.

    Args:
        model_name: the name that the server gives its model; vLLM's names have it as a label.
        context_length: most tokens of one prompt and its answer.
        max_running: most choices that run at once.
        started_s: when the server started, in Unix seconds.
        load: tells what the server is busy with; asked once a scrape, on the thread that scrapes.
    """

    def __init__(
        self,
        *,
        model_name: str,
        context_length: int,
        max_running: int,
        started_s: float,
        load: Callable[[], ServerLoad],
    ) -> None:
        self._context_length = context_length
        self._max_running = max_running
        self._started_s = started_s
        self._load = load
        # One server has one engine.
        self._vllm_labels = {"model_name": model_name, "engine": "0"}
        self._lock = threading.Lock()
        self._rounds = RoundTotals()
        self._answers = AnswerTotals(context_length)
        self._refused: Counter[tuple[str, ...]] = Counter()
        self._speeds = _Speeds()

    @property
    def process_start(self) -> str:
        """When the server started, in whole Unix seconds: llama-server's header ``Process-Start-Time-Unix``."""
        return str(int(self._started_s))

    def observe(self, record: RoundRecord) -> None:
        """Count a round that is over."""
        with self._lock:
            self._rounds.add(record)

    def request_over(self, stats: RequestStats, finish_reason: FinishReason, num_prompt: int) -> None:
        """Count a choice that is over: once each, before its end is sent, so that a client finds it counted.

        Args:
            stats: its counts and times, which change no more.
            finish_reason: why it ended.
            num_prompt: tokens of the whole prompt, those from the cache included.
        """
        with self._lock:
            self._answers.add(stats, finish_reason, num_prompt)

    def refused(self, status: int, kind: str) -> None:
        """Count a request that got an error in place of an answer.

        Args:
            status: of the HTTP response.
            kind: the ``type`` of the error, one of a few: each is kept as a series of its own.
        """
        with self._lock:
            self._refused[str(status), kind] += 1

    def render(self, openmetrics: bool = False) -> tuple[bytes, str]:
        """Return the body of a scrape, and its content type.

        llama-server's two gauges of speed are of what ended since the scrape before, whoever made that.

        Args:
            openmetrics: write OpenMetrics 1.0, in place of Prometheus' text format 0.0.4. In OpenMetrics
                ``llamacpp:n_tokens_max`` is a gauge, as names of counters end with ``_total`` there.
        """
        values = self._read(self._load())
        written = [
            to_prometheus(family, value, self._constants(family))
            for family, value in values
            if openmetrics or not family.is_bare_counter
        ]
        encode, _ = choose_encoder(_OPENMETRICS if openmetrics else _TEXT)
        body = encode(_Collected(written))
        if openmetrics:
            return body, CONTENT_TYPE_LATEST
        bare = [_bare_counter(family, value) for family, value in values if family.is_bare_counter]
        return body + "".join(bare).encode(), CONTENT_TYPE_PLAIN_0_0_4

    def _read(self, load: ServerLoad) -> list[tuple[Family, Value]]:
        """Return the values of all families at one moment."""
        with self._lock:
            answers = self._answers
            now = _Speeds(
                answers.prompt_tokens,
                answers.prompt_s,
                answers.predicted_tokens - answers.started,
                answers.decode_s,
            )
            before, self._speeds = self._speeds, now
            scrape = Scrape(
                self._rounds,
                answers,
                self._refused,
                load,
                _per_second(now.read - before.read, now.read_s - before.read_s),
                _per_second(now.written - before.written, now.written_s - before.written_s),
                self._context_length,
                self._max_running,
                self._started_s,
            )
            return [(family, family.read(scrape)) for family in FAMILIES]

    def _constants(self, family: Family) -> Mapping[str, str]:
        return self._vllm_labels if family.name.startswith("vllm:") else {}


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _bare_counter(family: Family, value: Value) -> str:
    """Return the lines of a counter to whose name prometheus_client would add ``_total``."""
    return f"# HELP {family.name} {family.meaning}\n# TYPE {family.name} counter\n{family.name} {value}\n"
