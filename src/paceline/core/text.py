"""From tokens to text while they arrive: whole characters only, and nothing past a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from paceline.core.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A piece of final text.

    Attributes:
        text: the characters.
        source: where the token that completed them came from.
    """

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of what stop texts are looked for in.

    Attributes:
        text: the characters.
        source: where the token that completed them came from.
        shown: whether they belong to the answer; the name of a control token does not.
    """

    text: str
    source: str
    shown: bool


class TextStream:
    r"""Incremental detokeniser with stop texts.

    Bytes of a character that straddles tokens wait until it is complete; bytes that can never become a character
    turn into U+FFFD, as :meth:`bytes.decode` with ``errors="replace"`` would have it for the whole text. Text that
    may still turn out to be the beginning of a stop text is withheld too.

    Stop texts are looked for in the text with its control tokens spelled out::

        tokens        Hello  \n  <|im_end|>   user
        spelled out   Hello\n<|im_end|>user           a stop text "\n<|im_end|>" begins here, after "Hello"
        text          Hello\nuser                     what is shown without it

    So a stop text may be a control token, or have some in it. Ordinary text that spells the same stops as well. A stop
    text without control tokens is not found around one: the model did not write it.

    A line that begins with fewer than ``min_indent`` blanks ends the text behind its blanks, but for the first line,
    whose beginning may be in the prompt.

    Stop texts that are complete within the first ``min_tokens`` tokens do not count. With ``include_stop`` the one that
    counts is the end of the text.
    """

    def __init__(
        self,
        stop: Sequence[str] = (),
        preserved_ids: Collection[int] = (),
        min_indent: int = 0,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._preserved_ids = preserved_ids
        self._withheld: list[_Piece] = []
        self._last_source = ""
        self._num_early = min_tokens
        self._is_early = False
        self._include_stop = include_stop
        self._min_indent = min_indent
        # Blanks of a line that has nothing else yet; of others, and the first, None.
        self._indent: int | None = None
        self.stopped = False
        """Whether a stop text has come up, or a line that is not indented enough; nothing is added after."""
        self.outdented = False
        """Whether that was a line."""
        self.stop_text = ""
        """The stop text that has come up; of several that begin at one place, the first that was given."""

    def push_token(self, token_id: int, source: str, vocabulary: Vocabulary) -> list[TextSegment]:
        """Add a token and return the text that became final; a preserved control token is text."""
        self._is_early = self._num_early > 0
        self._num_early -= 1
        token_bytes = vocabulary.token_bytes(token_id)
        if not token_bytes and token_id in self._preserved_ids:
            token_bytes = vocabulary.token_spelling(token_id) or b""
        segments = self.push(token_bytes, source)
        if self._stop and not token_bytes:
            # A stop text may name a control token, which adds no bytes.
            segments += self.push_control(vocabulary.token_spelling(token_id) or b"", source)
        return segments

    def push(self, token_bytes: bytes, source: str) -> list[TextSegment]:
        """Add a token's bytes and return the text that became final."""
        self._last_source = source
        return self._cut_outdented(self._release(self._decoder.decode(token_bytes), source))

    def push_control(self, spelling: bytes, source: str) -> list[TextSegment]:
        """Add a control token, which stop texts may name, and return the text that became final.

        Without stop texts a control token changes nothing and need not be pushed.
        """
        self._last_source = source
        return self._cut_outdented(self._release(spelling.decode("utf-8", "replace"), source, shown=False))

    def flush(self) -> list[TextSegment]:
        """Return all that was withheld; for the end of an answer that no stop text ended."""
        if self.stopped:
            return []
        released = self._release(self._decoder.decode(b"", final=True), self._last_source)
        released += _drop_hidden(self._withheld)
        self._withheld = []
        return self._cut_outdented(released)

    def _cut_outdented(self, segments: list[TextSegment]) -> list[TextSegment]:
        if not self._min_indent:
            return segments
        for number, segment in enumerate(segments):
            for place, character in enumerate(segment.text):
                if self._indent is not None and character in " \t":
                    self._indent += 1
                    continue
                if self._indent is not None and self._indent < self._min_indent:
                    self.stopped = self.outdented = True
                    self.stop_text, self._withheld = "", []
                    cut = [replace(segment, text=segment.text[:place])] if place else []
                    return [*segments[:number], *cut]
                self._indent = 0 if character == "\n" else None
        return segments

    def _release(self, text: str, source: str, *, shown: bool = True) -> list[TextSegment]:
        if not text or self.stopped:
            return []
        if not self._stop:
            return [TextSegment(text, source)] if shown else []
        pieces = [*self._withheld, _Piece(text, source, shown)]
        joined = "".join(piece.text for piece in pieces)
        found = [(start, stop) for stop in self._stop if (start := joined.find(stop)) >= 0]
        if found and not self._is_early:
            start, self.stop_text = min(found, key=lambda place: place[0])
            self.stopped = True
            self._withheld = []
            start += len(self.stop_text) if self._include_stop else 0
            return _drop_hidden(_split(pieces, start)[0])
        # Anything that no suffix of the text so far can extend to a stop text is final.
        final, self._withheld = _split(pieces, len(joined) - self._longest_partial_stop(joined))
        return _drop_hidden(final)

    def _longest_partial_stop(self, text: str) -> int:
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


def spelled_bytes(data: bytes) -> str:
    """Return bytes as a message shows them: ``'root'``, or ``the bytes 50 4b 03 04`` where they are no plain text."""
    if data.isascii() and data.decode("ascii").isprintable():
        return repr(data.decode("ascii"))
    return f"the {'byte' if len(data) == 1 else 'bytes'} {data.hex(' ')}"


def _drop_hidden(pieces: Sequence[_Piece]) -> list[TextSegment]:
    """Leave out the names of control tokens."""
    return [TextSegment(piece.text, piece.source) for piece in pieces if piece.shown]


def _split(pieces: Sequence[_Piece], at: int) -> tuple[list[_Piece], list[_Piece]]:
    """Split pieces after ``at`` characters."""
    before: list[_Piece] = []
    after: list[_Piece] = []
    for piece in pieces:
        cut = min(max(at, 0), len(piece.text))
        if cut:
            before.append(replace(piece, text=piece.text[:cut]))
        if cut < len(piece.text):
            after.append(replace(piece, text=piece.text[cut:]))
        at -= len(piece.text)
    return before, after
