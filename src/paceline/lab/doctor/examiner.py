"""Examining candidates one after the other: what is cheap first, and what takes the models only where that allows it.

::

    both vocabularies ──> does it fit? ──no──> why not
                              │ yes: both models are opened as paceline run opens them
                              v
    cost profile ──> the target's answers ──> drafts recorded ──> agreement, replays ──> a diagnosis
    (kept)           (kept)

How many answers of what length, and how deep drafts are recorded, follows from the profile and the time there is.
Before each step it is asked again whether there is time for it; what there was none for is left out, and said.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.core.errors import CapabilityError, PacelineError
from paceline.core.params import StopRules
from paceline.engines.base import as_block_head
from paceline.engines.loading import is_head, open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.agreement import MAX_CHUNK, Agreement, measure_agreement, measure_survival
from paceline.lab.answers import Answers, WrittenAnswer
from paceline.lab.comparison import Stopped
from paceline.lab.doctor.prediction import (
    ALL_DRAFTERS,
    CALIBRATION_TOKENS,
    LiveCosts,
    Prediction,
    calibrate_costs,
    predict,
)
from paceline.lab.intervals import ALL, Depth
from paceline.lab.samples import PROMPT_TOKENS, Sample, make_tasks
from paceline.lab.sessions import Engines, Session, wall_engines
from paceline.lab.task import Task
from paceline.lab.vocabulary_fit import VocabularyFit, compare_vocabularies
from paceline.model_pair import ModelPair, managed_pair
from paceline.models.description import ModelDescription, describe
from paceline.planning.costs.meter import ProfilingBudget
from paceline.planning.costs.profile import CostProfile
from paceline.planning.costs.profile_cache import find_or_measure
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.worker import Worker

if TYPE_CHECKING:
    from paceline.lab.replaying.recording import Recording
    from paceline.vocabularies.relation import VocabularyRelation

_PROFILING_SHARE: Final = 0.17
"""Share of the time for a candidate that measuring passes may take."""
_USABLE: Final = 0.85
"""Share of the time left after measuring that is planned for; the rest is for what the forecast cannot know."""

_SHAPES: Final = (
    *((24, 128, 16), (24, 96, 12), (16, 96, 12), (16, 64, 12), (12, 64, 12), (12, 48, 12), (12, 48, 8), (8, 48, 8)),
    *((8, 48, 5), (4, 64, 8), (4, 48, 8), (4, 48, 5), (4, 48, 4), (4, 40, 4), (4, 32, 4), (4, 24, 4)),
)
"""Answers, tokens of each, and depth of the recorded drafts: the first that there is time for is taken.

