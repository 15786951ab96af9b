"""The places of answers, which llama-server calls slots, and their files.

The engine knows no places. A choice gets the lowest free one when it starts, and leaves what it did there to be seen:
the figures alone, as the answer itself may be long.

A file has what the cache keeps of a place's latest prompt and answer. What is restored goes back to the cache, under
the key that restored it: the next prompt that begins alike starts there, in whatever place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
from starlette.types import Scope

from paceline.core.errors import CapabilityError
from paceline.core.numbers import shown
from paceline.engines.base import Engine, SavedSequence
from paceline.engines.sequence_files import SequenceFile, no_such_file, read_owner, read_sequence
from paceline.serving.answering import Answer, Choice
from paceline.serving.errors import FieldError, NotOfferedError, RefusedError
from paceline.serving.model_host import ServedModel
from paceline.serving.props import short_generation_settings
from paceline.serving.security import get_namespace, is_owner, mark_owner

_MAX_NAME: Final = 200
"""Bytes of a file's name: what is written first has a longer one, and 255 are the most that file systems take."""


@dataclass(frozen=True, slots=True)
class SlotText:
    """What was last read and said in a place.

    Attributes:
        client: whose answer it was.
        namespace: whose texts these are.
        token_ids: of prompt and answer.
    """

    client: str
    namespace: str
    token_ids: Sequence[int]


class SlotBoard:
    """The places of a server, and all answers under way, those that wait among them."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._latest: list[tuple[int, Answer, Choice] | None] = [None] * served.max_running
        # Of places whose latest answer is over: whose it was, and what is known of it.
        self._past: list[tuple[str, dict[str, Any]] | None] = [None] * served.max_running
        self._texts: list[SlotText | None] = [None] * served.max_running
        self._answers: dict[str, Answer] = {}
        self._tasks = 0

    @property
    def answers(self) -> list[Answer]:
        """Those under way."""
        return list(self._answers.values())

    def answer(self, answer_id: str, client: str) -> Answer | None:
        """Return the answer of a client that is under way and has this id."""
        answer = self._answers.get(answer_id)
        return answer if answer is not None and answer.client == client else None

    def add(self, answer: Answer) -> None:
        self._answers[answer.id] = answer

    def started(self, answer: Answer, choice: Choice) -> None:
        """Give a choice that has started, and has no place yet, one that is free: the one asked for, if it is."""
        numbers = [number for number in range(len(self._latest)) if not self._is_busy(number)]
        asked = answer.request.slot
        free = asked if asked in numbers else next(iter(numbers), None)
        if free is not None:
            self._tasks += 1
            choice.slot = free
            self._latest[free] = (self._tasks, answer, choice)
        elif choice.stream.is_over:
            # It ended before anybody looked, and those that started after it have all places by now.
            choice.slot = 0

    def remove(self, answer: Answer) -> None:
        """Take note of an answer that is over."""
        self._answers.pop(answer.id, None)
        for number, latest in enumerate(self._latest):
            if latest is not None and latest[1] is answer:
                self._past[number] = (answer.client, self._facts(number))
                self._latest[number] = None
                request = latest[2].stream.request
                token_ids = latest[2].prompt.token_ids if request is None else request.token_ids
                self._texts[number] = SlotText(answer.client, answer.namespace, token_ids)

    def text(self, number: int, client: str) -> SlotText:
        """Return the latest text of a place, which is no longer written."""
        if not 0 <= number < len(self._latest):
            raise RefusedError(
                400, "invalid_request_error", f"there is no slot {number}: they are 0 to {len(self._latest) - 1}"
            )
        if self._is_busy(number):
            raise RefusedError(503, "unavailable_error", f"slot {number} is answering: ask again when it is done")
        text = self._texts[number]
        # Others are not told that there is one.
        return text if text is not None and text.client == client else SlotText(client, client, ())

    def set_text(self, number: int, text: SlotText | None) -> None:
        """Say what a place holds that gave no answer."""
        self._texts[number] = text

    @property
    def num_busy(self) -> int:
        """Places in use."""
        return sum(self._is_busy(number) for number in range(len(self._latest)))

    def facts(self, client: str) -> list[dict[str, Any]]:
        """Return what a client may know of each place: of answers to others how much they say, not what they ask."""
        found = []
        for number, (latest, past) in enumerate(zip(self._latest, self._past, strict=True)):
            facts = self._facts(number)
            owner = latest[1].client if latest is not None else past[0] if past is not None else client
            if owner != client:
                del facts["params"]
            found.append(facts)
        return found

    def idle_facts(self) -> list[dict[str, Any]]:
        """Return what there is to know of places of which nobody remembers an answer."""
        return [self._empty_facts(number) for number in range(len(self._latest))]

    def _empty_facts(self, number: int) -> dict[str, Any]:
        served = self._served
        return {
            "id": number,
            "n_ctx": served.context_length,
            "speculative": bool(served.drafters),
            "is_processing": False,
        }

    def _is_busy(self, number: int) -> bool:
        latest = self._latest[number]
        return latest is not None and not latest[2].stream.is_over

    def _facts(self, number: int) -> dict[str, Any]:
        served, busy = self._served, self._is_busy(number)
        facts = {**self._empty_facts(number), "is_processing": busy}
        latest = self._latest[number]
        if latest is None:
            past = self._past[number]
            return facts if past is None else past[1].copy()
        task, answer, choice = latest
        request = choice.stream.request
        # What is not streamed is looked at by several rounds at once, and the engine is ahead.
        said = choice.assembler.num_tokens if request is None else request.num_output
        rules = choice.stream.rules
        left = -1 if not busy else max(rules.max_tokens - said, 0)
        return {
            **facts,
            "id_task": task,
            "n_prompt_tokens": choice.num_prompt + said,
            "n_prompt_tokens_processed": 0 if request is None else request.stats.prompt_tokens,
            "n_prompt_tokens_cache": choice.cached,
            "params": short_generation_settings(choice.stream.params, rules, answer.request, served),
            "next_token": [
                {
                    "has_next_token": busy,
                    "has_new_line": choice.has_new_line,
                    "n_remain": left,
                    "n_decoded": said if busy else 0,
                }
            ],
        }


class _WritingEngine(Engine, Protocol):
    """An engine whose saved sequences another process can restore."""

    @property
    def made_by(self) -> Mapping[str, Any]: ...

    def export_state(self, saved: SavedSequence) -> npt.NDArray[np.uint8]: ...

    def import_state(self, data: npt.NDArray[np.uint8], length: int, floor: int) -> SavedSequence: ...


def slot_path(folder: str | None, filename: str) -> Path:
    """Return where a file of this name lies; refuses names of anything but a file in the folder."""
    if folder is None:
        raise NotOfferedError("this server stores no slot files: start it with `slot_save_path`")
    is_plain = filename == Path(filename).name and "\\" not in filename and filename.isprintable()
    if not is_plain or filename.startswith(".") or not 0 < len(filename.encode("utf-8", "replace")) <= _MAX_NAME:
        raise FieldError(
            "filename",
            f"filename {shown(filename)} is not a name for a slot file: give one without a path, of 1 to {_MAX_NAME} "
            "bytes, that does not begin with a dot",
        )
    return Path(folder) / filename


def save_slot(served: ServedModel, text: SlotText, path: Path, scope: Scope) -> dict[str, Any]:
    """Write what the cache keeps of a place's text; return what llama-server says of it."""
    engine, started_s = _writing_engine(served), time.perf_counter()
    mark = read_owner(path)
    if (mark is not None and not is_owner(scope, mark)) or (mark is None and path.exists()):
        raise RefusedError(403, "permission_error", f"{path.name} is another one's, or no slot file: give another name")
    pool = served.model.pool
    copied = served.model.worker.call(lambda: pool.copy_of(text.token_ids, namespace=text.namespace))
    if copied is None:
        raise RefusedError(
            400,
            "invalid_request_error",
            "the cache keeps nothing of this slot that could be saved: ask in it first, and save at once; of fewer "
            f"than {pool.least_reuse} tokens, and without prompt cache (`prompt_cache_mib` 0, or `exact`), nothing is "
            "kept",
        )
    token_ids, saved = copied
    state = engine.export_state(saved)
    written = SequenceFile(engine.made_by, mark_owner(scope), token_ids, saved.floor, state).write(path)
    return {"n_saved": len(token_ids), "n_written": written, "timings": {"save_ms": _ms_since(started_s)}}


