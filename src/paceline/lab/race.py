"""A race: one prompt answered plainly and speculatively, to be shown side by side.

The answers are made one after the other, as side by side they would share the processor. Each token is kept with the
time at which it arrived, from which both are replayed::

    run_race(model, prompt, options) ──> Race ──to_json──> a file, a page, a picture
                                           │
                                           ├── plain        Lane ──until(seconds)──> the text that was there by then
                                           └── speculative  Lane
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, cast

from paceline.api import Model
from paceline.core.divergence import first_difference
from paceline.core.errors import InputError
from paceline.core.stats import OffReason
from paceline.core.text import TextStream
from paceline.core.vocabulary import Vocabulary
from paceline.lab.comparison import OpenReader, Stop, answer, explain
from paceline.options import GenerateOptions
from paceline.streams import Generation

LaneName: TypeAlias = Literal["plain", "speculative"]

Verdict: TypeAlias = Literal["faster", "slower", "level", "unexplained", "nothing drafted", "texts differ"]
"""How a race ended.

``faster``, ``slower`` and ``level`` speak of the speculative lane, whose text is the plain one's. ``unexplained``: it
was faster by more than its accepted drafts can bring, so that the machine was not equally fast for both. ``nothing
drafted``: both lanes were plain decoding. ``texts differ``: the lanes hold different tokens, and their times say
nothing.
"""

LEVEL = 0.03
"""Share of a lane's time by which two lanes may differ and still count as level: single runs differ by so much."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added to the text.

    Attributes:
        text: the characters that became final with the token; empty while a character is not complete.
        source: the drafter that the token came from, or ``"target"``.
        at_s: seconds after the lane's first token.
    """

    text: str
    source: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One answer with the times at which its tokens arrived.

    Attributes:
        num_drafted: draft tokens that were verified.
        num_accepted: draft tokens that were kept.
        accepted_by_source: draft tokens that were kept, by drafter.
        off_reason: why nothing was drafted; ``None`` where something was, and where no round came after the prompt.
    """

    token_ids: Sequence[int]
    pieces: Sequence[Piece]
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_by_source: Mapping[str, int] = field(default_factory=dict)
    off_reason: OffReason | None = None

    @classmethod
    def of(cls, generation: Generation, vocabulary: Vocabulary) -> Lane:
        """Return the lane of a finished answer.

        Raises ``InputError`` for an answer of fewer than two tokens, of which none has a time after the first.
        """
        stats = generation.stats
        if len(generation.token_ids) < 2:
            raise InputError(
                f"the answer has {len(generation.token_ids)} token, and the first comes with the prompt: a race needs "
                "2 or more; give another prompt"
            )
        stream, room = TextStream(), len(generation.text)
        pieces: list[Piece] = []
        for token_id, source, arrived_s in zip(generation.token_ids, generation.sources, stats.arrivals_s, strict=True):
            is_last = len(pieces) == len(generation.token_ids) - 1
            segments = stream.push(vocabulary.token_bytes(token_id), source) + (stream.flush() if is_last else [])
            # Tokens may spell the stop text that ends an answer and is not part of it.
            text = "".join(segment.text for segment in segments)[:room]
            room -= len(text)
            pieces.append(Piece(text, source, arrived_s - stats.arrivals_s[0]))
        return cls(
            token_ids=tuple(generation.token_ids),
            pieces=tuple(pieces),
            num_drafted=stats.num_drafted,
            num_accepted=stats.num_accepted,
            accepted_by_source={name: count for name, count in stats.accepted_by_source.items() if count},
            off_reason=stats.off_reason,
        )

    @property
    def seconds(self) -> float:
        """Seconds from the first token to the last."""
        return self.pieces[-1].at_s

    @property
    def per_second(self) -> float:
        """Tokens a second, of those after the first."""
        return (len(self.pieces) - 1) / self.seconds if self.seconds > 0 else float("inf")

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def until(self, at_s: float) -> Sequence[Piece]:
        """Return the pieces that had arrived after so many seconds."""
        return self.pieces[: bisect.bisect_right(self.pieces, at_s, key=lambda piece: piece.at_s)]


