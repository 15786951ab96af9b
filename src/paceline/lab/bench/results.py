"""The results of a bench: plain data, from single pairs of runs up to medians with intervals, and as JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.lab.bench.settings import BenchSettings
from paceline.lab.bench.workloads import FORCED_SUFFIX
from paceline.lab.comparison import Trial
from paceline.lab.intervals import Estimate, estimate
from paceline.lab.sessions import TimeSpent
from paceline.lab.variants import Variant, VariantReplay
from paceline.planning.costs.profile import CostProfile

RESULTS_VERSION = 3
"""Version of the JSON that results are written as."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of a variant, between two plain runs of the same task.

    Attributes:
        lap: how often the workload's session had been through a task before; for ``mixed``, through all of them.
        workload: of the task; in ``mixed`` it changes from task to task.
        tokens: decoded by the variant, the first, which comes with the prompt, left out.
        tested_by_depth: see :class:`~paceline.core.stats.RequestStats`.
        accepted_by_depth: drafts that were kept, by depth, as there.
        seconds: from the first token to the last, as a reader sees it: all rounds, and what policies do between them.
        spent: where they went; ``None`` if whoever answered does not say.
        differs_at: index of the first token that is not plain's; ``None`` if all are.
    """

    lap: int
    task: str
    workload: str
    trial: Trial
    tokens: int
    rounds: int
    num_drafted: int
    num_accepted: int
    tested_by_depth: Mapping[int, int]
    accepted_by_depth: Mapping[int, int]
    seconds: float
    spent: TimeSpent | None
    differs_at: int | None

    @property
    def forced(self) -> bool:
        """Whether the target was made to follow a text, which all variants share then."""
        return self.workload.endswith(FORCED_SUFFIX)


@dataclass(frozen=True, slots=True)
class Lap:
    """The pairs of one lap together. ``plain_per_second`` is that of the plain runs around the variant's."""

    index: int
    per_second: float
    plain_per_second: float

    @property
    def ratio(self) -> float:
        return self.per_second / self.plain_per_second

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Lap:
        """Sum up pairs: tokens of all over seconds of all."""
        tokens = sum(pair.tokens for pair in pairs)
        seconds = sum(pair.tokens / pair.trial.speculative for pair in pairs)
        plain_s = sum(2 * pair.tokens / (pair.trial.plain_before + pair.trial.plain_after) for pair in pairs)
        return cls(pairs[0].lap, tokens / seconds, tokens / plain_s)


@dataclass(frozen=True, slots=True)
class Judgement:
    """Why a variant's text differs from plain's.

    Attributes:
        index: of the first token that differs.
        verdict: of :class:`~paceline.core.divergence.Divergence`, or ``"not judged"`` for lack of time.
    """

    task: str
    index: int
    verdict: str