Texts say more than tokens, as tokens of one text are correlated. Answers are longer than their prompts, as the draft
model reads a prompt once; and a draft so dear that its levels do not fit is seldom worth many of them.
"""
_FEWEST: Final = 4
"""Answers below which the report says that there was no time for more."""
_LAST_SHAPES: Final = ((4, 24, 4), (3, 24, 4), (2, 24, 4), (1, 24, 4), (1, 16, 4))
"""Shapes without calibration, which says little of a machine so slow; the last is taken where nothing fits."""
_REPLAYS: Final = 21
"""Replays of a recording."""
_REPLAY_TOKEN_S: Final = 5e-4
"""Seconds of replaying a token on a slow machine."""
_LEVEL_S: Final = 6e-4
"""Seconds of a recorded level beside its pass."""
_COMPARE_S: Final = 1e-3
"""Seconds of comparing two distributions."""
_COMPARE_ID_S: Final = 2e-8
"""Seconds of comparing an id of two distributions."""
_CALIBRATION_ROUNDS: Final = 2.2
"""Rounds of the short live answers, for each token of one."""
_CALIBRATION_SHARE: Final = 0.15
"""Share of the time for a candidate that the short live answers may take."""
_MIN_CALIBRATION: Final = 8
"""Fewest tokens of a live answer. On so slow a machine the time of a round beside its pass matters little."""

Tell = Callable[[str, float], None]
"""Called with what is being done, and the share of the candidate that is done."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found out about a candidate.

    Attributes: fitting: of the vocabularies; ``None`` where they could not be compared, and for a head, which has its
    target's. survival: of the draft's chains by depth, by kind of text. left_out: steps that there was no time for.
    error: why it was not drafted with, in a line. Then agreement and prediction are ``None``, and survival is empty.
    took_s: seconds of the examination. is_head: it drafts from the target's states.
    """

    name: str
    what: ModelDescription
    fitting: VocabularyFit | None
    agreement: Agreement | None = None
    survival: Mapping[str, Sequence[Depth]] = dataclasses.field(default_factory=dict)
    prediction: Prediction | None = None
    profile: CostProfile | None = None
    left_out: Sequence[str] = ()
    error: str | None = None
    took_s: float = 0.0
    is_head: bool = False


class Examiner:
    """Examines the candidates for one target, each in ``budget_s`` seconds. Answers have seeds from ``seed`` on."""

    def __init__(
        self,
        target: ModelOptions,
        samples: Sequence[Sample],
        *,
        temperature: float,
        budget_s: float,
        keep_answers: bool = True,
        seed: int = 1,
        stopped: Callable[[], bool] = lambda: False,
        tell: Tell = lambda doing, share: None,
    ) -> None:
        self._target = target
        self._samples = samples
        self._temperature = temperature
        self._budget_s = budget_s
        self._seed = seed
        self._stopped = stopped
        self._tell = tell
        self._answers = Answers(target, temperature, keep=keep_answers)

    def examine(self, name: str, draft: ModelOptions) -> Diagnosis:
        """Examine one candidate.

        Raises ``Stopped`` where the user wants no more; profiles and answers so far are kept.
        """
        started_s = time.monotonic()
        what = describe(Path(draft.path), may_be_head=True)
        fitting = None
        try:
            if not is_head(draft):
                fitting = self._compare_vocabularies(draft)
            if fitting is not None and fitting.refusal is not None:
                found = Diagnosis(name, what, fitting, error=fitting.refusal)
            else:
                found = self._measure(Diagnosis(name, what, fitting), draft, started_s + self._budget_s)
        except PacelineError as error:
            found = Diagnosis(name, what, fitting, error=str(error))
        return dataclasses.replace(found, took_s=time.monotonic() - started_s, is_head=is_head(draft))

    def _compare_vocabularies(self, draft: ModelOptions) -> VocabularyFit:
        self._tell_progress("comparing vocabularies", 0.0)
        texts: dict[str, list[str]] = {}
        for sample in self._samples:
            texts.setdefault(sample.kind, []).append(sample.text)
        with open_vocabulary(self._target) as ours, open_vocabulary(draft) as theirs:
            return compare_vocabularies(ours, theirs, texts)

    def _measure(self, found: Diagnosis, draft: ModelOptions, ends_s: float) -> Diagnosis:
        """Return a diagnosis with all that takes the models."""
        self._tell_progress("loading the models", 0.02)
        # Rows of both are compared, so as many are read at once.
        read_draft = dataclasses.replace(draft, rows_read=MAX_CHUNK)
        with Worker() as worker, worker.entered(managed_pair(self._target, read_draft)) as pair:
            if pair.draft is not None and as_block_head(pair.draft) is not None:
                raise CapabilityError(
                    f"{draft.path} drafts blocks, and what one costs is learned as it answers: measure it beside plain "
                    "decoding (`paceline run --compare`)"
                )
            engines = wall_engines(
                pair.target,
                pair.draft,
                worker,
                stopped=self._stopped,
                draft_vocab=draft.draft_vocab,
                draft_map=draft.draft_map,
            )
            profile = worker.call(lambda: self._measure_profile(engines, pair))
            steps = StepSeconds(profile, engines.target.vocabulary.size, self._calibration_tokens(profile))
            plan = choose_plan(
                steps, ends_s - time.monotonic(), lambda texts, tokens: self._missing(engines, texts, tokens)
            )
            written, is_late = self._write_answers(engines, plan, steps, ends_s)
            recordings: list[Recording] = []
            for each in written:
                needed_s = steps.text_s(len(each.token_ids), plan.depth)
                if recordings and time.monotonic() + needed_s > ends_s:
                    is_late = True
                    break
                recordings.append(self._record(engines, each, plan.depth, len(recordings) / len(written)))
            written = written[: len(recordings)]
            relation = found.fitting.relation if found.fitting else None
            self._tell_progress("comparing what both would say", 0.75)
            agreement = worker.call(lambda: self._measure_agreement(engines, written, relation))
            replays_s = steps.replays_s(sum(len(each.token_ids) for each in written))
            calibrates = plan.calibrates and time.monotonic() + steps.calibration_s + replays_s <= ends_s
            if calibrates:
                self._tell_progress("calibrating by three short answers", 0.8)
                costs = calibrate_costs(
                    engines,
                    profile,
                    written,
                    recordings,
                    self._temperature,
                    self._stopped,
                    most_tokens=self._calibration_tokens(profile),
                )
            else:
                costs = LiveCosts(profile)
        kinds = [each.task.workload for each in written]
        survival = measure_survival(recordings, kinds)
        replayed = 0

        def advance() -> None:
            nonlocal replayed
            replayed += 1
            self._tell_progress("replaying", 0.85 + 0.15 * min(replayed / _REPLAYS, 1.0))

        prediction = predict(recordings, kinds, survival[ALL], costs, advance)
        left_out = [] if calibrates else ["calibrating by short answers"]
        fewest = min(_FEWEST, len(self._samples))
        if len(written) < fewest and (is_late or plan.texts < fewest):
            left_out.append(f"{fewest - len(written)} of {fewest} answers")
        return dataclasses.replace(
            found,
            agreement=agreement,
            survival=survival,
            prediction=prediction,
            profile=profile,
            left_out=left_out,
        )

    def _measure_profile(self, engines: Engines, pair: ModelPair) -> CostProfile:
        self._tell_progress("measuring what passes cost", 0.05)
        return find_or_measure(
            engines.target,
            pair.target_options,
            engines.draft,
            pair.draft_options,
            budget=ProfilingBudget(_PROFILING_SHARE * self._budget_s, max_passes=None),
            # A shorter profile would be kept for later loads, with few measurements.
            keep_partial=_PROFILING_SHARE * self._budget_s >= ProfilingBudget().max_s,
            report=lambda share: self._tell_progress("measuring what passes cost", 0.05 + 0.15 * share),
        ).profile

    def _missing(self, engines: Engines, texts: int, tokens: int) -> int:
        """Return how many of so many answers are still to be written."""
        return self._answers.missing(self._make_tasks(engines, tokens), texts)

    def _calibration_tokens(self, profile: CostProfile) -> int:
        """Return how many tokens the short live answers have, so that a slow machine is done in time."""
        tokens = _CALIBRATION_SHARE * self._budget_s / (_CALIBRATION_ROUNDS * profile.round_s(1))
        return max(_MIN_CALIBRATION, min(CALIBRATION_TOKENS, int(tokens)))

    def _make_tasks(self, engines: Engines, tokens: int) -> list[Task]:
        return make_tasks(
            self._samples,
            engines.target.vocabulary,
            tokens=tokens,
            context_length=engines.target.capabilities.context_length,
            seed=self._seed,
        )

    def _write_answers(
        self, engines: Engines, plan: Plan, steps: StepSeconds, ends_s: float
    ) -> tuple[list[WrittenAnswer], bool]:
        """Return answers, and whether there was no time for all of them."""
        tasks = self._make_tasks(engines, plan.tokens)
        latest_s = ends_s - steps.answer_s(plan.tokens) - steps.after_answers_s(plan)
        is_late = False

        def in_time() -> bool:
            nonlocal is_late
            is_late = time.monotonic() > latest_s
            return not is_late

        self._tell_progress("the target answers", 0.2)
        written = self._answers.write(
            engines,
            tasks,
            plan.texts,
            stopped=self._stopped,
            in_time=in_time,
            report=lambda count: self._tell_progress("the target answers", 0.2 + 0.3 * count / plan.texts),
        )
        if not written:
            which = "the answers that there was time for" if is_late else f"{len(tasks)} answers of the target"
            raise NoAnswerError(
                f"none of {which} says anything, as they loop or end at once: sample them (--temp 0.8), or give "
                "another text (--text)"
            )
        return written, is_late

    def _record(self, engines: Engines, written: WrittenAnswer, depth: int, done: float) -> Recording:
        self._tell_progress("recording drafts", 0.5 + 0.25 * done)
        task = written.task
        with Session(engines, ALL_DRAFTERS, NO_SPECULATION) as session:
            return session.record(
                task.prompt_ids,
                written.token_ids,
                params=self._answers.params(task),
                rules=StopRules(task.max_tokens),
                finish_reason=written.finish_reason,
                name=task.name,
                depth=depth,
                stopped=self._stopped,
            )

    def _measure_agreement(
        self, engines: Engines, written: Sequence[WrittenAnswer], relation: VocabularyRelation | None
    ) -> Agreement | None:
        assert engines.draft is not None
        if relation is None or not relation.fits:
            return None
        return measure_agreement(
            engines.draft,
            written,
            target_vocab_size=engines.target.vocabulary.size,
            unshared_ids=relation.unshared_ids,
            temperature=self._temperature,
        )

    def _tell_progress(self, doing: str, share: float) -> None:
        """Report the progress; raise ``Stopped`` where the user wants no more."""
        if self._stopped():
            raise Stopped
        self._tell(doing, share)


class NoAnswerError(PacelineError):
    """The target's answers say nothing about drafting."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        tokens: of each answer, at most.
        depth: of recorded drafts.
        calibrates: whether short live answers measure what the loop takes beside passes.
    """

    texts: int
    tokens: int
    depth: int
    calibrates: bool = True


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Forecasts the steps of an examination, by the measured costs of passes."""

    profile: CostProfile
    vocabulary_size: int
    calibration_tokens: int

    @property
    def prompt_s(self) -> float:
        widest = self.profile.target.widest
        return PROMPT_TOKENS * self.profile.round_s(widest) / widest

    @property
    def calibration_s(self) -> float:
        return _CALIBRATION_ROUNDS * self.calibration_tokens * self.profile.round_s(1) + self.prompt_s

    def answer_s(self, tokens: int) -> float:
        return self.prompt_s + tokens * (self.profile.round_s(1) + self.profile.sampling_row_s)

    def replays_s(self, tokens: int) -> float:
        """Return the seconds of replaying answers of so many tokens together."""
        return tokens * _REPLAYS * _REPLAY_TOKEN_S

    def text_s(self, tokens: int, depth: int) -> float:
        """Return the seconds of all steps with an answer once it is written."""
        draft_s = self.profile.draft_s() if self.profile.draft is not None else 0.0
        place_s = (depth + 1) * (draft_s + _LEVEL_S) + _COMPARE_S + _COMPARE_ID_S * self.vocabulary_size
        return tokens * place_s + self.replays_s(tokens)

    def after_answers_s(self, plan: Plan) -> float:
        """Return the seconds of all steps after the answers."""
        return plan.texts * self.text_s(plan.tokens, plan.depth) + plan.calibrates * self.calibration_s


def choose_plan(steps: StepSeconds, left_s: float, missing: Callable[[int, int], int]) -> Plan:
    """Return the most that is forecast to fit into ``left_s``; the least where nothing does.

    ``missing`` returns how many of so many answers of so many tokens are still to be written.
    """
    plans = [*(Plan(*shape) for shape in _SHAPES), *(Plan(*shape, calibrates=False) for shape in _LAST_SHAPES)]
    for plan in plans:
        answers_s = missing(plan.texts, plan.tokens) * steps.answer_s(plan.tokens)
        if answers_s + steps.after_answers_s(plan) <= _USABLE * left_s:
            return plan
    return plans[-1]