@dataclass(frozen=True, slots=True)
class Race:
    """Two answers to one prompt, made one after the other.

    Attributes:
        divergence: why the texts differ, such as ``"near-tie"`` (see :class:`~paceline.core.divergence.Divergence`);
            ``None`` where they are equal.
    """

    prompt: str
    plain: Lane
    speculative: Lane
    divergence: str | None = None

    @property
    def differs_at(self) -> int | None:
        """Index of the first token in which the lanes differ; ``None`` where they hold the same text."""
        return first_difference(self.plain.token_ids, self.speculative.token_ids)

    @property
    def speedup(self) -> float:
        """Time of the plain lane over that of the speculative one."""
        return self.plain.seconds / self.speculative.seconds if self.speculative.seconds > 0 else float("inf")

    @property
    def most_speedup(self) -> float:
        """What the accepted drafts can bring at most: the passes of plain decoding over those of speculative decoding.

        A pass with drafts in it takes at least as long as one without.
        """
        passes = len(self.plain.pieces) - 1
        return passes / max(passes - self.speculative.num_accepted, 1)

    @property
    def seconds(self) -> float:
        """Seconds until both lanes are through."""
        return max(self.plain.seconds, self.speculative.seconds)

    @property
    def verdict(self) -> Verdict:
        if self.differs_at is not None:
            return "texts differ"
        if not self.speculative.num_drafted:
            return "nothing drafted"
        if abs(self.speedup - 1.0) <= LEVEL:
            return "level"
        if self.speedup > (1.0 + LEVEL) * self.most_speedup:
            return "unexplained"
        return "faster" if self.speedup > 1.0 else "slower"

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "verdict": self.verdict,
            "speedup": self.speedup,
            "differs_at": self.differs_at,
            "divergence": self.divergence,
            "plain": _lane_json(self.plain),
            "speculative": _lane_json(self.speculative),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> Race:
        try:
            lanes = _parse_lane(facts["plain"]), _parse_lane(facts["speculative"])
            return cls(facts["prompt"], *lanes, divergence=facts["divergence"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"this is not a recorded race ({error!r}): record one with paceline demo --json") from None


def run_race(
    model: Model,
    prompt: str | Sequence[int],
    options: GenerateOptions,
    *,
    open_reader: OpenReader | None = None,
    stopped: Stop = lambda: False,
    tell: Callable[[LaneName], None] = lambda lane: None,
) -> Race:
    """Answer a prompt plainly, then speculatively, with the seed of ``options``. ``tell`` is told which lane begins.

    Raises ``InputError`` also where the answer is too short for a race.
    """
    vocabulary = model.target.vocabulary
    tell("plain")
    plain = answer(model, prompt, options, speculate=False, stopped=stopped)
    tell("speculative")
    speculative = answer(model, prompt, options, speculate=True, stopped=stopped)
    lanes = Lane.of(plain, vocabulary), Lane.of(speculative, vocabulary)
    divergence = explain(model, prompt, options, plain, speculative, open_reader=open_reader, stopped=stopped)
    words = (
        prompt if isinstance(prompt, str) else b"".join(map(vocabulary.token_bytes, prompt)).decode(errors="replace")
    )
    return Race(words, *lanes, divergence=None if divergence is None else divergence.verdict)


def _lane_json(lane: Lane) -> dict[str, Any]:
    return {
        **asdict(lane),
        "accepted_by_source": dict(lane.accepted_by_source),
        "pieces": [[piece.text, piece.source, round(piece.at_s, 6)] for piece in lane.pieces],
        "decode_s": lane.seconds,
        "tokens_per_s": lane.per_second,
    }


def _parse_lane(facts: Mapping[str, Any]) -> Lane:
    lane = Lane(
        token_ids=tuple(facts["token_ids"]),
        pieces=tuple(Piece(text, source, at_s) for text, source, at_s in facts["pieces"]),
        num_drafted=facts["num_drafted"],
        num_accepted=facts["num_accepted"],
        accepted_by_source=facts["accepted_by_source"],
        off_reason=cast("OffReason | None", facts["off_reason"]),
    )
    lane.pieces[-1]
    return lane
