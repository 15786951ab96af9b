"""Distilling from end to end, step by step; each goes on where it stood, and none takes another's time."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.atomic_output import check_room
from paceline.core.errors import InputError, VocabularyMismatchError
from paceline.core.extras import missing
from paceline.engines.loading import open_engine, open_vocabulary
from paceline.engines.options import ModelOptions
from paceline.lab.agreement import MAX_CHUNK
from paceline.lab.comparison import Stop
from paceline.lab.distil.answers import (
    AnswerLog,
    KeptAnswer,
    Prompts,
    answer_options,
    context_length,
    longest_prompt,
    make_tasks,
    read_log,
    write_answers,
)
from paceline.lab.distil.draft_files import is_gguf, make_folder, write_made
from paceline.lab.distil.rows import load_rows, row_bytes, write_rows
from paceline.lab.distil.verdict import Verdict, judge_draft, trained_options
from paceline.lab.distil.work import WorkFolder
from paceline.vocabularies.relation import relate_vocabularies

if TYPE_CHECKING:
    from paceline.core.vocabulary import Vocabulary
    from paceline.lab.distil.training import Training
    from paceline.vocabularies.relation import VocabularyRelation

ANSWERS_UNTIL, ROWS_UNTIL, TRAINING_UNTIL = 0.35, 0.5, 0.85
"""Shares of the time by which steps end. What one does not take is the next one's; the verdict has the rest."""
MIN_TRAINED: Final = 8
"""Answers to train on below which there is no use in it."""
MIN_JUDGED: Final = 4
"""Answers to held-out prompts below which there is no verdict."""
_ROOM: Final = 36
"""Bytes on the disk for a parameter: the folder, two checkpoints with their optimiser, and what is made."""

Tell = Callable[[str], None]
"""Called with what is being done."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How to distil.

    Attributes:
        answers: a log of the target's answers; ``None`` has it answer ``prompts``.
        tokens: of an answer, at most.
        file_type: of the weights of what is made.
        learning_rate: ``None`` chooses by the draft's size.
        lora: rank of the matrices that are trained in place of the weights; ``None`` trains these.
    """

    target: ModelOptions
    draft: ModelOptions
    made: Path
    prompts: Prompts | None
    answers: Path | None
    temperature: float
    tokens: int
    seed: int
    epochs: int
    file_type: str
    num_parameters: int
    learning_rate: float | None = None
    lora: int | None = None


@dataclass(frozen=True, slots=True)
class Distilled:
    """What came of it; ``path`` is what was made, in the work folder."""

    path: Path
    answers: int
    answer_tokens: int
    training: Training
    verdict: Verdict


def check_installed(*, lora: bool = False) -> None:
    """Raise ``CapabilityError`` unless all that training takes is installed."""
    for package in ("torch", "transformers", "accelerate", *(("peft",) if lora else ())):
        try:
            __import__(package)
        except ModuleNotFoundError as error:
            if package == "peft":
                raise missing("--lora", "peft", "distil", otherwise="leave it out") from error
            raise missing("distilling", error.name or package, "torch") from error


def check_loads(folder: Path) -> None:
    """Raise ``InputError`` for a folder whose architecture transformers or the engine does not run."""
    from paceline.lab.distil.training import check_architecture

    check_architecture(folder)


def distil(
    settings: Settings, work: WorkFolder, draft_options: Callable[[Path], ModelOptions], *, stopped: Stop, tell: Tell
) -> Distilled:
    """Make a draft in a work folder, which is held, and judge it.

    Raises:
        Stopped: the user wants no more; all that was done is kept.
        InputError: the pair or the prompts cannot be used, there is too little time, or too little room.
    """
    if settings.target.max_sequences != 1:
        settings = dataclasses.replace(settings, target=dataclasses.replace(settings.target, max_sequences=1))
    with open_vocabulary(settings.target) as ours, open_vocabulary(settings.draft) as theirs:
        relation = check_tokens(ours, theirs)
        # The drafter puts this id in the place of those that the draft lacks, too.
        draft_size, stand_in = theirs.size, min(theirs.end_ids, default=0)
        log = AnswerLog(work.path / "answers.jsonl")
        tasks = _prepare_answers(settings, ours, log)
    check_room(
        work.path,
        max(_ROOM * settings.num_parameters - _folder_bytes(work.path), 0),
        way_out="give OUT on another disk",
    )
    has_begun = bool(work.facts.get("training_began_s"))
    if not has_begun:
        write_answers(
            answer_options(settings.target, settings.tokens),
            tasks,
            log,
            settings.temperature,
            in_time=lambda: work.has_time(ANSWERS_UNTIL),
            stopped=stopped,
            report=lambda count: _note(work, tell, f"the target answers: {count} of up to {len(tasks)}"),
        )
    held, other = log.of_use("held"), log.of_use("other")
    answers = log.of_use("train")
    _check_enough(answers, held)
    work.keep()
    if not has_begun:
        _write_rows(settings, work, answers, relation.unshared_ids, stopped, tell)
    read = [each.as_read(draft_size, stand_in) for each in answers]
    path, training = _train(settings, work, read, stopped, tell)
    verdict = judge_draft(
        _reading_options(settings),
        settings.draft,
        trained_options(path, draft_options),
        held,
        other,
        relation.unshared_ids,
        settings.temperature,
        in_time=lambda: work.has_time(1.0),
        stopped=stopped,
        report=lambda doing, share: _note(work, tell, f"{doing}: {share:.0%} of the verdict"),
    )
    return Distilled(path, len(answers), sum(len(each.token_ids) for each in answers), training, verdict)


