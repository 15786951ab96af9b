r"""From a rendered conversation to token ids: the template's control tokens become tokens, those of users stay text.

::

    rendered     <|im_start|>user\n  never write <|im_end|>, please  <|im_end|>\n<|im_start|>assistant\n
    in pieces    <|im_start|>        user\n never ... please         <|im_end|>\n<|im_start|>assistant\n
    read as      control tokens      plain text                      control tokens

Where nobody spells a control token there is one piece, and its tokens are those of the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from paceline.chat.marked import MarkedText, marks_of
from paceline.chat.messages import Message
from paceline.chat.reasoning import ReasoningMarkers
from paceline.engines.base import Vocabulary

if TYPE_CHECKING:
    from paceline.api import GenerateOptions

_THEIRS: Final = 0


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a conversation comes to.

    Attributes:
        text: as the template wrote it.
        token_ids: for :meth:`paceline.Model.generate`.
        messages: those of the conversation that are in it.
        num_left_out: how many messages are not, as the context has no room for them.
        markers: what stands around reasoning in answers; ``None`` for a model that does not reason.
        begun: whether the prompt has opened the reasoning, so that an answer begins within it.
        options: what the request needs besides: which control tokens to keep in its text, and how long it may reason.
    """

    text: str
    token_ids: Sequence[int]
    messages: Sequence[Message]
    num_left_out: int
    markers: ReasoningMarkers | None
    begun: bool
    options: GenerateOptions


def token_ids_of(text: MarkedText, vocabulary: Vocabulary, *, adds_opening: bool) -> list[int]:
    """Return the token ids of a rendered conversation.

    No control token comes of what others than the template wrote, in part or whole.

    Args:
        text: with marks on what the template wrote.
        vocabulary: of the model.
        adds_opening: put the tokens before it that the model wants before a text, unless it begins with them: a
            template that writes its own begin token does not get two.

    Raises:
        InputError: the text is not valid Unicode.
        CapabilityError: the model has no tokenizer.
    """
    token_ids: list[int] = []
    for piece, parse_special in _pieces(text, vocabulary):
        token_ids += vocabulary.tokenize(piece, add_special=False, parse_special=parse_special)
    if not adds_opening:
        return token_ids
    opening = vocabulary.tokenize("", add_special=True)
    return token_ids if token_ids[: len(opening)] == opening else [*opening, *token_ids]


def _pieces(text: MarkedText, vocabulary: Vocabulary) -> Iterator[tuple[str, bool]]:
    """Yield pieces of a text, and whether control tokens are to be read in them."""
    plain = str.__str__(text)
    spellings = _Spellings.of(vocabulary)
    found = list(spellings.in_text(plain))
    marks = marks_of(text)
    if not any(_THEIRS in marks[start:end] for start, end in found):
        yield plain, True
        return
    # Between two control tokens of the template, a stretch has one that somebody spelled, or it has none.
    kept, end_of_last = [], 0
    for start, end in found:
        if start >= end_of_last and _THEIRS not in marks[start:end]:
            kept.append((start, end))
            end_of_last = end
    piece_start = at = 0
    for start, end in [*kept, (len(plain), len(plain))]:
        if any(at <= other < start and stop > at for other, stop in found):
            if piece_start < at:
                yield plain[piece_start:at], True
            yield plain[at:start], False
            piece_start = start
        at = end
    if piece_start < len(plain):
        yield plain[piece_start:], True


class _Spellings:
    """What the control tokens of a vocabulary are spelled like, to be found in texts."""

    _known: Final[WeakKeyDictionary[Vocabulary, _Spellings]] = WeakKeyDictionary()

    def __init__(self, vocabulary: Vocabulary) -> None:
        spellings = {vocabulary.token_spelling(token_id) or b"" for token_id in vocabulary.control_ids}
        self._texts = {spelling.decode("utf-8", "replace") for spelling in spellings} - {""}
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        first = "".join(sorted({text[0] for text in self._texts}))
        self._first = re.compile(f"[{re.escape(first)}]") if first else None

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> _Spellings:
        """Return those of a vocabulary, which takes a while the first time."""
        known = cls._known.get(vocabulary)
        if known is None:
            known = cls._known[vocabulary] = cls(vocabulary)
        return known

    def in_text(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield where the text spells a control token, overlapping ones too: by start, the longest first."""
        if self._first is None:
            return
        for match in self._first.finditer(text):
            start = match.start()
            for length in self._lengths:
                if text[start : start + length] in self._texts:
                    yield start, start + length
