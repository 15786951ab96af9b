"""llama-server's own completions."""

from __future__ import annotations

from typing import Any

from paceline.chat.assembler import TokenEvent
from paceline.serving.answering import Choice, Ended, Event, Progress, Round
from paceline.serving.json_output import Listed
from paceline.serving.props import biases_as_json, generation_settings
from paceline.serving.response_formats.base import ResponseFormatter


class NativeFormatter(ResponseFormatter):
    """llama-server's ``/completion``."""

    def whole(self) -> Any:
        """Return the answer; a list where there are several."""
        found = [self._chosen(self.finished(choice)) for choice in self.answer.choices]
        return found[0] if len(found) == 1 else found

    def chunks(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        if isinstance(event, Ended):
            return [self._chosen(self.finished(choice, in_stream=True))]
        if self.request.reads_only and not isinstance(event, Progress):
            return []
        tokens = event if isinstance(event, TokenEvent) else None
        chunk: dict[str, Any] = {
            "index": choice.number,
            "content": "" if tokens is None else tokens.text,
            "tokens": [] if tokens is None else list(tokens.token_ids),
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": num_said(choice, event),
            "tokens_evaluated": choice.num_prompt,
        }
        if self.request.timings_per_token:
            chunk["timings"] = self.running_timings(choice, event)
        if isinstance(event, Progress):
            chunk["prompt_progress"] = self.progress(choice, event)
        elif isinstance(event, Round):
            chunk["round"] = self.round(event)
        if tokens is not None and tokens.sources:
            chunk["sources"] = list(tokens.sources)
        if tokens is not None and tokens.logprobs:
            chunk["completion_probabilities"] = self.probabilities(tokens.logprobs)
        return [chunk]

    def finished(self, choice: Choice, *, in_stream: bool = False) -> dict[str, Any]:
        """Return a finished answer; the text of one that was streamed was sent before."""
        request, said = self.request, choice.assembler
        shows_text = not in_stream and not request.reads_only
        found: dict[str, Any] = {
            "index": choice.number,
            "content": said.written if shows_text else "",
            "tokens": Listed(said.token_ids, list) if shows_text and request.return_tokens else [],
            "id_slot": choice.slot,
            "stop": True,
            "model": self.answer.served.id,
            "tokens_predicted": self.num_output(choice),
            "tokens_evaluated": choice.num_prompt,
            "generation_settings": generation_settings(
                choice.stream.params, choice.stream.rules, request, self.answer.served
            )
            | {"logit_bias": Listed([*choice.stream.params.logit_bias.items()], biases_as_json)},
            "prompt": choice.prompt.text,
            "has_new_line": choice.has_new_line,
            "truncated": choice.truncated,
            "stop_type": choice.stop_type,
            "stopping_word": choice.stopping_word,
            "tokens_cached": choice.num_prompt + said.num_tokens - 1,
            **self.beside(choice),
        }
        if shows_text and request.num_logprobs is not None:
            found["completion_probabilities"] = self.probabilities(said.logprobs)
        if request.num_prompt_logprobs is not None:
            found["prompt_logprobs"] = self.prompt_probabilities(choice)
        return found

    def _chosen(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Return those fields that were asked for; ``a/b`` is ``b`` of ``a``, under that name."""
        if not self.request.response_fields:
            return answer
        found: dict[str, Any] = {}
        for path in self.request.response_fields:
            value: Any = answer
            for name in path.split("/"):
                if not isinstance(value, dict) or name not in value:
                    break
                value = value[name]
            else:
                found[path] = value
        return found


def num_said(choice: Choice, event: Event) -> int:
    """Return how many tokens of the answer were said with an event, or before it."""
    if isinstance(event, TokenEvent):
        return event.num_tokens
    if isinstance(event, Progress):
        return 0
    return choice.assembler.num_tokens - (len(event.emission.token_ids) if isinstance(event, Round) else 0)
