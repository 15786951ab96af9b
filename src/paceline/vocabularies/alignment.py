"""A text that grows in a target's tokens, followed in a draft's tokens.

Only the end of the text is tokenized anew, from the last place where both tokenizations have a boundary and that is far
enough from the end for nothing to change before it::

    target's tokens   | the | quick | brown | fo | x |
    draft's tokens    | the | qui | ck | brown | fox |
                            ^ anchor            what stands here may change with the next token

A text is never trusted to come back: the tokens' bytes are compared with it. Where they differ nothing is drafted until
the text has gone on. What cannot be read even in parts is left out of what the draft reads; a character of which only
the beginning was said is waited for.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from paceline.vocabularies.exact_tokens import whole_characters
from paceline.vocabularies.mapping import TokenMapping

_WINDOW: Final = 64
"""Bytes at the end of a text that are tokenized anew at least."""

_LONGEST_WINDOW: Final = 256
"""Bytes after which any boundary of the draft's will do."""

_SHORTEST_PIECE: Final = 16
"""Bytes of a text that are left out whole if they cannot be tokenized."""

_LONGEST_PART: Final = 1 << 12
"""Bytes of a long text, of which some cannot be tokenized, that are looked at together."""

_SPACES: Final = b" \n\t"


@dataclass(frozen=True, slots=True)
class CutWord:
    """The end of a text, which may be the beginning of a longer token of the draft's.

    Attributes:
        draft_id: the draft's last token; ``None`` where it is a space that the draft does not read by itself.
        spelled: bytes of that end.
        before: bytes between the target's last boundary at or before the token, and the token.
        target_ids: the target's tokens from that boundary to the end of the text.
    """

    draft_id: int | None
    spelled: bytes
    before: bytes
    target_ids: Sequence[int]