def check_tokens(target: Vocabulary, draft: Vocabulary) -> VocabularyRelation:
    """Return how the vocabularies relate; raise where ids of one are not mostly the tokens of the other."""
    relation = relate_vocabularies(target, draft)
    if not relation.fits:
        raise VocabularyMismatchError(
            f"the draft has other tokens than the target ({relation.num_differing:,} of {relation.num_common:,} ids "
            "differ), and translated drafts cannot be distilled yet: take a draft with the target's tokens, and distil "
            "before its vocabulary is pruned"
        )
    return relation


def _prepare_answers(settings: Settings, vocabulary: Vocabulary, log: AnswerLog) -> list[Any]:
    """Return what the target is to answer, after taking over the answers of a log."""
    prompts, room = settings.prompts, longest_prompt(settings.target, settings.tokens)
    if settings.answers is not None:
        found, prompts = read_log(
            settings.answers, vocabulary, max_prompt=room, tokens=settings.tokens, seed=settings.seed
        )
        for answer in found:
            if not log.has(answer.part, answer.task):
                log.add(answer)
    assert prompts is not None
    return list(
        make_tasks(
            prompts,
            vocabulary,
            max_prompt=room,
            tokens=settings.tokens,
            temperature=settings.temperature,
            seed=settings.seed,
        )
    )


def _check_enough(answers: Sequence[KeptAnswer], held: Sequence[KeptAnswer]) -> None:
    if len(answers) < MIN_TRAINED or len(held) < MIN_JUDGED:
        raise InputError(
            f"there are {len(answers)} answers to train on and {len(held)} to judge by that neither loop nor end at "
            f"once, and {MIN_TRAINED} and {MIN_JUDGED} are the least: give more time (--time), other prompts, or a "
            "higher --temp"
        )


def _reading_options(settings: Settings) -> ModelOptions:
    length = context_length(settings.target, settings.tokens)
    return dataclasses.replace(settings.target, context_length=length, rows_read=MAX_CHUNK)


def _write_rows(
    settings: Settings,
    work: WorkFolder,
    answers: Sequence[KeptAnswer],
    unshared_ids: Sequence[int],
    stopped: Stop,
    tell: Tell,
) -> None:
    folder = work.path / "rows"
    folder.mkdir(exist_ok=True)
    target = open_engine(_reading_options(settings))
    try:
        num_bytes = row_bytes(target.vocabulary.size) * sum(len(each.token_ids) for each in answers)
        check_room(folder, max(num_bytes - _folder_bytes(folder), 0), way_out="give OUT on another disk")
        write_rows(
            target,
            answers,
            folder,
            unshared_ids,
            in_time=lambda: work.has_time(ROWS_UNTIL),
            stopped=stopped,
            report=lambda count: _note(work, tell, f"reading what the target would say: {count} of {len(answers)}"),
        )
    finally:
        target.close()


def _train(
    settings: Settings, work: WorkFolder, answers: Sequence[KeptAnswer], stopped: Stop, tell: Tell
) -> tuple[Path, Training]:
    """Return what was made, and how it was trained; made before if it is there and there is no more time than then."""
    from paceline.lab.distil.training import Training, train_draft

    made = work.path / ("draft.gguf" if is_gguf(settings.made) else "draft")
    trained = work.path / "trained"
    before = work.facts.get("training")
    if before is not None and (before["ended_by"] == "epochs" or work.facts["trained_for_s"] >= work.total_s):
        training = Training(**before)
    else:
        with open_vocabulary(settings.target) as vocabulary:
            rows = load_rows(answers, work.path / "rows", vocabulary.size)
        if len(rows) < MIN_TRAINED:
            raise InputError(
                f"there was time for the target's distributions of {len(rows)} answers, and {MIN_TRAINED} are the "
                "least to train on: give more time (--time)"
            )

        def convert(doing: str, done: int, total: int) -> None:
            tell(doing)

        source = make_folder(Path(settings.draft.path), work.path / "untrained", convert)
        began_s = work.facts.setdefault("training_began_s", round(work.spent_s, 1))
        work.keep()
        until_s = max(TRAINING_UNTIL * work.total_s, began_s + 1.0)

        def step(number: int, count: int, loss: float) -> None:
            _note(work, tell, f"training: step {number} of up to {count}, loss {loss:.3f}")

        training = train_draft(
            source,
            work.path / "checkpoints",
            trained,
            answers,
            rows,
            dtype="F32" if is_gguf(settings.made) else settings.file_type,
            learning_rate=settings.learning_rate,
            epochs=settings.epochs,
            lora=settings.lora,
            seed=settings.seed,
            threads=settings.target.threads,
            done_share=lambda: (work.spent_s - began_s) / (until_s - began_s),
            stopped=stopped,
            report=step,
        )
        if made.exists():
            shutil.rmtree(made, ignore_errors=True) if made.is_dir() else made.unlink()
        work.facts["training"] = dataclasses.asdict(training)
        work.facts["trained_for_s"] = work.total_s
        work.keep()
    if not made.exists():
        name = settings.made.name.removesuffix(".gguf")
        write_made(trained, made, settings.file_type, name, lambda doing, done, total: tell(doing))
    return made, training


def _note(work: WorkFolder, tell: Tell, doing: str) -> None:
    work.keep(often=True)
    tell(doing)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
