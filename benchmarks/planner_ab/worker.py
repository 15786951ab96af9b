"""A side of the gate, in a process of its own with its own revision's code: reads one job, writes a line a result.

::

    {"task": "list"}                                     what there is: one line
    {"task": "own time", "policy": ...}                  what its decisions take: a line a slice, the last one counts
    {"task": "replay", "policy": ..., "own_times": ..., "profiles": ..., "laps": ..., "halves": ...}
                                                         a line for every profile, corpus, half and scene
    {"task": "statics", "profiles": ..., "laps": ..., "halves": ...}
                                                         the same, the seconds of every static setting by its name
"""

from __future__ import annotations

import json
import sys
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.planner_ab import own_time, scenes
from benchmarks.planner_ab.charging import NO_TIME, own_times_of
from benchmarks.planner_ab.corpus import CORPORA, HALVES, PROFILES, QUICK_LAPS, Corpus, Priced, priced
from benchmarks.planner_ab.policies import builder
from paceline.core.errors import PacelineError
from paceline.lab.bench.variants import Variant, static_variants
from paceline.lab.replaying.recording import Recording
from paceline.machine import is_compiled

_OWN_TIME_COSTS = ("f16-quiet", "q4_0-quiet")


def pairings(names: list[str]) -> Iterator[tuple[str, Priced, Corpus]]:
    """Yield the costs and the texts that go together: a draft model's passes must have theirs."""
    for name in names:
        costs = priced(name)
        for corpus in CORPORA:
            if costs.costs.draft is not None or corpus.models != "pair":
                yield name, costs, corpus


def answer(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Do a job; yield its results."""
    task = job["task"]
    if task == "list":
        cells = [(name, corpus.name) for name, _, corpus in pairings(list(PROFILES))]
        yield {"compiled": is_compiled(), "cells": cells, "scenes": [scene.name for scene in scenes.SCENES]}
    elif task == "own time":
        yield from _own_times(job["policy"])
    elif task == "statics":
        yield from _statics(job)
    else:
        yield from _replays(job)


def _own_times(spec: str) -> Iterator[dict[str, Any]]:
    build = builder(spec)
    found: dict[str, Any] = {}
    for corpus in CORPORA:
        if not corpus.sampled:
            continue
        laps = corpus.halves(QUICK_LAPS)[HALVES[0]]
        texts = [recording for lap in laps for recording in lap]
        for table in own_time.measure(build, texts, [priced(name).costs for name in _OWN_TIME_COSTS]):
            found[corpus.models] = table
            yield found


def _replays(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    build = builder(job["policy"])
    own_times = own_times_of(job["own_times"])
    plain_s: dict[Hashable, list[float]] = {}
    for meeting in _meetings(job):
        if meeting.alike not in plain_s:
            plain_s[meeting.alike] = scenes.plain(meeting.scene, meeting.laps, meeting.costs)
        yield {
            "key": meeting.key,
            "texts": [recording.name for lap in meeting.laps for recording in lap],
            "plain_s": plain_s[meeting.alike],
            "seconds": scenes.seconds(
                meeting.scene, meeting.laps, meeting.costs, build, own_times[meeting.corpus.models]
            ),
        }


def _statics(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    found: dict[Hashable, dict[str, list[float]]] = {}
    for meeting in _meetings(job):
        if meeting.alike not in found:
            names = [trace.name for trace in meeting.laps[0][0].traces]
            found[meeting.alike] = {
                variant.name: scenes.seconds(
                    meeting.scene, meeting.laps, meeting.costs, _unchanging(variant), NO_TIME, drafters=variant.drafters
                )
                for variant in static_variants(names, coarse=True)
            }
        yield {"key": meeting.key, "statics": found[meeting.alike]}


def _unchanging(variant: Variant) -> scenes.Build:
    return lambda costs, learned: variant.build(costs)


class _Meeting(NamedTuple):
    """What is replayed at once: a half of a corpus, in one scene, with one profile of costs."""

    profile: str
    costs: Priced
    corpus: Corpus
    half: str
    laps: list[list[Recording]]
    scene: scenes.Scene

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.profile, self.corpus.name, self.half, self.scene.name

    @property
    def alike(self) -> Hashable:
        """What it shares with those in which a policy that learns nothing takes the same time."""
        return self.profile, self.corpus, self.half, self.scene.requests, self.scene.drifts


def _meetings(job: Mapping[str, Any]) -> Iterator[_Meeting]:
    read: dict[Corpus, dict[str, list[list[Recording]]]] = {}
    for profile, costs, corpus in pairings(job["profiles"]):
        if corpus not in read:
            read[corpus] = corpus.halves(job["laps"])
        for half in job["halves"]:
            for scene in scenes.SCENES:
                yield _Meeting(profile, costs, corpus, half, read[corpus][half], scene)


def main() -> None:
    """Read the job from standard input."""
    try:
        for result in answer(json.load(sys.stdin)):
            print(json.dumps(result), flush=True)
    except PacelineError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