@dataclass(slots=True)
class VariantResult:
    """What one variant did on one workload, live and by replay.

    Attributes:
        lap_tasks: pairs of a whole lap.
        replayed: in virtual time; ``None`` if it was not replayed.
        left_out: runs whose answer told nothing: it ended at once or, of a server's own text, loops.
        judgements: of texts that differ from plain's, each once.
        snapshot: what the policy says of itself after the last pair, if it does: ``calibration``, by drafter
            (predicted, share accepted, count), ``ledger``, (tokens, seconds lost, seconds that may be lost), and
            ``remembered``, drafters of which it started with what earlier runs had learned.
    """

    variant: Variant
    lap_tasks: int = 1
    replayed: VariantReplay | None = None
    pairs: list[Pair] = field(default_factory=list)
    left_out: int = 0
    judgements: list[Judgement] = field(default_factory=list)
    snapshot: Mapping[str, Any] | None = None

    def laps(self) -> list[Lap]:
        """Return the laps that were finished."""
        by_lap: dict[int, list[Pair]] = {}
        for pair in self.pairs:
            by_lap.setdefault(pair.lap, []).append(pair)
        return [Lap.of(pairs) for pairs in by_lap.values() if len(pairs) == self.lap_tasks]

    def ratio(self) -> Estimate | None:
        ratios = [lap.ratio for lap in self.laps()]
        return estimate(ratios) if ratios else None

    def per_second(self) -> Estimate | None:
        speeds = [lap.per_second for lap in self.laps()]
        return estimate(speeds) if speeds else None

    def by_task(self) -> dict[str, float]:
        """Return each prompt's median ratio."""
        ratios: dict[str, list[float]] = {}
        for pair in self.pairs:
            ratios.setdefault(f"{pair.workload} {pair.task}", []).append(pair.trial.speedup)
        return {task: estimate(of_task).median for task, of_task in ratios.items()}

    def against(self, other: VariantResult) -> Estimate | None:
        """Return the median of this variant's speed over another's, each measured against the plain runs around it."""
        theirs = {lap.index: lap.ratio for lap in other.laps()}
        quotients = [lap.ratio / theirs[lap.index] for lap in self.laps() if lap.index in theirs]
        return estimate(quotients) if quotients else None

    @property
    def num_drafted(self) -> int:
        """Draft tokens that were verified; 0 says that the variant was plain decoding by another name."""
        return sum(pair.num_drafted for pair in self.pairs)

    @property
    def drafted_nothing(self) -> bool:
        """Whether a variant that was to draft did not: its difference from plain is no gain."""
        return bool(self.variant.drafters) and self.num_drafted == 0

    @property
    def title(self) -> str:
        """Name in a report."""
        return "plain against plain" if self.variant.kind == "plain" else self.variant.name

    @property
    def accept_share(self) -> float | None:
        drafted = self.num_drafted
        return sum(pair.num_accepted for pair in self.pairs) / drafted if drafted else None

    @property
    def acceptance_length(self) -> float | None:
        rounds = sum(pair.rounds for pair in self.pairs)
        return sum(pair.tokens for pair in self.pairs) / rounds if rounds else None

    def by_depth(self) -> list[tuple[int, int]]:
        """Return (accepted, tested) drafts at each depth, from the first on."""
        tested: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for pair in self.pairs:
            tested.update(pair.tested_by_depth)
            accepted.update(pair.accepted_by_depth)
        return [(accepted[depth], tested[depth]) for depth in range(max(tested, default=-1) + 1)]

    @property
    def own_share(self) -> float | None:
        """Share of the time that was paceline's own: planning, calibration, bookkeeping.

        ``None`` where it is not known.
        """
        told = [(pair.seconds, pair.spent.total_s) for pair in self.pairs if pair.spent is not None]
        seconds = sum(each for each, _ in told)
        return max(seconds - sum(spent for _, spent in told), 0.0) / seconds if seconds else None

    @property
    def num_equal(self) -> int:
        """Pairs in which the text was plain's."""
        return sum(pair.differs_at is None for pair in self.pairs)


@dataclass(slots=True)
class WorkloadResult:
    """What was found on one workload.

    Attributes:
        forced: whether the target was made to follow a text.
        prompt_tokens: of its tasks, ascending.
        answer_tokens: of its plain answers, those that were recorded and those that were measured, ascending.
        looped: tasks left out because their plain answers loop.
        ended_early: tasks left out because their plain answers ended after a few tokens.
        tried: tasks looked at.
        static: all static settings, replayed.
    """

    name: str
    about: str
    forced: bool
    prompt_tokens: list[int] = field(default_factory=list)
    answer_tokens: list[int] = field(default_factory=list)
    looped: int = 0
    ended_early: int = 0
    tried: int = 0
    static: list[VariantReplay] = field(default_factory=list)
    variants: list[VariantResult] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        return any(each.laps() for each in self.variants)

    def best(self, kind: str) -> VariantResult | None:
        """Return the variant of a kind that was fastest live; ``None`` if none has run."""
        ran = [(each, each.ratio()) for each in self.variants if each.variant.kind == kind]
        measured = [(each, ratio.median) for each, ratio in ran if ratio is not None]
        return max(measured, key=lambda pair: pair[1])[0] if measured else None


