"""The embedded pair on held-out code, speculative against plain: what a user sees, whatever it is.

A round of this pair takes about a millisecond, so everything counts: both models' passes, the threads' hand-overs and
paceline's own Python. On models this small speculation has little to gain; the figure is here to be honest about it.
"""

from __future__ import annotations

import statistics
from typing import Any

from paceline.api import load
from paceline.lab.comparison import run_trials
from paceline.models.embedded import heldout
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy

PROMPTS = 8
REPEATS = 3
DRAFTERS = (["draft"], ["suffix"], ["draft", "suffix"])


def measure() -> dict[str, Any]:
    """Return the median speedup of each set of drafters, greedy and at temperature 0.8."""
    figures: dict[str, Any] = {}
    for drafters in DRAFTERS:
        with load(drafters=drafters, policy=FixedPolicy(draft_max=4)) as model:
            for temperature in (0.0, 0.8):
                speedups, noise, plain, tau = [], [], [], []
                for seed, text in enumerate(heldout("code")[:PROMPTS]):
                    options: GenerateOptions = {"max_tokens": 128, "temperature": temperature, "seed": seed}
                    for trial, _, speculative in run_trials(model, text[:600], options, REPEATS):
                        speedups.append(trial.speedup)
                        noise.append(trial.noise)
                        plain.append(trial.plain_after)
                        tau.append(speculative.stats.acceptance_length or 1.0)
                name = f"{'+'.join(drafters)}, temperature {temperature:g}"
                quartiles = statistics.quantiles(speedups, n=4)
                print(
                    f"{name}: {statistics.median(speedups):.2f} times plain (quartiles {quartiles[0]:.2f} to "
                    f"{quartiles[2]:.2f}), tau {statistics.mean(tau):.2f}, plain {statistics.median(plain):.0f} t/s, "
                    f"plain against plain {min(noise):.2f} to {max(noise):.2f}"
                )
                figures[name] = {
                    "speedup": statistics.median(speedups),
                    "speedups": speedups,
                    "plain_per_second": statistics.median(plain),
                    "plain_against_plain": [min(noise), max(noise)],
                    "acceptance_length": statistics.mean(tau),
                }
    return figures
