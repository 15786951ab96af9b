"""A task: one prompt, how it is answered, and whether its answer says anything about decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from paceline.options import GenerateOptions

MIN_ANSWER: Final = 16
"""Tokens of an answer below which a task says nothing about decoding."""
LOOPING_BELOW: Final = 0.5
"""An answer loops if a smaller share of its 4-grams than this is distinct."""
_SEEDS_APART: Final = 1000
"""Distance of the seeds of a task's draws, as tasks of one workload have seeds that follow each other."""


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt and how it is answered.

    Attributes:
        workload: the kind of text.
        name: of the text it was made from, as ``--sample`` of ``paceline run`` knows it.
        seed: of the sampling.
        reference_ids: what the target is made to answer; ``None`` if it answers as it likes.
        sampling: options that hold whatever temperature is asked for.
    """

    workload: str
    name: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    reference_ids: tuple[int, ...] | None = None
    sampling: GenerateOptions = field(default_factory=GenerateOptions)

    def options(self, temperature: float) -> GenerateOptions:
        forced = self.reference_ids is not None
        options: GenerateOptions = {
            "temperature": temperature,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "ignore_end": forced,
        }
        options.update(self.sampling)
        return options

    def drawn_again(self, draw: int) -> Task:
        """Return the task with other random numbers for sampling, those of a draw from 1 on."""
        return replace(self, seed=self.seed + _SEEDS_APART * draw)

    def is_short(self, token_ids: Sequence[int]) -> bool:
        """Return whether a plain answer is too short to say anything about decoding."""
        return len(token_ids) < min(MIN_ANSWER, self.max_tokens)


def distinct_share(token_ids: Sequence[int], size: int = 4) -> float:
    """Return distinct n-grams / n-grams of ``size`` tokens; 1 for a text too short to have any."""
    grams = [tuple(token_ids[start : start + size]) for start in range(len(token_ids) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_repetitive(token_ids: Sequence[int]) -> bool:
    """Return whether a text repeats itself, which flatters every drafter."""
    return distinct_share(token_ids) < LOOPING_BELOW
