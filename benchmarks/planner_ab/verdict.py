"""The verdict: how much faster answers became, how many became slow, and whether a change may go in.

Ratios are old seconds over new ones, so above 1 is faster. A text comes up in many scenes and with many costs, and what
becomes of it in one tells of the others. So what is drawn again in the bootstrap are texts, each with all that became
of it. Answers that share rounds are not independent either, which the intervals leave out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from paceline.lab.intervals import bootstrap

MIN_OVERALL: Final = 0.995
"""Lower end of the 95 % interval of the geometric mean over all answers, and"""
MIN_CELL: Final = 0.985
"""in a cell: one profile of costs at one temperature."""
LOW: Final = 0.97
"""Of plain decoding's speed; an answer below it is a low one."""
MAX_FALL: Final = 0.01
"""By which the lowest answer may fall, as a share of plain decoding's speed."""
SIGNIFICANT: Final = 0.05

DRAWS: Final = 2000
_SEED: Final = 0


class Answer(NamedTuple):
    """What became of one text in one scene, with one profile of costs."""

    profile: str
    corpus: str
    models: str
    temperature: str
    half: str
    scene: str
    text: str
    plain_s: float
    old_s: float
    new_s: float

    @property
    def workload(self) -> str:
        return self.text.partition(" ")[0]

    @property
    def ratio(self) -> float:
        """The new policy's speed over the old one's."""
        return self.old_s / self.new_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What became of a group of answers.

    Attributes:
        answers: how many.
        texts: different ones.
        ratio: geometric mean of new over old, every text counting the same;
        low: its 95 % interval's lower end, and
        high: its upper one.
        old_of_plain: geometric mean of the old policy's speed over plain decoding's.
        new_of_plain: the new one's.
        old_low: answers of the old policy below :data:`LOW` of plain.
        new_low: of the new one.
        grew: one-sided probability of so many more low answers if the policies were alike (:func:`more_low`).
        old_lowest: the lowest of the old policy's answers, of plain.
        new_lowest: the new one's.
    """

    answers: int
    texts: int
    ratio: float
    low: float
    high: float
    old_of_plain: float
    new_of_plain: float
    old_low: int
    new_low: int
    grew: float
    old_lowest: float
    new_lowest: float


def figures(answers: Sequence[Answer]) -> Figures:
    logs: dict[tuple[str, str], list[float]] = defaultdict(list)
    more: dict[tuple[str, str], int] = defaultdict(int)
    old_low = new_low = 0
    for answer in answers:
        text = answer.corpus, answer.text
        logs[text].append(math.log(answer.ratio))
        is_old_low, is_new_low = answer.plain_s < LOW * answer.old_s, answer.plain_s < LOW * answer.new_s
        old_low += is_old_low
        new_low += is_new_low
        more[text] += is_new_low - is_old_low
    by_text = np.array([sum(values) / len(values) for values in logs.values()])
    low, high = bootstrap(by_text, lambda drawn: drawn.mean(axis=1), _SEED, DRAWS)
    return Figures(
        answers=len(answers),
        texts=len(by_text),
        ratio=math.exp(by_text.mean()),
        low=math.exp(low),
        high=math.exp(high),
        old_of_plain=_geometric_mean(answer.plain_s / answer.old_s for answer in answers),
        new_of_plain=_geometric_mean(answer.plain_s / answer.new_s for answer in answers),
        old_low=old_low,
        new_low=new_low,
        grew=more_low(more.values()),
        old_lowest=min(answer.plain_s / answer.old_s for answer in answers),
        new_lowest=min(answer.plain_s / answer.new_s for answer in answers),
    )


def more_low(differences: Iterable[int]) -> float:
    """Return how likely at least so many more low answers are, if each text's could as well have been the other's.

    It is McNemar's exact test, one-sided, for answers that come in clusters: for each text, its low answers under the
    new policy less those under the old one keep their size and get either sign. Where every text has one answer that is
    the binomial test of the answers that changed.
    """
    changed = [difference for difference in differences if difference]
    total = sum(map(abs, changed))
    # chances[k] is that of a sum of k - total.
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for difference in changed:
        chances = (np.roll(chances, abs(difference)) + np.roll(chances, -abs(difference))) / 2
    return float(min(chances[total + sum(changed) :].sum(), 1.0))


def grouped(answers: Iterable[Answer], key: Callable[[Answer], str]) -> dict[str, Figures]:
    """Return the figures of groups of answers, in the order in which they come up."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(key(answer), []).append(answer)
    return {name: figures(group) for name, group in groups.items()}


GROUPINGS: Final[Mapping[str, Callable[[Answer], str]]] = {
    "costs and temperature": lambda answer: f"{answer.profile}, {answer.temperature}",
    "scene": lambda answer: answer.scene,
    "workload": lambda answer: f"{answer.models}, {answer.workload}",
    "half": lambda answer: answer.half,
}
"""The tables; the first one's rows are the cells that have a bound."""
CELLS: Final = next(iter(GROUPINGS))


def reasons(overall: Figures, cells: Mapping[str, Figures]) -> list[str]:
    """Return why a change may not go in, each in a line; none if it may."""
    found = []
    if overall.low < MIN_OVERALL:
        found.append(
            f"speed over all answers: {overall.ratio:.4f} of the old one, the interval's lower end {overall.low:.4f}, "
            f"and the least is {MIN_OVERALL}"
        )
    found += [
        f"speed with {name}: {cell.ratio:.4f} of the old one, the interval's lower end {cell.low:.4f}, and the least "
        f"is {MIN_CELL}"
        for name, cell in cells.items()
        if cell.low < MIN_CELL
    ]
    if overall.new_low > overall.old_low and overall.grew < SIGNIFICANT:
        found.append(
            f"answers below {LOW:.2f} of plain: {overall.new_low} of {overall.answers}, before {overall.old_low}; by "
            f"chance that happens with a probability of {overall.grew:.2g}"
        )
    if overall.new_lowest < overall.old_lowest - MAX_FALL:
        found.append(
            f"the lowest answer: {overall.new_lowest:.3f} of plain, before {overall.old_lowest:.3f}, and the most that "
            f"it may fall by is {MAX_FALL}"
        )
    return found


def _geometric_mean(values: Iterable[float]) -> float:
    return math.exp(float(np.log(np.fromiter(values, dtype=np.float64)).mean()))


def most_lost(answers: Iterable[Answer], count: int) -> list[Answer]:
    """Return the answers that lost most, the worst first; none that lost nothing."""
    return sorted((answer for answer in answers if answer.ratio < 1), key=lambda answer: answer.ratio)[:count]
