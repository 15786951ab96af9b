"""What all formats have in common: they make chunks of events, and write those that differ in a text alone quickly."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any, ClassVar, Final

from paceline.chat.assembler import TokenEvent
from paceline.chat.reasoning import AnswerPart, PartKind
from paceline.core.logprobs import TokenLogprob
from paceline.core.params import SpeculationParams
from paceline.core.stats import OFF_REASONS, RequestStats
from paceline.core.text import TextSegment
from paceline.core.vocabulary import Vocabulary
from paceline.drafters.lookup import PREDICTION
from paceline.serving.answering import Answer, Choice, Event, Progress, Round
from paceline.serving.errors import status_and_body
from paceline.serving.json_output import PLACE, Listed, as_events
from paceline.serving.prompts import token_piece

LOWEST: Final = -3.4028234663852886e38
"""Number that stands for the logarithm of 0, which JSON has no word for; llama-server's is the same."""


class ResponseFormatter(ABC):
    """Writes one answer in the terms of one API.

    Attributes:
        id_prefix: how ids of answers begin.
        names_events: whether events of a stream have a name, which is their ``type``.
        repeats_answer: whether the end of a stream says the whole answer again.
        ends_with_done: whether a stream's last line is ``[DONE]``.
        ping: what is sent in a stream that was silent for long.
    """

    id_prefix: ClassVar = "chatcmpl-"
    names_events: ClassVar = False
    repeats_answer: ClassVar = False
    ends_with_done: ClassVar = False
    ping: ClassVar = b": \n\n"

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.request = answer.request
        self.vocabulary = answer.served.model.target.vocabulary
        self._begun: set[int] = set()
        # Of the next event, where events have numbers.
        self._number = 0
        # By choice and kind of text.
        self._frames: dict[tuple[int, PartKind], list[bytes] | None] = {}
        request = answer.request
        self._are_alike = not (
            request.reads_only
            or request.timings_per_token
            or request.verbose
            or request.continuous_usage
            or request.return_token_ids
        )

    @abstractmethod
    def whole(self) -> Any:
        """Return a finished answer."""

    @abstractmethod
    def chunks(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        """Return what a stream says of an event."""

    def num_echoed(self, choice: Choice, events: Sequence[Event]) -> int:
        """Return how many probabilities of the prompt are written with these events."""
        return 0

    def opening(self) -> list[dict[str, Any]]:
        """Return what a stream says before anything is known of its answer."""
        return []

    def failed(self, error: Exception) -> list[dict[str, Any]]:
        """Return what a stream ends with where an error ends it."""
        return [status_and_body(error)[1]]

    def as_events(self, chunks: Sequence[dict[str, Any]], *, in_pieces: bool = False) -> bytes:
        return as_events(chunks, named=self.names_events, in_pieces=in_pieces)

    def written(self, choice: Choice, events: Sequence[Event], *, in_pieces: bool = False) -> bytes:
        """Return :meth:`chunks` as server-sent events, to be sent at once.

        Nearly all chunks differ in the text of a token alone, or in its number too. What stands around these is written
        once. With ``in_pieces`` other threads run while long lists are written.
        """
        found = []
        for event in events:
            framed = self._framed(choice, event) if isinstance(event, TokenEvent) else None
            found.append(self.as_events(self.chunks(choice, event), in_pieces=in_pieces) if framed is None else framed)
        return b"".join(found)

    def _framed(self, choice: Choice, event: TokenEvent) -> bytes | None:
        """Return what :meth:`chunks` comes to of a token, or ``None`` where that may differ in something else."""
        if choice.number not in self._begun:
            # Something may come before the first.
            self._begun.add(choice.number)
            return None
        texts = self._texts(event) if self._are_alike and not (event.logprobs or event.sources) else None
        if texts is None:
            return None
        found: list[bytes] = []
        try:
            for kind, text in texts:
                frame = self._frame(choice, kind)
                if frame is None:
                    return None
                written = encode_basestring(text).encode()
                if len(frame) == 3:
                    # Of an event with a number.
                    found += (frame[0], b"%d" % self._number, frame[1], written, frame[2])
                    self._number += 1
                    continue
                found += (frame[0], written, frame[1])
                if len(frame) > 2:
                    token_ids = ",".join(map(str, event.token_ids))
                    found += (token_ids.encode(), frame[2], b"%d" % event.num_tokens, frame[3])
        except UnicodeEncodeError:
            # All of that chunk is escaped.
            return None
        return b"".join(found)

    def _texts(self, event: TokenEvent) -> list[tuple[PartKind, str]] | None:
        """Return the texts that become a chunk each; ``None`` where chunks have anything else."""
        return [("content", event.text)]

    def _frame(self, choice: Choice, kind: PartKind) -> list[bytes] | None:
        """Return what a chunk has around its text, and around a number before it or ids and number of its tokens."""
        key = choice.number, kind
        if key not in self._frames:
            place: Any = PLACE
            event = TokenEvent([AnswerPart(kind, TextSegment(place, ""))], [place], (), place)
            chunk = self.as_events(self.chunks(choice, event))
            # In a name that UTF-8 cannot write: all is escaped then.
            is_escaped = b"\\ud" in chunk
            self._frames[key] = None if is_escaped else chunk.split(f'"{PLACE}"'.encode())
        return self._frames[key]

    def running_timings(self, choice: Choice, event: Event | None = None) -> dict[str, Any]:
        """Return the times of an answer so far, to go with an event.

        The first event of a prompt comes before anything of it is read, however far the engine is when that is told.
        """
        request = choice.stream.request
        assert request is not None
        if isinstance(event, Progress) and event.is_first:
            return timings_of(RequestStats(cached_tokens=request.stats.cached_tokens))
        return timings_of(request.stats)

    def times(self, choice: Choice) -> dict[str, Any]:
        """Return what an answer took, and what speculation gave."""
        stats = choice.stats
        assert stats is not None
        timings = timings_of(stats)
        if self.request.reads_only:
            timings["predicted_n"] = 0
        return {
            "timings": timings,
            "speculative": speculation_of(stats, choice.stream.speculation, self.answer.served.policy),
            "metrics": metrics_of(stats),
        }

    def beside(self, choice: Choice) -> dict[str, Any]:
        """Return what stands beside the answer in its last or only part."""
        found = self.times(choice)
        if self.request.warnings:
            found["warnings"] = list(self.request.warnings)
        return found

    def probabilities(self, logprobs: Sequence[TokenLogprob]) -> Listed:
        write = functools.partial(
            list_probabilities,
            vocabulary=self.vocabulary,
            post_sampling=self.request.post_sampling,
            names_ids=self.request.names_ids,
        )
        return Listed(logprobs, write, 1 + (self.request.num_logprobs or 0))

    def prompt_probabilities(self, choice: Choice) -> Listed:
        """Return how likely the tokens of a prompt were, as vLLM has it; of the first nothing is known."""

        def write(some: Sequence[TokenLogprob | None]) -> list[Any]:
            return [None if each is None else _by_id(each, most, self.vocabulary) for each in some]

        most = self.request.num_prompt_logprobs or 0
        return Listed([None, *choice.prompt_logprobs], write, 1 + most)

    def num_output(self, choice: Choice) -> int:
        """Return how many tokens an answer has so far."""
        return 0 if self.request.reads_only else choice.assembler.num_tokens

    def output_details(self, name: str) -> dict[str, int]:
        """Return what kinds of tokens the answers have: of reasoning, called by this name, and of a prediction."""
        choices = self.answer.choices
        found = {name: sum(choice.assembler.num_reasoning for choice in choices)}
        stats = [choice.stats for choice in choices if choice.stats is not None]
        if self.request.options.speculation.prediction and stats:
            accepted = sum(each.accepted_by_source[PREDICTION] for each in stats)
            drafted = sum(each.drafted_by_source[PREDICTION] for each in stats)
            found |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        return found

    def progress(self, choice: Choice, event: Progress) -> dict[str, Any]:
        return {
            "total": choice.num_prompt,
            "cache": choice.cached,
            "processed": event.processed,
            "time_ms": int(event.time_ms),
        }

    def round(self, event: Round) -> dict[str, Any]:
        """Return what a round drafted and what it added."""
        emission = event.emission
        drafts, stats = emission.drafts, emission.request.stats
        found: dict[str, Any] = {"sources": list(emission.sources), "drafts": []}
        if drafts is not None:
            accepted = set(drafts.accepted)
            found["drafts"] = [
                {
                    "id": drafts.token_ids[node],
                    "text": token_piece(drafts.token_ids[node], self.vocabulary).decode("utf-8", "replace"),
                    # Node 0 is no draft, so the drafts count from 0 and those at the top are below none of them.
                    "parent": drafts.parents[node] - 1,
                    "source": drafts.sources[node],
                    "accepted": node in accepted,
                }
                for node in range(1, len(drafts.token_ids))
            ]
        # So far; the engine may be ahead of what is told here.
        return {**found, "gain": stats.gain, "gain_low": stats.gain_low, "gain_high": stats.gain_high}


def list_probabilities(
    logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary, *, post_sampling: bool, names_ids: bool = False
) -> list[dict[str, Any]]:
    """Return how likely tokens were, as OpenAI's chats and llama-server have it.

    With ``post_sampling`` these are probabilities of what was sampled from, in place of logarithms.
    """

    def probability(token_id: int, logprob: float) -> dict[str, Any]:
        spelling = vocabulary.token_bytes(token_id)
        value = math.exp(logprob) if post_sampling else max(logprob, LOWEST)
        return {
            "id": token_id,
            "token": name_by_id(token_id) if names_ids else spelling.decode("utf-8", "replace"),
            "bytes": list(spelling),
            "prob" if post_sampling else "logprob": value,
        }

    found = []
    for each in logprobs:
        entry = probability(each.token_id, each.logprob)
        entry["top_probs" if post_sampling else "top_logprobs"] = [probability(*other) for other in each.top]
        found.append(entry)
    return found


def name_by_id(token_id: int) -> str:
    """Return what vLLM calls a token that is to be known by its id."""
    return f"token_id:{token_id}"


def _by_id(logprob: TokenLogprob, most: int, vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    """Return a token and at most so many of the likeliest, as vLLM has them. Only these have a rank."""
    ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(logprob.top[:most], 1)}
    own = {logprob.token_id: ranked.get(logprob.token_id, (logprob.logprob, None))}
    return {
        str(token_id): {
            "logprob": max(value, LOWEST),
            "rank": rank,
            "decoded_token": token_piece(token_id, vocabulary).decode("utf-8", "replace"),
        }
        for token_id, (value, rank) in (own | ranked).items()
    }


# What answers say of their time: the figures are those of ``RequestStats``, and the tables say what each is called.

_TIMINGS: Final = {
    "cache_n": "cached_tokens",
    "prompt_n": "prompt_tokens",
    "prompt_ms": "prompt_s",
    "prompt_per_token_ms": "prompt_per_token_s",
    "prompt_per_second": "prompt_per_second",
    "predicted_n": "predicted_tokens",
    "predicted_ms": "decode_s",
    "predicted_per_token_ms": "predicted_per_token_s",
    "predicted_per_second": "predicted_per_second",
}
_DRAFTS: Final = {"draft_n": "num_drafted", "draft_n_accepted": "num_accepted"}


def timings_of(stats: RequestStats) -> dict[str, Any]:
    """Return llama-server's ``timings``, field for field.

    The first token comes with the prompt, so speeds are over the tokens after it.
    """
    known = {name: 0.0 if value is None else value for name, value in stats.to_dict(_TIMINGS).items()}
    return known | stats.to_dict(_DRAFTS) if stats.num_drafted else known


_SPECULATION: Final = {
    "drafted": "num_drafted",
    "accepted": "num_accepted",
    "rounds": "rounds",
    "tau": "acceptance_length",
    "acceptance_by_depth": "acceptance_by_depth",
    "queue_ms": "queue_s",
    "draft_ms": "phases.draft_s",
    "verify_ms": "phases.verify_s",
    "sampling_ms": "phases.sampling_s",
    "rest_ms": "phases.rest_s",
    "gain": "gain",
    "gain_low": "gain_low",
    "gain_high": "gain_high",
    "off_rounds": "off_rounds",
    "off_reason": "off_reason",
}


def speculation_of(stats: RequestStats, asked: SpeculationParams, policy: str) -> dict[str, Any]:
    """Return what speculation cost and gave in a finished answer; the policy decides where the request does not say."""
    return {
        "policy": (asked.policy or policy) if asked.speculate else "plain",
        "verify": asked.verify,
        "drafters": {
            name: {
                "drafted": stats.drafted_by_source[name],
                "accepted": stats.accepted_by_source[name],
                "draft_ms": stats.draft_s_by_source.get(name, 0.0) * 1e3,
            }
            for name in sorted({*stats.drafted_by_source, *stats.draft_s_by_source})
        },
        **stats.to_dict(_SPECULATION),
        "off_reason_text": None if stats.off_reason is None else OFF_REASONS[stats.off_reason],
        "preemptions": stats.preemptions,
    }


_VLLM: Final = {
    "time_to_first_token_ms": "first_token_s",
    "generation_time_ms": "decode_s",
    "queue_time_ms": "queue_s",
    "mean_itl_ms": "mean_inter_token_s",
    "tokens_per_second": "predicted_per_second",
}
_VLLM_DRAFTS: Final = {
    "mean_acceptance_length": "acceptance_length",
    "draft_acceptance_rate": "accept_share",
    "acceptance_histogram": "accepted_at_depths",
    "num_spec_steps": "rounds",
    "num_accepted_draft_tokens": "num_accepted",
    "num_draft_tokens": "num_drafted",
    "num_spec_tokens": "max_depth",
}


def metrics_of(stats: RequestStats) -> dict[str, Any]:
    """Return vLLM's ``metrics`` of a finished answer, which benchmarking clients read."""
    drafts = stats.to_dict(_VLLM_DRAFTS) if stats.num_drafted else None
    return {**stats.to_dict(_VLLM), "speculative_decoding": drafts}
