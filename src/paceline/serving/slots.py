"""Places of answers that run, as llama-server's ``/slots`` has them.

The engine knows no places. A choice gets the lowest free one when it starts, and leaves what it did there to be seen:
the figures alone, as the answer itself may be long.
"""

from __future__ import annotations

from typing import Any

from paceline.serving.answering import Answer, Choice
from paceline.serving.hosting import ServedModel
from paceline.serving.request_settings import short_settings_of


class SlotBoard:
    """The places of a server, and all answers under way, those that wait among them.

    Args:
        served: the model.
    """

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._latest: list[tuple[int, Answer, Choice] | None] = [None] * served.max_running
        # Of places whose latest answer is over: whose it was, and what is known of it.
        self._past: list[tuple[str, dict[str, Any]] | None] = [None] * served.max_running
        self._answers: dict[str, Answer] = {}
        self._tasks = 0

    @property
    def answers(self) -> list[Answer]:
        """All answers under way."""
        return list(self._answers.values())

    def answer(self, answer_id: str, client: str) -> Answer | None:
        """Return the answer of a client that is under way and has this id."""
        answer = self._answers.get(answer_id)
        return answer if answer is not None and answer.client == client else None

    def add(self, answer: Answer) -> None:
        """Take note of an answer that was taken."""
        self._answers[answer.id] = answer

    def started(self, answer: Answer, choice: Choice) -> None:
        """Give a choice that has started, and has no place yet, one that is free."""
        free = next((number for number in range(len(self._latest)) if not self._is_busy(number)), None)
        if free is not None:
            self._tasks += 1
            choice.slot = free
            self._latest[free] = (self._tasks, answer, choice)

    def remove(self, answer: Answer) -> None:
        """Take note of an answer that is over."""
        self._answers.pop(answer.id, None)
        for number, latest in enumerate(self._latest):
            if latest is not None and latest[1] is answer:
                self._past[number] = (answer.client, self._facts(number))
                self._latest[number] = None

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

    def _is_busy(self, number: int) -> bool:
        latest = self._latest[number]
        return latest is not None and not latest[2].stream.is_over

    def _facts(self, number: int) -> dict[str, Any]:
        served, busy = self._served, self._is_busy(number)
        facts: dict[str, Any] = {
            "id": number,
            "n_ctx": served.context_length,
            "speculative": bool(served.drafters),
            "is_processing": busy,
        }
        latest = self._latest[number]
        if latest is None:
            past = self._past[number]
            return facts if past is None else past[1].copy()
        task, answer, choice = latest
        request = choice.stream.request
        # What is not streamed is looked at by several rounds at once, and the engine is ahead.
        said = choice.num_said if request is None else request.num_output
        rules = choice.stream.rules
        left = -1 if not busy else max(rules.max_tokens - said, 0)
        return {
            **facts,
            "id_task": task,
            "n_prompt_tokens": choice.num_prompt + said,
            "n_prompt_tokens_processed": 0 if request is None else request.stats.prompt_tokens,
            "n_prompt_tokens_cache": choice.cached,
            "params": short_settings_of(choice.stream.params, rules, answer.request, served),
            "next_token": [
                {
                    "has_next_token": busy,
                    "has_new_line": choice.has_new_line,
                    "n_remain": left,
                    "n_decoded": said if busy else 0,
                }
            ],
        }
