r"""Parting an answer into reasoning and content, by the markers that a model writes around its reasoning.

::

    text       \n<think>\nHm. 2 + 2 is 4.\n</think>\n\nThe sum is 4.
    reasoning                Hm. 2 + 2 is 4.
    content                                            The sum is 4.

Where a marker is a control token, the request has to preserve it (:func:`preserved_ids`), or the text lacks it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from paceline.core.errors import InputError
from paceline.core.reasoning import ReasoningBudget
from paceline.core.text import TextSegment
from paceline.core.vocabulary import Vocabulary

PartKind: TypeAlias = Literal["reasoning", "content"]
"""What a part of an answer is."""

ReasoningFormat: TypeAlias = Literal["none", "deepseek", "deepseek-legacy", "auto"]
"""Where a message has its reasoning, by llama.cpp's names.

``none``: in the content, as it was written; ``deepseek``: in ``reasoning_content``; ``deepseek-legacy``: in both;
``auto``: as ``deepseek``.
"""
REASONING_FORMATS: tuple[ReasoningFormat, ...] = get_args(ReasoningFormat)
"""Every :data:`ReasoningFormat`."""


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What a model writes around its reasoning.

    Attributes:
        start: opens it. A start counts only at a border: where the answer begins, or after another marker.
        end: closes it.
        forced: what has to be written to close it from outside, so that content follows; empty for ``end``.
        dropped: further texts that are no content, such as the header of a channel. They make a border, too.

    Raises:
        InputError: a marker is empty, has whitespace around it, or has another one in it.
    """

    start: str
    end: str
    forced: str = ""
    dropped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        outside = (self.start, *self.dropped)
        for text in (*outside, self.end):
            if not text or text != text.strip():
                raise InputError(f"marker of reasoning {text!r}: give a text without whitespace around it")
        for text in outside:
            if sum(other in text for other in outside) > 1:
                raise InputError(f"marker of reasoning {text!r} has another one in it: leave out one of the two")

    @property
    def closing(self) -> str:
        """What has to be written to close reasoning from outside."""
        return self.forced or self.end


class KnownMarkers(NamedTuple):
    """What a model writes around its reasoning, if all of the ``signs`` are in its template's source."""

    signs: tuple[str, ...]
    markers: ReasoningMarkers


def _tags(start: str, end: str) -> KnownMarkers:
    return KnownMarkers((start, end), ReasoningMarkers(start, end))


