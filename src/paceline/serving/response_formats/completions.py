"""OpenAI's completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.chat.assembler import TokenEvent
from paceline.core.logprobs import TokenLogprob
from paceline.serving.answering import Answer, Choice, Event, Progress
from paceline.serving.json_output import Listed
from paceline.serving.prompts import token_piece
from paceline.serving.response_formats.base import LOWEST, name_by_id
from paceline.serving.response_formats.openai import OpenAiFormatter


class CompletionFormatter(OpenAiFormatter):
    """OpenAI's completions. Log-probabilities come in both of the forms that clients read."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._offsets = [_Offsets() for _ in answer.choices]

    def choice(self, choice: Choice) -> dict[str, Any]:
        prompt = choice.prompt.text if self.request.echo else ""
        found = {
            "index": choice.number,
            "text": prompt + choice.assembler.written,
            "logprobs": self._logprobs(choice, choice.assembler.logprobs, self._echoed(choice)),
            "finish_reason": self.finish_reason(choice),
        }
        if self.request.num_prompt_logprobs is not None:
            found["prompt_logprobs"] = self.prompt_probabilities(choice)
        if self.request.return_token_ids:
            found |= {"prompt_token_ids": list(choice.prompt.token_ids), "token_ids": self.token_ids(choice)}
        return found

    def num_echoed(self, choice: Choice, events: Sequence[Event]) -> int:
        is_first = self.request.echoes_logprobs and any(self._opens(choice, event) for event in events)
        return choice.num_listed_prompt if is_first else 0

    def nothing(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, "")

    def before(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        """Return the prompt, where it is asked for."""
        if not self._opens(choice, event):
            return []
        self._opened.add(choice.number)
        echoed = choice.prompt.text if self.request.echo else ""
        first = self._delta(choice, echoed, self._logprobs(choice, (), self._echoed(choice)))
        if self.request.return_token_ids:
            first |= {"prompt_token_ids": list(choice.prompt.token_ids), "token_ids": []}
        return [self.chunk(first)]

    def _opens(self, choice: Choice, event: Event) -> bool:
        """Whether the prompt stands before an event: where it has log-probabilities, once all of it is read."""
        if not (self.request.echo or self.request.return_token_ids) or choice.number in self._opened:
            return False
        return not (self.request.echoes_logprobs and isinstance(event, Progress))

    def token_chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        chunk = self.chunk(self._delta(choice, event.text, self._logprobs(choice, event.logprobs)))
        self.add_beside(chunk, choice, event)
        if self.request.verbose:
            (chunk["__verbose"],) = self.native.chunks(choice, event)
        return [chunk]

    def end_fields(self, choice: Choice) -> dict[str, Any]:
        found = self.beside(choice)
        if self.request.verbose:
            found["__verbose"] = self.native.finished(choice, in_stream=True)
        return found

    def _delta(self, choice: Choice, text: str, logprobs: Any = None) -> dict[str, Any]:
        return {"index": choice.number, "text": text, "logprobs": logprobs, "finish_reason": None}

    def _echoed(self, choice: Choice) -> list[_Spelled]:
        """Return the tokens of a prompt that stands before the answer with its log-probabilities."""
        if not self.request.echoes_logprobs:
            return []
        # Of a prompt that was given up while it was read the rest is left out.
        known = zip(choice.prompt.token_ids, (None, *choice.prompt_logprobs), strict=False)
        return [_Spelled(token_id, token_piece(token_id, self.vocabulary), logprob) for token_id, logprob in known]

    def _logprobs(
        self, choice: Choice, logprobs: Sequence[TokenLogprob], echoed: Sequence[_Spelled] = ()
    ) -> dict[str, Any] | None:
        if self.request.reads_only:
            logprobs = ()
        if self.request.num_logprobs is None or not (logprobs or echoed):
            return None
        # Control tokens add nothing to the text of an answer, which the tokens are to spell.
        said = [_Spelled(each.token_id, self.vocabulary.token_bytes(each.token_id), each) for each in logprobs]
        listed, offsets = [*echoed, *said], self._offsets[choice.number]
        begins = [offsets.next(each.piece) for each in echoed]
        if echoed:
            offsets.end()
        return {
            "tokens": [self._name(each.token_id, each.piece) for each in listed],
            "token_logprobs": [None if each.logprob is None else max(each.logprob.logprob, LOWEST) for each in listed],
            "top_logprobs": Listed(listed, lambda some: [*map(self._top, some)], 1 + self.request.num_logprobs),
            "text_offset": begins + [offsets.next(each.piece) for each in said],
            "content": self.probabilities(logprobs),
        }

    def _top(self, spelled: _Spelled) -> dict[str, float] | None:
        """Return the likeliest tokens by text, and as in OpenAI's API the sampled one under the text that it has."""
        logprob = spelled.logprob
        if logprob is None:
            return None
        found: dict[str, float] = {}
        for token_id, value in logprob.top[: self.request.num_logprobs]:
            if token_id != logprob.token_id:
                # Of tokens with one text the likelier counts.
                found.setdefault(self._name(token_id, token_piece(token_id, self.vocabulary)), max(value, LOWEST))
        found[self._name(logprob.token_id, spelled.piece)] = max(logprob.logprob, LOWEST)
        return found

    def _name(self, token_id: int, piece: bytes) -> str:
        return name_by_id(token_id) if self.request.names_ids else _token_name(piece)


class _Spelled(NamedTuple):
    """A token, its bytes in the text, and how likely it was, which is not known of the first one of a prompt."""

    token_id: int
    piece: bytes
    logprob: TokenLogprob | None


class _Offsets:
    """Counts the characters before each token of a text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0

    def next(self, piece: bytes) -> int:
        """Return where a token begins; one that goes on with a character begins where that does."""
        begin, unfinished = self._count, self._decoder.getstate()[0]
        if unfinished and len((unfinished + piece[:1]).decode("utf-8", "replace")) > 1:
            # Those bytes are no character, which is known now and stands for itself.
            begin += 1
        self._count += len(self._decoder.decode(piece))
        return begin

    def end(self) -> None:
        """Have what follows be a text of its own: no character goes on in it."""
        self._count += len(self._decoder.decode(b"", True))
        self._decoder.reset()


def _token_name(piece: bytes) -> str:
    """Return the text of a token, or as OpenAI does the bytes of one that is a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
