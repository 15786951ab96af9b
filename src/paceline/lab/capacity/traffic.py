"""The requests of a load: when they come, how their prompts begin, how long they and their answers are."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from paceline.core.errors import InputError
from paceline.lab.replaying.recording import Chain, Recording

POISSON: Final = 1.0
"""Burstiness of requests that come independently of each other."""

_NOTHING: Final[tuple[Chain, ...]] = ((),)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a load is made of.

    Two loads that differ in ``burstiness`` or ``rate`` alone have the same requests, which come at other times.

    Attributes:
        rate: requests a second.
        requests: how many there are.
        prompt_tokens: of each request, the beginning that others have too included.
        prefixes: different beginnings of prompts; each request has one of them, all equally often.
        prefix_tokens: of each beginning; 0 where prompts share none.
        answer_tokens: of an answer, on average.
        spread: answers have from ``1 - spread`` to ``1 + spread`` times as many tokens, all equally often.
        burstiness: shape of the gamma distribution of the times between requests, whose variance is its inverse: 1 is a
            Poisson process, less comes in bursts.
        seed: of all that is drawn.
    """

    rate: float
    requests: int = 240
    prompt_tokens: int = 512
    prefixes: int = 8
    prefix_tokens: int = 384
    answer_tokens: int = 64
    spread: float = 0.5
    burstiness: float = POISSON
    seed: int = 1

    def __post_init__(self) -> None:
        for name, value, is_right, least in (
            ("rate", self.rate, 0 < self.rate < math.inf, "a finite number above 0"),
            ("burstiness", self.burstiness, 0 < self.burstiness < math.inf, "a finite number above 0"),
            ("requests", self.requests, self.requests >= 1, "1 or more"),
            ("prompt_tokens", self.prompt_tokens, self.prompt_tokens >= 1, "1 or more"),
            ("answer_tokens", self.answer_tokens, self.answer_tokens >= 1, "1 or more"),
            ("prefixes", self.prefixes, self.prefixes >= 1, "1 or more"),
            ("prefix_tokens", self.prefix_tokens, self.prefix_tokens >= 0, "0 or more"),
            ("spread", self.spread, 0 <= self.spread < 1, "from 0 to less than 1"),
        ):
            if not is_right:
                raise InputError(f"`{name}` is {value:g}: give {least}", field=name)
        if self.prefix_tokens >= self.prompt_tokens:
            raise InputError(
                f"`prefix_tokens` is {self.prefix_tokens} and `prompt_tokens` {self.prompt_tokens}: of a prompt at "
                "least the last token is its own",
                field="prefix_tokens",
            )

    def draw_gaps_s(self) -> list[float]:
        """Return the seconds before each request, since the one before or the beginning."""
        # What requests are is drawn from another stream, so that it is the same whenever they come.
        random = np.random.default_rng([self.seed, 0])
        gaps_s: list[float] = random.gamma(self.burstiness, 1.0 / (self.burstiness * self.rate), self.requests).tolist()
        return gaps_s


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request.

    Attributes:
        at_s: when it comes.
        prefix: number of the beginning that its prompt has.
        prompt_ids: its prompt. Which tokens these are matters to caches alone.
        recording: its answer, and what every drafter proposes at each of its places.
    """

    at_s: float
    prefix: int
    prompt_ids: Sequence[int]
    recording: Recording


def make_arrivals(traffic: Traffic, recordings: Sequence[Recording]) -> list[Arrival]:
    """Return the requests of a load in the order they come; each answer is a piece of recorded ones."""
    drawn = np.random.default_rng([traffic.seed, 1])
    vocab_size = recordings[0].vocab_size
    own_tokens = traffic.prompt_tokens - traffic.prefix_tokens
    beginnings = drawn.integers(vocab_size, size=(traffic.prefixes, traffic.prefix_tokens)).tolist()
    texts = _Texts(recordings)
    low, high = ((1 + sign * traffic.spread) * traffic.answer_tokens for sign in (-1, 1))
    arrivals = []
    for at_s in np.cumsum(traffic.draw_gaps_s()).tolist():
        prefix = int(drawn.integers(traffic.prefixes))
        prompt_ids = [*beginnings[prefix], *drawn.integers(vocab_size, size=own_tokens).tolist()]
        num_tokens = max(round(drawn.uniform(low, high)), 1)
        arrivals.append(Arrival(at_s, prefix, prompt_ids, texts.piece(int(drawn.integers(texts.size)), num_tokens)))
    return arrivals


class _Texts:
    """Recordings one after the other and over again, of which pieces of any length are cut."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._recordings = recordings
        self._starts = [0, *itertools.accumulate(len(recording.token_ids) for recording in recordings)]
        self.size = self._starts[-1]

    def piece(self, start: int, num_tokens: int) -> Recording:
        """Return ``num_tokens`` tokens from a place on, as a recording of their own."""
        first = self._recordings[0]
        token_ids: list[int] = []
        chains: list[list[Chain]] = [[] for _ in first.traces]
        index = bisect.bisect_right(self._starts, start) - 1
        offset = start - self._starts[index]
        while len(token_ids) < num_tokens:
            recording = self._recordings[index]
            part = recording.token_ids[offset : offset + num_tokens - len(token_ids)]
            token_ids += part
            for of_trace, trace in zip(chains, recording.traces, strict=True):
                # Behind the last token of a text nothing was recorded.
                of_trace += (*trace.chains, *_NOTHING)[offset : offset + len(part)]
            index, offset = (index + 1) % len(self._recordings), 0
        traces = tuple(
            dataclasses.replace(trace, chains=tuple(of_trace[: num_tokens - 1]))
            for trace, of_trace in zip(first.traces, chains, strict=True)
        )
        return dataclasses.replace(
            first, token_ids=tuple(token_ids), max_tokens=num_tokens, ignore_end=True, traces=traces
        )