KNOWN_MARKERS: Final[tuple[KnownMarkers, ...]] = (
    # gpt-oss: each message of an answer names its channel.
    KnownMarkers(
        ("<|channel|>analysis<|message|>",),
        ReasoningMarkers(
            "<|channel|>analysis<|message|>",
            "<|end|>",
            "<|end|><|start|>assistant<|channel|>final<|message|>",
            ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>"),
        ),
    ),
    # Gemma 4.
    KnownMarkers(("<|channel>thought", "<channel|>"), ReasoningMarkers("<|channel>thought", "<channel|>")),
    # Solar Open.
    KnownMarkers(
        ("<|begin|>assistant<|think|>", "<|begin|>assistant<|content|>"),
        ReasoningMarkers(
            "<|think|>",
            "<|end|>",
            "<|end|><|begin|>assistant<|content|>",
            ("<|begin|>assistant", "<|content|>", "<|end|>"),
        ),
    ),
    # Kimi K3.
    KnownMarkers(
        ("<|open|>", "<|close|>", "open_tag('think')"),
        ReasoningMarkers(
            "<|open|>think<|sep|>",
            "<|close|>think<|sep|>",
            "<|close|>think<|sep|><|open|>response<|sep|>",
            ("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ),
    ),
    # Hunyuan 3.
    KnownMarkers(("<think{}>", "':opensource'"), ReasoningMarkers("<think:opensource>", "</think:opensource>")),
    # Apriel.
    KnownMarkers(
        ("[BEGIN FINAL RESPONSE]",),
        ReasoningMarkers("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", dropped=("[END FINAL RESPONSE]",)),
    ),
    # Granite 3.3.
    KnownMarkers(
        ("<think></think>", "<response></response>"),
        ReasoningMarkers("<think>", "</think>", dropped=("<response>", "</response>")),
    ),
    _tags("<|START_THINKING|>", "<|END_THINKING|>"),  # Command R7B and later
    _tags("[THINK]", "[/THINK]"),  # Magistral, Ministral
    _tags("<seed:think>", "</seed:think>"),  # Seed-OSS
    _tags("<mm:think>", "</mm:think>"),  # MiniMax M3
    _tags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    # DeepSeek, Qwen, GLM, SmolLM, Nemotron and most others. Some templates only cut reasoning off, and name its end.
    KnownMarkers(("</think>",), ReasoningMarkers("<think>", "</think>")),
)
"""Markers in use, those first whose signs say more."""


def find_markers(template: str) -> ReasoningMarkers | None:
    """Return the markers that a chat template's source speaks of; ``None`` where it knows of no reasoning."""
    return next((known.markers for known in KNOWN_MARKERS if all(sign in template for sign in known.signs)), None)


def opens_reasoning(text: str, markers: ReasoningMarkers) -> bool:
    """Return whether reasoning is open where a text ends.

    The text is what follows the last message of a prompt: the generation prompt, and the beginning of an answer that is
    to be continued. What a user wrote is to be left out, as markers may be spelled in it.
    """
    return text.rfind(markers.start) > text.rfind(markers.end)


def preserved_ids(markers: ReasoningMarkers, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the control tokens among a model's markers, for :attr:`~paceline.core.params.StopRules.preserved_ids`."""
    texts = (markers.start, markers.end, markers.closing, *markers.dropped)
    token_ids = {token_id for text in texts for token_id in _trusted_ids(text, vocabulary)}
    return tuple(sorted(token_id for token_id in token_ids if not vocabulary.token_bytes(token_id)))


def build_budget(
    markers: ReasoningMarkers, vocabulary: Vocabulary, num_tokens: int, *, begun: bool, message: str = ""
) -> ReasoningBudget:
    """Return how long an answer may reason, and how its reasoning is ended, in the tokens of a vocabulary.

    Args:
        markers: of the model.
        vocabulary: the target's.
        num_tokens: most tokens of one reasoning, 0 for none; -1 is no limit.
        begun: whether the prompt ends inside of reasoning.
        message: said before the reasoning is closed.
    """
    said = vocabulary.tokenize(message, add_special=False) if message else []
    return ReasoningBudget(
        None if num_tokens == -1 else num_tokens,
        _trusted_ids(markers.start, vocabulary),
        _trusted_ids(markers.end, vocabulary),
        begun,
        (*said, *_trusted_ids(markers.closing, vocabulary)),
    )


class AnswerPart(NamedTuple):
    """A piece of an answer.

    Attributes:
        kind: reasoning or content.
        segment: the text, and where the token that completed it came from.
    """

    kind: PartKind
    segment: TextSegment


class ReasoningSplitter:
    """Parts an answer's text while it arrives; what comes out does not depend on how the text was cut.

    Markers are left out, and so is whitespace around reasoning. Text that may be the beginning of a marker is withheld.
    Reasoning that is opened again goes on in a new line, and so does content that it interrupts.

    Args:
        markers: of the model; ``None`` where it knows of no reasoning: all is content.
        begun: whether the prompt ends inside of reasoning.
        continued: whether the text goes on with a message that the prompt has the beginning of: whitespace counts from
            the first character on, and no reasoning begins there.
    """

    def __init__(self, markers: ReasoningMarkers | None, *, begun: bool = False, continued: bool = False) -> None:
        self._start = "" if markers is None else markers.start
        self._end = "" if markers is None else markers.end
        self._dropped = () if markers is None else markers.dropped
        self._inside = markers is not None and begun
        # Whether nothing but whitespace came since the answer's beginning or the last marker.
        self._at_border = markers is not None and not continued
        # Whether whitespace that comes next is left out.
        self._strips = self._inside and not continued
        self._said: set[PartKind] = set()
        # Whether what comes next goes on after it was interrupted.
        self._resumes = False
        self._withheld: list[TextSegment] = []

    @property
    def is_inside(self) -> bool:
        return self._inside

    @property
    def _kind(self) -> PartKind:
        return "reasoning" if self._inside else "content"

    @property
    def _passes_all(self) -> bool:
        """Whether all that comes is content, whatever it says."""
        return "content" in self._said and not (
            self._inside or self._at_border or self._dropped or self._withheld or self._strips or self._resumes
        )

    def push(self, segments: Sequence[TextSegment]) -> list[AnswerPart]:
        """Add text and return the parts that became final."""
        if self._passes_all:
            return [AnswerPart("content", segment) for segment in segments if segment.text]
        self._withheld += [segment for segment in segments if segment.text]
        parts: list[AnswerPart] = []
        while self._pass_marker(parts):
            pass
        return parts

    def finish(self) -> list[AnswerPart]:
        """Return all that was withheld; for the end of an answer."""
        parts: list[AnswerPart] = []
        text = self._strip()
        self._emit(parts, len(text.rstrip() if self._inside else text))
        self._withheld = []
        return parts

    def _pass_marker(self, parts: list[AnswerPart]) -> bool:
        """Go on behind the next marker and return true; without one, go on as far as the text is certain."""
        text = self._strip()
        if self._inside:
            return self._pass_end(parts, text)
        if self._at_border:
            ahead = text.lstrip()
            if any(marker.startswith(ahead) and marker != ahead for marker in (self._start, *self._dropped)):
                return False
            if ahead.startswith(self._start):
                self._take(len(text) - len(ahead) + len(self._start))
                self._turn(inside=True)
                return True
        return self._pass_dropped(parts, text)

    def _pass_end(self, parts: list[AnswerPart], text: str) -> bool:
        at = text.find(self._end)
        certain = (text[:at] if at >= 0 else text[: len(text) - _overlap(text, (self._end,))]).rstrip()
        self._emit(parts, len(certain))
        if at >= 0:
            self._take(at - len(certain) + len(self._end))
            self._at_border = True
            self._turn(inside=False)
        return at >= 0

    def _pass_dropped(self, parts: list[AnswerPart], text: str) -> bool:
        found = [(at, marker) for marker in self._dropped if (at := text.find(marker)) >= 0]
        at, marker = min(found, default=(len(text) - _overlap(text, self._dropped), ""))
        self._emit(parts, at)
        self._take(len(marker))
        self._at_border = bool(found) or (self._at_border and at == 0)
        return bool(found)

    def _turn(self, *, inside: bool) -> None:
        self._inside, self._strips = inside, True
        self._resumes = self._kind in self._said

    def _strip(self) -> str:
        """Take off whitespace that is left out, and return what is withheld."""
        text = "".join(segment.text for segment in self._withheld)
        if self._strips:
            stripped = text.lstrip()
            self._take(len(text) - len(stripped))
            text = stripped
        return text

    def _emit(self, parts: list[AnswerPart], length: int) -> None:
        """Make the first ``length`` characters that are withheld parts of the answer."""
        for segment in self._take(length):
            if self._resumes:
                parts.append(AnswerPart(self._kind, replace(segment, text="\n")))
                self._resumes = False
            self._said.add(self._kind)
            self._strips = False
            parts.append(AnswerPart(self._kind, segment))

    def _take(self, length: int) -> list[TextSegment]:
        """Return the first ``length`` characters that are withheld, and withhold them no more."""
        taken: list[TextSegment] = []
        while length > 0:
            segment = self._withheld.pop(0)
            if len(segment.text) > length:
                self._withheld.insert(0, replace(segment, text=segment.text[length:]))
                segment = replace(segment, text=segment.text[:length])
            length -= len(segment.text)
            taken.append(segment)
        return taken


def _overlap(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of a text may be the beginning of a marker."""
    lengths = (length for marker in markers for length in range(1, len(marker)) if text.endswith(marker[:length]))
    return max(lengths, default=0)


def _trusted_ids(text: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the tokens of a text that may name control tokens."""
    return tuple(vocabulary.tokenize(text, add_special=False, parse_special=True))