def restore_slot(served: ServedModel, path: Path, scope: Scope) -> tuple[dict[str, Any], SlotText]:
    """Give a file's text to the cache; return what llama-server says of it, and the text."""
    engine, started_s = _writing_engine(served), time.perf_counter()
    mark = read_owner(path)
    if mark is not None and not is_owner(scope, mark):
        # As where there is none.
        raise no_such_file(path)
    read = read_sequence(path, engine.made_by, engine.vocabulary.size)
    length, context_length = len(read.token_ids), served.context_length
    if length > context_length:
        raise CapabilityError(f"{path.name} holds {length} tokens, and the context {context_length}: it cannot be used")
    namespace = get_namespace(scope)
    saved = engine.import_state(read.state, length, read.floor)
    pool, token_ids = served.model.pool, read.token_ids.tolist()
    if not served.model.worker.call(lambda: pool.adopt(token_ids, saved, namespace=namespace)):
        raise CapabilityError(
            f"{path.name} takes {saved.num_bytes >> 20} MiB, which is more than the prompt cache holds: start the "
            "server with a larger `prompt_cache_mib`"
        )
    told = {"n_restored": length, "n_read": path.stat().st_size, "timings": {"restore_ms": _ms_since(started_s)}}
    return told, SlotText(namespace, namespace, token_ids)


def erase_slot(served: ServedModel, text: SlotText) -> dict[str, Any]:
    """Have the cache forget a place's text; return what llama-server says of it."""
    pool = served.model.pool
    return {"n_erased": served.model.worker.call(lambda: pool.forget(text.token_ids, namespace=text.namespace))}


def _writing_engine(served: ServedModel) -> _WritingEngine:
    engine = served.model.target
    if not _writes(engine):
        raise NotOfferedError("slot files are of llama.cpp's engine, and this model runs on another")
    return engine


def _writes(engine: Engine) -> TypeGuard[_WritingEngine]:
    return hasattr(engine, "export_state")


def _ms_since(started_s: float) -> float:
    return 1000 * (time.perf_counter() - started_s)