@dataclass(slots=True)
class BenchResult:
    """Everything that was found.

    Attributes:
        settings: what was asked for; not all of it may have been measured.
        profile: what passes cost, for replays.
        took_s: seconds of it all.
        ended_by: ``"done"``, ``"interrupt"``, ``"time limit"`` or ``"error"``.
        notes: what was left out, and why.
    """

    machine: Mapping[str, str]
    target: str
    draft: str | None
    settings: BenchSettings
    profile: CostProfile
    workloads: list[WorkloadResult] = field(default_factory=list)
    took_s: float = 0.0
    ended_by: str = "done"
    notes: list[str] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        return any(each.pairs for workload in self.workloads for each in workload.variants)

    @property
    def predicted(self) -> bool:
        """Whether replay predicts the gain of any variant."""
        return any(each.replayed is not None for workload in self.workloads for each in workload.variants)

    @property
    def noise(self) -> tuple[float, float] | None:
        """The lowest and the highest ratio of plain against plain, over all laps; ``None`` without any."""
        ratios = [lap.ratio for workload in self.workloads for each in workload.variants[:1] for lap in each.laps()]
        return (min(ratios), max(ratios)) if ratios else None

    @property
    def found_bug(self) -> bool:
        """Whether a text differs from plain's in a way that rounding does not explain."""
        return any(
            judgement.verdict == "bug"
            for workload in self.workloads
            for each in workload.variants
            for judgement in each.judgements
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data for :func:`json.dumps`: every raw pair, and what follows from them."""
        return {
            "format": "paceline-bench",
            "version": RESULTS_VERSION,
            "machine": dict(self.machine),
            "target": self.target,
            "draft": self.draft,
            "temperature": self.settings.temperature,
            "tokens": self.settings.tokens,
            "laps": self.settings.laps,
            "seed": self.settings.seed,
            "drafters": list(self.settings.drafters),
            "ended_by": self.ended_by,
            "took_s": self.took_s,
            "notes": list(self.notes),
            "profile": self.profile.to_json(),
            "workloads": [_workload_json(workload) for workload in self.workloads],
        }


def _workload_json(workload: WorkloadResult) -> dict[str, Any]:
    return {
        "name": workload.name,
        "about": workload.about,
        "forced": workload.forced,
        "prompt_tokens": workload.prompt_tokens,
        "answer_tokens": workload.answer_tokens,
        "left_out": {"looped": workload.looped, "ended_early": workload.ended_early, "of": workload.tried},
        "static_by_replay": [
            {
                "name": each.variant.name,
                "drafters": list(each.variant.drafters),
                "draft_max": each.variant.fixed.draft_max if each.variant.fixed else None,
                "p_min": each.variant.fixed.p_min if each.variant.fixed else None,
                "ratio": each.ratio,
                "accept_share": each.accept_share,
            }
            for each in workload.static
        ],
        "variants": [_variant_json(each, workload.best("static")) for each in workload.variants],
    }


def _variant_json(result: VariantResult, best_static: VariantResult | None) -> dict[str, Any]:
    replayed = result.replayed
    return {
        "name": result.variant.name,
        "kind": result.variant.kind,
        "drafters": list(result.variant.drafters),
        "ratio": _estimate_json(result.ratio()),
        "tokens_per_s": _estimate_json(result.per_second()),
        "against_best_static": None if best_static is None else _estimate_json(result.against(best_static)),
        "ratio_by_prompt": result.by_task(),
        "num_drafted": result.num_drafted,
        "accept_share": result.accept_share,
        "own_share": result.own_share,
        "acceptance_length": result.acceptance_length,
        "accepted_and_tested_by_depth": result.by_depth(),
        "by_replay": None
        if replayed is None
        else {"ratio": replayed.ratio, "tokens_per_s": replayed.per_second, "accept_share": replayed.accept_share},
        "num_equal": result.num_equal,
        "left_out": result.left_out,
        "judgements": [dataclasses.asdict(judgement) for judgement in result.judgements],
        "snapshot": None if result.snapshot is None else dict(result.snapshot),
        "pairs": [dataclasses.asdict(pair) for pair in result.pairs],
    }


def _estimate_json(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)
