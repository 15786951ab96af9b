"""OpenAI's completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from paceline.chat.assembler import TokenEvent
from paceline.core.logprobs import TokenLogprob
from paceline.serving.answering import Answer, Choice, Event
from paceline.serving.json_output import Listed
from paceline.serving.prompts import token_piece
from paceline.serving.response_formats.base import LOWEST
from paceline.serving.response_formats.openai import OpenAiFormatter


class CompletionFormatter(OpenAiFormatter):
    """OpenAI's completions. Log-probabilities come in both of the forms that clients read."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._offsets = [_Offsets() for _ in answer.choices]

    def choice(self, choice: Choice) -> dict[str, Any]:
        prompt = choice.prompt.text if self.request.echo else ""
        return {
            "index": choice.number,
            "text": prompt + choice.assembler.written,
            "logprobs": self._logprobs(choice, choice.assembler.logprobs),
            "finish_reason": self.finish_reason(choice),
        }

    def nothing(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice, "")

    def chunks(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        """Before all that an answer says stands the prompt, where it is asked for."""
        found = super().chunks(choice, event)
        if self.request.echo and choice.number not in self._opened:
            self._opened.add(choice.number)
            found.insert(0, self.chunk(self._delta(choice, choice.prompt.text)))
        return found

    def token_chunks(self, choice: Choice, event: TokenEvent) -> list[dict[str, Any]]:
        chunk = self.chunk(self._delta(choice, event.text, self._logprobs(choice, event.logprobs)))
        if event.sources:
            chunk["sources"] = list(event.sources)
        if self.request.timings_per_token:
            chunk["timings"] = self.running_timings(choice)
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

    def _logprobs(self, choice: Choice, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.request.num_logprobs is None or self.request.reads_only or not logprobs:
            return None
        # Control tokens add nothing to the text, which the tokens are to spell.
        spelled = [self.vocabulary.token_bytes(each.token_id) for each in logprobs]
        return {
            "tokens": [_token_name(piece) for piece in spelled],
            "token_logprobs": [max(each.logprob, LOWEST) for each in logprobs],
            "top_logprobs": Listed(
                [*zip(logprobs, spelled, strict=True)],
                lambda some: [self._top(each, piece) for each, piece in some],
                1 + self.request.num_logprobs,
            ),
            "text_offset": [self._offsets[choice.number].next(piece) for piece in spelled],
            "content": self.probabilities(logprobs),
        }

    def _top(self, logprob: TokenLogprob, spelled: bytes) -> dict[str, float]:
        """Return the likeliest tokens by text, and as in OpenAI's API the sampled one under the text that it has."""
        found: dict[str, float] = {}
        for token_id, value in logprob.top:
            if token_id != logprob.token_id:
                # Of tokens with one text the likelier counts.
                found.setdefault(_token_name(token_piece(token_id, self.vocabulary)), max(value, LOWEST))
        found[_token_name(spelled)] = max(logprob.logprob, LOWEST)
        return found


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


def _token_name(piece: bytes) -> str:
    """Return the text of a token, or as OpenAI does the bytes of one that is a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
