"""A side of the gate, in a process of its own with its own revision's code: reads one job, writes a line a result.

::

    {"task": "list"}                                     what there is: one line
    {"task": "own time", "policy": ...}                  what its decisions take: a line a slice, the last one counts
    {"task": "replay", "policy": ..., "own_times": ..., "profiles": ..., "laps": ..., "halves": ...}
                                                         a line for every profile, corpus, half and scene
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from benchmarks.planner_ab import own_time, scenes
from benchmarks.planner_ab.charging import own_times_of
from benchmarks.planner_ab.corpus import CORPORA, HALVES, PROFILES, QUICK_LAPS, Corpus, Priced, priced
from benchmarks.planner_ab.policies import builder
from paceline.core.errors import PacelineError
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
    task = job["task"]
    if task == "list":
        cells = [(name, corpus.name) for name, _, corpus in pairings(list(PROFILES))]
        yield {"compiled": is_compiled(), "cells": cells, "scenes": [scene.name for scene in scenes.SCENES]}
    elif task == "own time":
        yield from _own_times(job["policy"])
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
    read: dict[Corpus, dict[str, list[list[Recording]]]] = {}
    # Plain decoding learns nothing: in scenes with as many requests, on such a machine, it takes the same time.
    plain_s: dict[Hashable, list[float]] = {}
    for profile, costs, corpus in pairings(job["profiles"]):
        if corpus not in read:
            read[corpus] = corpus.halves(job["laps"])
        for half, scene in itertools.product(job["halves"], scenes.SCENES):
            laps = read[corpus][half]
            alike = profile, corpus, half, scene.requests, scene.drifts
            if alike not in plain_s:
                plain_s[alike] = scenes.plain(scene, laps, costs)
            yield {
                "key": (profile, corpus.name, half, scene.name),
                "texts": [recording.name for lap in laps for recording in lap],
                "plain_s": plain_s[alike],
                "seconds": scenes.seconds(scene, laps, costs, build, own_times[corpus.models]),
            }


def main() -> None:
    try:
        for result in answer(json.load(sys.stdin)):
            print(json.dumps(result), flush=True)
    except PacelineError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
