"""What a simulation stands on: what passes cost here, and recorded drafts for answers of the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.core.errors import CapabilityError
from paceline.core.params import StopRules
from paceline.engines.base import as_block_head, paced_draft
from paceline.lab.agreement import DRAFT
from paceline.lab.answers import Answers
from paceline.lab.comparison import Stopped
from paceline.lab.doctor.examiner import NoAnswerError, StepSeconds, Tell, choose_plan
from paceline.lab.doctor.prediction import CALIBRATION_TOKENS, LOOKUPS, LiveCosts, calibrate_costs
from paceline.lab.replaying.recording import Recording
from paceline.lab.samples import Sample, make_tasks
from paceline.lab.sessions import Engines, Session
from paceline.lab.task import Task
from paceline.model_pair import ModelPair
from paceline.planning.costs.meter import ProfilingBudget
from paceline.planning.costs.profile_cache import find_or_measure
from paceline.planning.policies.fixed import NO_SPECULATION

_PROFILING_SHARE: Final = 0.17
"""Share of the time that measuring passes may take."""


@dataclass(frozen=True, slots=True)
class ServedCosts(LiveCosts):
    """What passes cost in the live loop, those that read prompts included.

    A profile measures rounds of drafts. What it says of wider passes is that they are as dear as its widest one for
    each row, and on a GPU rows of prompts are much cheaper.

    Attributes:
        prompt_rows: rows of a prompt that was read in one pass; 0 where none was.
        prompt_s: seconds of that pass.
    """

    prompt_rows: int = 0
    prompt_s: float = 0.0

    def round_s(self, rows: int, context: int = 0, requests: int = 1) -> float:
        """Return the seconds of a round; of one wider than the profile, on a line to the prompt that was read."""
        widest = self.profile.target.widest
        if not rows > widest or not self.prompt_rows > widest:
            return LiveCosts.round_s(self, rows, context, requests)
        row_s = max(self.prompt_s - self.profile.round_s(widest), 0.0) / (self.prompt_rows - widest)
        return LiveCosts.round_s(self, widest, context, requests) + (rows - widest) * row_s


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured.

    Attributes:
        recordings: of answers of the target, with every drafter there is.
        token_bytes: host memory of a token of a finished request.
        left_out: steps that there was no time for.
    """

    costs: ServedCosts
    recordings: Sequence[Recording]
    token_bytes: int
    left_out: Sequence[str]


def measure(
    engines: Engines,
    pair: ModelPair,
    samples: Sequence[Sample],
    *,
    prompt_tokens: int,
    temperature: float,
    budget_s: float,
    keep_answers: bool,
    seed: int,
    stopped: Callable[[], bool],
    tell: Tell,
) -> Measured:
    """Measure a pair in about ``budget_s`` seconds: more looks at more text.

    Args:
        samples: beginnings that the target goes on with.
        prompt_tokens: how long prompts of the load are.
        keep_answers: whether the target's answers are kept for a later run, and those kept are used.
        seed: of the answers.
        tell: told what is being done, and the share of it that is done.

    Raises:
        CapabilityError: a drafter's rounds cannot be recorded.
        NoAnswerError: the target's answers say nothing about drafting.
        Stopped: the user wants no more.
    """
    ends_s = time.monotonic() + budget_s

    def tell_progress(doing: str, share: float) -> None:
        if stopped():
            raise Stopped
        tell(doing, share)

    if engines.draft is not None and as_block_head(engines.draft) is not None:
        raise CapabilityError(
            "the draft model drafts blocks, whose rounds cannot be recorded: name another draft model, or none"
        )
    doing = "measuring what passes cost"
    tell_progress(doing, 0.0)
    profile = engines.worker.call(
        lambda: find_or_measure(
            engines.target,
            pair.target_options,
            paced_draft(engines.draft),
            pair.draft_options,
            budget=ProfilingBudget(_PROFILING_SHARE * budget_s, max_passes=None),
            # A shorter profile would be kept for later loads, with few measurements.
            keep_partial=_PROFILING_SHARE * budget_s >= ProfilingBudget().max_s,
            report=lambda share: tell_progress(doing, 0.2 * share),
        )
    ).profile
    prompt_rows, prompt_s, token_bytes = engines.worker.call(lambda: _read_prompt(engines, prompt_tokens))
    steps = StepSeconds(profile, engines.target.vocabulary.size, CALIBRATION_TOKENS)
    answers = Answers(pair.target_options, temperature, keep=keep_answers)

    def tasks(tokens: int) -> list[Task]:
        length = engines.target.capabilities.context_length
        return make_tasks(samples, engines.target.vocabulary, tokens=tokens, context_length=length, seed=seed)

    plan = choose_plan(steps, ends_s - time.monotonic(), lambda texts, tokens: answers.missing(tasks(tokens), texts))
    tell_progress("the target answers", 0.25)
    written = answers.write(
        engines,
        tasks(plan.tokens),
        plan.texts,
        stopped=stopped,
        in_time=lambda: time.monotonic() < ends_s - steps.after_answers_s(plan),
        report=lambda count: tell_progress("the target answers", 0.25 + 0.35 * count / plan.texts),
    )
    if not written:
        raise NoAnswerError(
            "none of the target's answers can be used, as they loop or end at once: sample them (`temperature` 0.8), "
            "or give another text"
        )
    drafters = (*LOOKUPS, *(() if engines.draft is None else (DRAFT,)))
    recordings: list[Recording] = []
    with Session(engines, drafters, NO_SPECULATION) as session:
        for each in written:
            if recordings and time.monotonic() > ends_s - steps.text_s(len(each.token_ids), plan.depth):
                break
            tell_progress("recording drafts", 0.6 + 0.3 * len(recordings) / len(written))
            recordings.append(
                session.record(
                    each.task.prompt_ids,
                    each.token_ids,
                    params=answers.params(each.task),
                    rules=StopRules(each.task.max_tokens),
                    finish_reason=each.finish_reason,
                    name=each.task.name,
                    depth=plan.depth,
                    stopped=stopped,
                )
            )
    left_out = [] if len(recordings) == plan.texts else [f"{plan.texts - len(recordings)} of {plan.texts} answers"]
    live = LiveCosts(profile)
    if plan.calibrates:
        tell_progress("calibrating by short answers", 0.9)
        live = calibrate_costs(engines, profile, written[: len(recordings)], recordings, temperature, stopped)
    else:
        left_out.append("calibrating by short answers")
    figures = {name: getattr(live, name) for name in LiveCosts.__slots__}
    return Measured(
        ServedCosts(**figures, prompt_rows=prompt_rows, prompt_s=prompt_s), recordings, token_bytes, left_out
    )


def _read_prompt(engines: Engines, prompt_tokens: int) -> tuple[int, float, int]:
    """Return the rows and the seconds of a pass that reads a prompt, and the bytes of a token of it."""
    target = engines.target
    capabilities = target.capabilities
    rows = min(prompt_tokens, capabilities.max_rows, capabilities.context_length - 1)
    # What it says decides nothing of what it takes. The last token is its first round's.
    target.read([number % target.vocabulary.size for number in range(rows + 1)])
    sequence = target.open()
    token_bytes = target.saved_bytes(sequence) // max(target.length(sequence), 1)
    target.close_sequence(sequence)
    return rows, target.read_s, token_bytes
