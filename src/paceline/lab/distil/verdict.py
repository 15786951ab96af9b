"""What a training was worth: the draft before and after, on the target's answers to prompts that were held out.

Both drafts read the same answers, so that figures are compared text by text. A kind of text that was not trained on
shows what was forgotten, and both drafts decode in turns for tokens per second.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np

from paceline.core.params import SamplingParams
from paceline.core.sampling import RowSampler
from paceline.drafters.registry import relate_draft
from paceline.engines.base import Engine
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.lab.agreement import MAX_CHUNK, TextAgreement, agree_by_text, read_predicting_rows
from paceline.lab.answers import WrittenAnswer, read_place
from paceline.lab.comparison import Stop, Stopped
from paceline.lab.distil.answers import KeptAnswer
from paceline.lab.intervals import ALL, Interval, Ratio, difference, quotient, ratio
from paceline.lab.sessions import Session, wall_engines
from paceline.lab.task import Task
from paceline.model_pair import ModelPair, open_pair
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.worker import Worker

Outcome: TypeAlias = Literal["gain", "no gain", "loss"]

JUDGED_TOKENS: Final = 128
"""Tokens of an answer that are judged: more texts say more than longer ones."""
LIVE_DRAFT: Final = 3
"""Tokens that are drafted in a round for tokens per second, whatever the draft: llama-server's default."""
_LIVE_TEXTS: Final = 6
"""Answers that are decoded in turns."""
_FEWEST_LIVE: Final = 3
"""Answers that are decoded in turns though there is no time left."""
_LIVE_TURNS: Final = 2
"""Times that each is decoded."""


@dataclass(frozen=True, slots=True)
class Change:
    """A share of a kind of text before and after, with what the difference of pairs is."""

    before: Ratio
    after: Ratio
    difference: Interval

    @classmethod
    def of(cls, texts: Sequence[tuple[float, float, int]]) -> Change:
        """Return the change by sums before and after and the places, of each text."""
        return cls(
            ratio([(before, count) for before, _, count in texts]),
            ratio([(after, count) for _, after, count in texts]),
            difference(texts),
        )


@dataclass(frozen=True, slots=True)
class KindVerdict:
    """What changed on a kind of text: the coupled verifier's acceptance, and 1 - TV, which is rejection's."""

    kind: str
    trained_on: bool
    texts: int
    accepted: Change
    overlap: Change


