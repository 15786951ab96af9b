"""Comparing a target and a draft model token by token.

::

    the target's own answers, or a text as it is ──> rows of both models ──> compared tokens
                             └──> drafts recorded at each place ──> survival by depth

A draft that has the target's tokens reads a text in wide passes. One that does not, or that reads the target's states,
is asked for its proposals at every place as it is when it drafts, and the row is noted that it proposes by.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, InputError, VocabularyMismatchError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.vocabulary import Vocabulary
from paceline.engines.base import as_block_head
from paceline.engines.loading import is_head, open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.agreement import DRAFT, MAX_CHUNK, measure_survival, read_predicting_rows
from paceline.lab.answers import Answers
from paceline.lab.comparison import Stop, Stopped
from paceline.lab.disagreement.places import ComparedText, TokenComparer
from paceline.lab.intervals import Depth
from paceline.lab.replaying.recording import Recording
from paceline.lab.samples import Sample, make_tasks
from paceline.lab.sessions import Engines, Session, wall_engines
from paceline.lab.vocabulary_fit import VocabularyFit, compare_vocabularies
from paceline.model_pair import ModelPair, managed_pair
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.worker import Worker

OWN_TEXT: Final = "text"
"""Kind of a text that is read as it is."""
_DEPTH: Final = 8
"""Depth of the drafts that are recorded."""

Tell: TypeAlias = Callable[[str, float], None]
"""Called with what is being done, and the share of all that is done."""


@dataclass(frozen=True, slots=True)
class OwnAnswers:
    """What is compared: answers of the target to beginnings of samples.

    Attributes:
        count: answers, of the first samples whose answers say anything.
        tokens: of each, at most.
        keep: whether they may be kept for the next time.
    """

    samples: Sequence[Sample]
    count: int
    tokens: int
    keep: bool


@dataclass(frozen=True, slots=True)
class AsItIs:
    """What is compared: a text, cut into windows. As llama-perplexity does, the second half of each is compared."""

    name: str
    text: str
    window: int


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What was found.

    Attributes:
        fitting: of the vocabularies; ``None`` for a head, which has its target's.
        vocabulary: the target's tokens as texts, by their ids.
        survival: of the draft's chains by depth, by kind of text; empty for a text that is read as it is, which the
            target might not have written.
        is_whole: whether all was compared that was to be; else the user ended it.
    """

    texts: Sequence[ComparedText]
    fitting: VocabularyFit | None
    spellings: Mapping[int, bytes]
    survival: Mapping[str, Sequence[Depth]]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class _Text:
    """A text before it is compared: ``token_ids`` follow ``prompt_ids``."""

    kind: str
    name: str
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    seed: int


def compare_models(
    target: ModelOptions,
    draft: ModelOptions,
    source: OwnAnswers | AsItIs,
    *,
    temperature: float,
    seed: int = 1,
    stopped: Stop = lambda: False,
    tell: Tell = lambda doing, share: None,
) -> Disagreement:
    """Compare both models on a text, or on the target's own answers, which have seeds from ``seed`` on.

    Raises:
        Stopped: the user wanted no more before anything was compared.
        VocabularyMismatchError: the draft cannot say what the target says.
        CapabilityError: the draft has no distribution of one token, as it drafts blocks.
        InputError: a model cannot be opened, or there is no text to compare.
    """
    tell("comparing vocabularies", 0.0)
    fitting = None if is_head(draft) else _fit_vocabularies(target, draft, source)
    tell("loading the models", 0.02)
    # Rows of both are compared, so as many are read at once. llama-perplexity reads a window in one pass, and passes of
    # another width round differently.
    draft = dataclasses.replace(draft, rows_read=_pass_rows(source))
    with Worker() as worker, worker.entered(managed_pair(target, draft)) as pair:
        return _Comparer(pair, worker, fitting, source, temperature, seed, stopped, tell).run()


def _pass_rows(source: OwnAnswers | AsItIs) -> int:
    return source.window if isinstance(source, AsItIs) else MAX_CHUNK


