"""From tokens to text while they arrive: whole characters only, and nothing past a stop text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A piece of final text.

    Attributes:
        text: the characters.
        source: where the token that completed them came from.
    """

    text: str
    source: str


class TextStream:
    """Incremental detokeniser with stop texts.

    Bytes of a character that straddles tokens wait until it is complete; bytes that can never become a character
    turn into U+FFFD, as :meth:`bytes.decode` with ``errors="replace"`` would have it for the whole text. Text that
    may still turn out to be the beginning of a stop text is withheld too.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._withheld: list[TextSegment] = []
        self._last_source = ""
        self.stopped = False
        """Whether a stop text has come up; nothing is added after."""

    def push(self, token_bytes: bytes, source: str) -> list[TextSegment]:
        """Add a token's bytes and return the text that became final."""
        self._last_source = source
        return self._release(self._decoder.decode(token_bytes), source)

    def flush(self) -> list[TextSegment]:
        """Return all that was withheld; for the end of an answer that no stop text ended."""
        if self.stopped:
            return []
        released = self._release(self._decoder.decode(b"", final=True), self._last_source)
        released += self._withheld
        self._withheld = []
        return released

    def _release(self, text: str, source: str) -> list[TextSegment]:
        if not text or self.stopped:
            return []
        segment = TextSegment(text, source)
        if not self._stop:
            return [segment]
        segments = [*self._withheld, segment]
        joined = "".join(s.text for s in segments)
        starts = [start for start in (joined.find(stop) for stop in self._stop) if start >= 0]
        if starts:
            self.stopped = True
            self._withheld = []
            return _split(segments, min(starts))[0]
        # Anything that no suffix of the text so far can extend to a stop text is final.
        final, self._withheld = _split(segments, len(joined) - self._longest_partial_stop(joined))
        return final

    def _longest_partial_stop(self, text: str) -> int:
        longest = max(len(stop) for stop in self._stop) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


def _split(segments: Sequence[TextSegment], at: int) -> tuple[list[TextSegment], list[TextSegment]]:
    """Split segments after ``at`` characters."""
    before: list[TextSegment] = []
    after: list[TextSegment] = []
    for segment in segments:
        cut = min(max(at, 0), len(segment.text))
        if cut:
            before.append(TextSegment(segment.text[:cut], segment.source))
        if cut < len(segment.text):
            after.append(TextSegment(segment.text[cut:], segment.source))
        at -= len(segment.text)
    return before, after