@dataclass(frozen=True, slots=True)
class Live:
    """Tokens per second, plainly and with each draft, in turns; ``gain`` is after over before, of pairs of texts."""

    plain: float
    before: float
    after: float
    gain: Interval
    texts: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the training was worth.

    Attributes:
        overall: on all held-out prompts of the kinds that were trained on.
        kinds: each by itself, and then the kinds that were not trained on.
    """

    overall: KindVerdict
    kinds: Sequence[KindVerdict]
    live: Live | None

    @property
    def outcome(self) -> Outcome:
        """Whether more is accepted on prompts that were held out; ``"no gain"`` where the interval contains zero."""
        return judge(self.overall.accepted.difference)


def judge(interval: Interval) -> Outcome:
    if interval.low is None or interval.high is None or interval.low <= 0.0 <= interval.high:
        return "no gain"
    return "gain" if interval.low > 0.0 else "loss"


def judge_draft(
    target: ModelOptions,
    before: ModelOptions,
    after: Callable[[ModelOptions], ModelOptions],
    held: Sequence[KeptAnswer],
    other: Sequence[KeptAnswer],
    unshared_ids: Sequence[int],
    temperature: float,
    *,
    in_time: Callable[[], bool],
    stopped: Stop,
    report: Callable[[str, float], None],
) -> Verdict:
    """Measure both drafts on answers. ``after`` makes the options of the trained one from those the other runs with.

    Where there is no time left (``in_time``), they decode fewer answers in turns. ``report`` hears what is done, and
    the share of it. Raises ``Stopped`` where the user wants no more.
    """
    with (
        Worker() as worker,
        worker.entered(_open_drafts(target, before, after)) as (pair, trained),
    ):
        assert pair.draft is not None
        answers = [*held, *other]
        written: list[WrittenAnswer] = []
        for number, answer in enumerate(answers):
            report("reading what the target says", 0.3 * number / len(answers))
            _check(stopped)
            written.append(worker.call(lambda answer=answer: _with_places(pair.target, answer, temperature)))  # type: ignore[misc]
        texts: list[list[TextAgreement]] = []
        for index, (draft, name) in enumerate(((pair.draft, "before"), (trained, "after"))):
            measured = []
            agreed = agree_by_text(
                draft,
                written,
                target_vocab_size=pair.target.vocabulary.size,
                unshared_ids=unshared_ids,
                temperature=temperature,
            )
            for number in range(len(written)):
                report(f"comparing the draft {name}", 0.3 + 0.2 * (index + number / len(written)))
                _check(stopped)
                measured.append(worker.call(lambda agreed=agreed: next(agreed)))  # type: ignore[misc]
            texts.append(measured)
        report("decoding in turns", 0.7)
        live = _time_live(pair, trained, worker, [each.task for each in written], temperature, in_time, stopped, report)
    pairs = list(zip(*texts, strict=True))
    return summarise(pairs[: len(held)], pairs[len(held) :], live)


def summarise(
    held: Sequence[tuple[TextAgreement, TextAgreement]],
    other: Sequence[tuple[TextAgreement, TextAgreement]],
    live: Live | None,
) -> Verdict:
    """Return the verdict on texts, each before and after."""
    kinds = [
        _of_kind(kind, of_kind, trained_on)
        for trained_on, texts in ((True, held), (False, other))
        for kind, of_kind in _by_kind(texts).items()
    ]
    return Verdict(_of_kind(ALL, held, True), kinds, live)


def _by_kind(
    texts: Sequence[tuple[TextAgreement, TextAgreement]],
) -> Mapping[str, list[tuple[TextAgreement, TextAgreement]]]:
    found: dict[str, list[tuple[TextAgreement, TextAgreement]]] = {}
    for each in texts:
        found.setdefault(each[0].kind, []).append(each)
    return found


def _of_kind(kind: str, texts: Sequence[tuple[TextAgreement, TextAgreement]], trained_on: bool) -> KindVerdict:
    return KindVerdict(
        kind,
        trained_on,
        len(texts),
        Change.of([(before.coupled, after.coupled, before.places) for before, after in texts]),
        Change.of([(before.overlap, after.overlap, before.places) for before, after in texts]),
    )


@contextmanager
def _open_drafts(
    target: ModelOptions, before: ModelOptions, after: Callable[[ModelOptions], ModelOptions]
) -> Iterator[tuple[ModelPair, Engine]]:
    # Rows are compared, so many are read at once.
    pair = open_pair(dataclasses.replace(target, rows_read=MAX_CHUNK), dataclasses.replace(before, rows_read=MAX_CHUNK))
    try:
        assert pair.draft_options is not None
        trained = open_engine(after(pair.draft_options))
        try:
            yield pair, trained
        finally:
            trained.close()
    finally:
        pair.close()


def _with_places(target: Engine, answer: KeptAnswer, temperature: float) -> WrittenAnswer:
    """Return an answer with the distribution of each token, after temperature and filters."""
    sampler = RowSampler(SamplingParams(temperature=temperature, seed=0))
    token_ids = answer.token_ids[:JUDGED_TOKENS]
    rows = read_predicting_rows(target, [*answer.task.prompt_ids, *token_ids], len(answer.task.prompt_ids))
    task = dataclasses.replace(answer.task, max_tokens=min(answer.task.max_tokens, JUDGED_TOKENS))
    return WrittenAnswer(task, token_ids, None, tuple(read_place(sampler, row) for row in rows))


def _time_live(
    pair: ModelPair,
    trained: Engine,
    worker: Worker,
    tasks: Sequence[Task],
    temperature: float,
    in_time: Callable[[], bool],
    stopped: Stop,
    report: Callable[[str, float], None],
) -> Live | None:
    chosen = tasks[:_LIVE_TEXTS]
    engines = wall_engines(pair.target, pair.draft, worker, stopped=stopped)
    of_trained = dataclasses.replace(
        engines, draft=trained, draft_tokens=relate_draft(pair.target.vocabulary, trained.vocabulary)
    )
    policy = FixedPolicy(LIVE_DRAFT)
    seconds = np.zeros((3, len(chosen)))
    tokens = np.zeros((3, len(chosen)))
    with (
        Session(engines, [], NO_SPECULATION) as plain,
        Session(engines, ["draft"], policy) as before,
        Session(of_trained, ["draft"], policy) as after,
    ):
        for turn in range(_LIVE_TURNS):
            for number, task in enumerate(chosen):
                if (turn or number >= _FEWEST_LIVE) and not in_time():
                    break
                report("decoding in turns", 0.7 + 0.3 * (turn + number / len(chosen)) / _LIVE_TURNS)
                ways = list(enumerate((plain, before, after)))
                first = (turn + number) % len(ways)  # whoever comes first may find caches cold
                for way, session in ways[first:] + ways[:first]:
                    answer = session.answer(task, temperature, stopped, speculate=way > 0)
                    seconds[way, number] += answer.seconds
                    tokens[way, number] += len(answer.token_ids) - 1
    is_timed = (tokens > 0).all(axis=0)
    if not is_timed.any():
        return None
    seconds, tokens = seconds[:, is_timed], tokens[:, is_timed]
    of_plain, of_before, of_after = (float(speed) for speed in tokens.sum(axis=1) / seconds.sum(axis=1))
    gain = quotient(seconds[1] / tokens[1], seconds[2] / tokens[2])
    return Live(of_plain, of_before, of_after, gain, int(is_timed.sum()))


def _check(stopped: Stop) -> None:
    if stopped():
        raise Stopped


def trained_options(made: Path, make: Callable[[Path], ModelOptions]) -> Callable[[ModelOptions], ModelOptions]:
    """Return how the trained draft runs: as the one before where the engine is the same, else as ``make`` says."""

    def options(before: ModelOptions) -> ModelOptions:
        if Path(before.path).is_dir() == made.is_dir():
            return dataclasses.replace(before, path=made)
        own = make(made)
        return dataclasses.replace(own, context_length=before.context_length, rows_read=before.rows_read)

    return options