class Alignment:
    """Follows one text.

    Attributes:
        draft_ids: the text in the draft's tokens, always the same list.
        is_ready: whether they spell all of the text, but for what is held back.
        held_back: a space at the end of the text that belongs to the next word, and is not among the draft's tokens.
    """

    def __init__(self, mapping: TokenMapping) -> None:
        self._mapping = mapping
        self.draft_ids = list(mapping.draft.opening_ids)
        self.is_ready = False
        self.held_back = b""
        self._num_read = 0
        # Draft tokens before the anchor stand for good; the tail is the text after it.
        self._anchor = len(self.draft_ids)
        self._tail = bytearray()
        self._target_ids: list[int] = []
        self._target_ends: list[int] = []
        self._opens = True
        # Whether a token of the target ends where the tail begins.
        self._at_boundary = True

    def follow(self, token_ids: Sequence[int]) -> int:
        """Go on to the end of a text; return how many of the first :attr:`draft_ids` are what they were.

        The beginning of ``token_ids``, which are the target's, is what was followed before.
        """
        stands = len(self.draft_ids)
        if self._num_read == len(token_ids):
            return stands
        vocabulary = self._mapping.target.vocabulary
        for index in range(self._num_read, len(token_ids)):
            token_id = token_ids[index]
            piece = vocabulary.token_bytes(token_id)
            if piece:
                if self._opens and not self._tail and self._mapping.target.adds_space and piece.startswith(b" "):
                    piece = piece[1:]
                self._tail += piece
                self._target_ids.append(token_id)
                self._target_ends.append(len(self._tail))
                continue
            stands = min(stands, self._settle())
            opening_ids = self._mapping.target.opening_ids
            is_opening = index < len(opening_ids) and token_id == opening_ids[index]
            draft_id = None if is_opening else self._mapping.control_id(token_id)
            if draft_id is not None:
                self.draft_ids.append(draft_id)
                self._anchor += 1
            self._opens = is_opening
        self._num_read = len(token_ids)
        return min(stands, self._refresh())

    def cut_word(self) -> CutWord | None:
        """Return the last token of the text; ``None`` where it is no text, or nothing is known of what it stands on."""
        if not self._tail or not self.is_ready:
            return None
        draft_id: int | None = None
        spelled = self.held_back
        if not spelled:
            if len(self.draft_ids) <= self._anchor:
                return None
            draft_id = self.draft_ids[-1]
            spelled = self._mapping.draft.vocabulary.token_bytes(draft_id)
        start = len(self._tail) - len(spelled)
        place = bisect.bisect_right(self._target_ends, start)
        if start < 0 or (place == 0 and not self._at_boundary):
            return None
        boundary = self._target_ends[place - 1] if place else 0
        return CutWord(draft_id, spelled, bytes(self._tail[boundary:start]), self._target_ids[place:])

    def _refresh(self) -> int:
        """Tokenize the tail anew; return how many of the first draft tokens are what they were."""
        length = len(self.draft_ids)
        self.held_back = b""
        if not self._tail:
            self.is_ready = True
            return length
        data = bytes(self._tail)
        if self._mapping.draft.joins_space and data.endswith(b" ") and len(data) > 1:
            data, self.held_back = data[:-1], b" "
        token_ids = self._encode(data)
        if token_ids is None:
            self.is_ready = False
            data, self.held_back = bytes(self._tail), b""
            whole = whole_characters(data)
            if len(whole) < len(data) and (not whole or self._encode(whole) is not None):
                return length
            return self._settle(len(data) - len(whole))
        self.is_ready = True
        stands = self._replace(token_ids)
        self._move_anchor(data, token_ids)
        return stands

    def _replace(self, token_ids: Sequence[int]) -> int:
        """Put tokens in the place of those of the tail; return how many of all stand."""
        place = self._anchor
        ids = self.draft_ids
        for token_id in token_ids:
            if place == len(ids) or ids[place] != token_id:
                break
            place += 1
        del ids[place:]
        ids += token_ids[place - self._anchor :]
        return place

    def _encode(self, data: bytes) -> list[int] | None:
        draft = self._mapping.draft
        if self._opens:
            return draft.opening(data)
        return draft.continuation(data)

    def _move_anchor(self, data: bytes, token_ids: Sequence[int]) -> None:
        """Leave behind what cannot change any more."""
        last = len(data) - _WINDOW
        if last <= 0:
            return
        vocabulary = self._mapping.draft.vocabulary
        # The space that a tokenizer puts before a text is no part of it.
        end = -1 if self._opens and self._mapping.draft.adds_space else 0
        shared = set(self._target_ends)
        best_word = best_shared = best_any = (0, 0)
        for count, token_id in enumerate(token_ids, start=1):
            end += len(vocabulary.token_bytes(token_id))
            if end > last:
                break
            best_any = (end, count)
            if end in shared:
                best_shared = best_any
                if data[end] in _SPACES and data[end - 1] not in _SPACES:
                    best_word = best_any
        # Words may be long, but a window has an end.
        end, count = best_word if last - best_word[0] < _LONGEST_WINDOW else best_shared
        if last - end >= _LONGEST_WINDOW:
            end, count = best_any
        if count == 0:
            return
        self._anchor += count
        self._at_boundary = end in shared
        del self._tail[:end]
        place = bisect.bisect_right(self._target_ends, end)
        self._target_ids = self._target_ids[place:]
        self._target_ends = [other - end for other in self._target_ends[place:]]
        self._opens = False

    def _settle(self, begun: int = 0) -> int:
        """End the tail where it is, without what cannot be read; return how many of the first tokens stand.

        Args:
            begun: bytes at its end that stay, as the rest of their character is to come.
        """
        data = bytes(self._tail[: len(self._tail) - begun])
        token_ids = self._encode(data) if data else []
        stands = self._replace(self._readable_parts(data) if token_ids is None else token_ids)
        self._anchor = len(self.draft_ids)
        del self._tail[: len(data)]
        self._target_ids, self._target_ends = [], []
        self._at_boundary = begun == 0
        self._opens = self._opens and not data
        return stands

    def _readable_parts(self, data: bytes) -> list[int]:
        """Return the tokens of those parts of some bytes that come back."""
        token_ids: list[int] = []
        waiting: list[bytes] = []
        while data:
            part = whole_characters(data[:_LONGEST_PART]) or data[:_LONGEST_PART]
            waiting.insert(0, part)
            data = data[len(part) :]
        while waiting:
            part = waiting.pop()
            try:
                part.decode()
            except UnicodeDecodeError as error:
                waiting += [part[error.end :], part[: error.start]]
                continue
            of_part = self._mapping.draft.continuation(part)
            if of_part is not None:
                token_ids += of_part
            elif len(part) > _SHORTEST_PIECE:
                middle = len(part) // 2
                space = part.rfind(b" ", 1, middle)
                # A word is better left whole, and a character has to be.
                middle = space if space > middle // 2 else len(whole_characters(part[:middle])) or middle
                waiting += [part[middle:], part[:middle]]
        return token_ids