def _fit_vocabularies(target: ModelOptions, draft: ModelOptions, source: OwnAnswers | AsItIs) -> VocabularyFit:
    texts: dict[str, list[str]] = {}
    for sample in source.samples if isinstance(source, OwnAnswers) else (Sample(OWN_TEXT, source.name, source.text),):
        texts.setdefault(sample.kind, []).append(sample.text)
    with open_vocabulary(target) as ours, open_vocabulary(draft) as theirs:
        fitting = compare_vocabularies(ours, theirs, texts)
    if fitting.refusal is not None:
        raise VocabularyMismatchError(fitting.refusal)
    return fitting


class _Comparer:
    """Compares the models of an open pair."""

    def __init__(
        self,
        pair: ModelPair,
        worker: Worker,
        fitting: VocabularyFit | None,
        source: OwnAnswers | AsItIs,
        temperature: float,
        seed: int,
        stopped: Stop,
        tell: Tell,
    ) -> None:
        assert pair.draft is not None
        assert pair.draft_options is not None
        if as_block_head(pair.draft) is not None:
            raise CapabilityError(
                f"{pair.draft_options.path} drafts blocks, and has no distribution of a single token to compare: "
                "see what it gains with `paceline run --compare`"
            )
        self._worker = worker
        self._fitting = fitting
        self._source = source
        self._temperature = temperature
        self._seed = seed
        self._width = _pass_rows(source)
        self._stopped = stopped
        self._tell = tell
        self._target = pair.target_options
        self._draft = pair.draft
        self._engines: Engines = wall_engines(
            pair.target,
            pair.draft,
            worker,
            stopped=stopped,
            draft_vocab=pair.draft_options.draft_vocab,
            draft_map=pair.draft_options.draft_map,
        )
        # A head's rows are of its target's tokens, and no wide pass has the states that it reads.
        self._reads_alone = fitting is not None and fitting.fits and pair.draft_options.draft_vocab != "translate"
        self._answers = Answers(self._target, temperature, keep=isinstance(source, OwnAnswers) and source.keep)
        self._compare = TokenComparer(
            temperature,
            target_vocab_size=self._vocabulary.size,
            unshared_ids=fitting.relation.unshared_ids if fitting is not None and self._reads_alone else (),
            translated=fitting is not None and not self._reads_alone,
        ).compare

    @property
    def _vocabulary(self) -> Vocabulary:
        return self._engines.target.vocabulary

    def run(self) -> Disagreement:
        texts = self._windows() if isinstance(self._source, AsItIs) else self._write_answers(self._source)
        compared: list[ComparedText] = []
        recordings: list[Recording] = []
        try:
            for number, text in enumerate(texts):
                self._advance("comparing what both would say", 0.4 + 0.6 * number / len(texts))
                one, recording = self._compare_text(text)
                compared.append(one)
                recordings += [recording] if recording is not None else []
        except Stopped:
            if not compared:
                raise
        kinds = [text.kind for text in compared][: len(recordings)]
        return Disagreement(
            compared,
            self._fitting,
            self._spellings(compared),
            measure_survival(recordings, kinds),
            is_whole=len(compared) == len(texts),
        )

    def _write_answers(self, source: OwnAnswers) -> list[_Text]:
        tasks = make_tasks(
            source.samples,
            self._vocabulary,
            tokens=source.tokens,
            context_length=self._engines.target.capabilities.context_length,
            seed=self._seed,
        )
        self._advance("the target answers", 0.05)
        written = self._answers.write(
            self._engines,
            tasks,
            source.count,
            stopped=self._stopped,
            in_time=lambda: True,
            report=lambda count: self._advance("the target answers", 0.05 + 0.35 * count / source.count),
        )
        if not written:
            raise InputError(
                f"none of {len(tasks)} answers of the target says anything, as they loop or end at once: sample them "
                "(--temp 0.8), or give another text (--text)"
            )
        return [
            _Text(each.task.workload, each.task.name, each.task.prompt_ids, each.token_ids, each.task.seed)
            for each in written
        ]

    def _windows(self) -> list[_Text]:
        """Return the windows of a text, each with the model's own first tokens in the place of its first ones."""
        assert isinstance(self._source, AsItIs)
        window = self._source.window
        context_length = min(engine.capabilities.context_length for engine in (self._engines.target, self._draft))
        if window > context_length:
            raise InputError(
                f"windows of {window} tokens are longer than the context of {context_length}: give a larger context "
                "(-c), or smaller windows (--window)"
            )
        token_ids = self._vocabulary.tokenize(self._source.text)
        if len(token_ids) < window:
            raise InputError(
                f"{self._source.name} has {len(token_ids)} tokens, and windows have {window}: give a longer text, or "
                "smaller windows (--window)"
            )
        opening = self._vocabulary.tokenize("")
        first = window // 2 + 1
        texts = []
        for number, start in enumerate(range(0, len(token_ids) - window + 1, window), 1):
            ids = [*opening, *token_ids[start + len(opening) : start + window]]
            texts.append(_Text(OWN_TEXT, f"{self._source.name}:{number}", ids[:first], ids[first:], self._seed))
        return texts

    def _compare_text(self, text: _Text) -> tuple[ComparedText, Recording | None]:
        recording: Recording | None = None
        noted: dict[int, FloatArray] = {}
        if isinstance(self._source, OwnAnswers) or not self._reads_alone:
            recording, noted = self._record(text)
        tokens = []

        def compare() -> None:
            token_ids, first = [*text.prompt_ids, *text.token_ids], len(text.prompt_ids)
            target_rows = read_predicting_rows(self._engines.target, token_ids, first, width=self._width)
            for index, (token_id, row, draft_row) in enumerate(
                zip(text.token_ids, target_rows, self._draft_rows(token_ids, first, noted), strict=True)
            ):
                if index % MAX_CHUNK == 0 and self._stopped():
                    raise Stopped
                tokens.append(self._compare(token_id, row, draft_row))

        self._worker.call(compare)
        compared = ComparedText(text.kind, text.name, text.prompt_ids, tokens)
        return compared, recording if isinstance(self._source, OwnAnswers) else None

    def _draft_rows(
        self, token_ids: Sequence[int], first: int, noted: Mapping[int, FloatArray]
    ) -> Iterator[FloatArray | None]:
        if self._reads_alone:
            yield from read_predicting_rows(self._draft, token_ids, first, width=self._width)
        else:
            yield from (noted.get(position) for position in range(first, len(token_ids)))

    def _record(self, text: _Text) -> tuple[Recording, dict[int, FloatArray]]:
        """Ask the draft at every place; return its chains, and its rows by the positions of the tokens they predict."""
        noted: dict[int, FloatArray] = {}
        with Session(self._engines, [DRAFT], NO_SPECULATION) as session:
            recording = session.record(
                # Recorded is what follows each token of an answer, and here the first one is asked for too.
                text.prompt_ids[:-1],
                [text.prompt_ids[-1], *text.token_ids],
                params=SamplingParams(temperature=self._temperature, seed=text.seed),
                rules=StopRules(len(text.token_ids) + 1),
                finish_reason="length",
                name=text.name,
                depth=_DEPTH if isinstance(self._source, OwnAnswers) else 1,
                stopped=self._stopped,
                note_row=None if self._reads_alone else lambda position, row: noted.update({position: row.copy()}),
            )
        return recording, noted

    def _spellings(self, compared: Sequence[ComparedText]) -> dict[int, bytes]:
        used = {
            token_id
            for text in compared
            for token in text.tokens
            for token_id in (token.token_id, *(shown for shown, _ in (*token.target_tops, *token.draft_tops)))
        }
        used.update(token_id for text in compared for token_id in text.prompt_ids)
        vocabulary = self._vocabulary
        return {
            token_id: vocabulary.token_bytes(token_id) or vocabulary.token_spelling(token_id) or b""
            for token_id in used
        }

    def _advance(self, doing: str, share: float) -> None:
        """Report the progress; raise ``Stopped`` where the user wants no more."""
        if self._stopped():
            raise Stopped
        self._tell(doing, share)
