"""What is asked: prompts of which many begin alike, when they are sent, and what has to be read of them at least."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.models.embedded import heldout


@dataclass(frozen=True)
class Prompts:
    """Prompts of real text. The same fields make the same prompts; other seeds make others from the first line on.

    Attributes:
        count: how many there are.
        prefixes: how many beginnings they share. Each is that of as many prompts, in a random order.
        prefix_words: words of a beginning.
        own_words: words that follow and are of one prompt alone.
        text: what words are of, one of :data:`paceline.models.embedded.HELDOUT_KINDS`.
        seed: of all that is random.
    """

    count: int = 64
    prefixes: int = 8
    prefix_words: int = 200
    own_words: int = 20
    text: str = "code"
    seed: int = 1

    def texts(self) -> list[str]:
        chance = random.Random(self.seed)
        words = re.findall(r"\S+\s*", "\n\n".join(heldout(self.text)))

        def some(count: int) -> str:
            place = chance.randrange(len(words))
            return "".join(words[each % len(words)] for each in range(place, place + count)).rstrip()

        shared = [f"# {self.seed}.{number}\n{some(self.prefix_words)}" for number in range(self.prefixes)]
        order = [number % self.prefixes for number in range(self.count)]
        chance.shuffle(order)
        return [f"{shared[prefix]}\n\n# {number}\n{some(self.own_words)}" for number, prefix in enumerate(order)]


def sending_times(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when requests are sent, in seconds from the beginning on, whatever the server does meanwhile.

    Times between them are of a gamma distribution, whose shape is the burstiness, as vLLM's benchmark has it.

    Args:
        count: how many there are.
        rate: requests a second in the long run.
        burstiness: 1 is a Poisson process, less comes in bursts, more is more even.
        seed: of the times.
    """
    gaps_s = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return [float(at_s) for at_s in np.cumsum(gaps_s)]


def least_read(prompts: Iterable[Sequence[int]]) -> int:
    """Return how many tokens are read of prompts, given as tokens, where all that was read before is kept.

    These are the nodes of the tree of all prompts. In their order each shares the most with the one before. The last
    token of a prompt is always read, as the answer's first one comes of it.
    """
    total, before = 0, list[int]()
    for prompt in sorted(map(list, prompts)):
        known = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, prompt, strict=False)))
        total += max(len(prompt) - known, 1)
        before = prompt
    return total
