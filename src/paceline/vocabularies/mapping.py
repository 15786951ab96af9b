"""What a draft's tokens are to a target that has other ones.

A draft's token is the target's tokens of its bytes: one, if the target has a token of these bytes, or several. Of
several ids with the same bytes, it is the one that the target's own tokenizer yields: SentencePiece has ``<0x31>`` and
``1``, and says only the second. Control tokens stand for no bytes. They are matched by what was asked for, by their
role, or by their text; those left over are no part of what the draft reads.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.core.errors import InputError, VocabularyMismatchError
from paceline.core.processors import largest
from paceline.core.sampling import finite_top
from paceline.vocabularies.exact_tokens import ExactTokenizer
from paceline.vocabularies.turns import END_OF_TURN

if TYPE_CHECKING:
    from paceline.core.arrays import FloatArray, Int64Array
    from paceline.core.vocabulary import Vocabulary

_UNKNOWN: Final = -2
_NOTHING: Final = -1

_RANGE_NATS: Final = 8.0
"""A draft's tokens this far below its likeliest are not translated: together they hardly ever make the choice."""

_MAX_TRANSLATED: Final = 1024
"""Tokens of a row that are translated at most, the likeliest of them."""

_PROBE: Final = "The quick brown fox, 1234; na\u00efve.\n"
"""A text that every tokenizer can give back as it was, unless it changes texts."""

_STARTS_OF_TURN: Final = frozenset({"<|im_start|>", "<start_of_turn>", "<|turn>"})
"""Control tokens that open a turn and are followed by the name of who speaks."""

_ROLES: Final = (_STARTS_OF_TURN, END_OF_TURN)


@dataclass(frozen=True, slots=True)
class ProjectedRow:
    """A draft's row as a row of the target's tokens.

    Attributes:
        logits: ``[target vocab]`` logarithm of the summed weights of the draft's tokens that begin with each token of
            the target; ``-inf`` for those that no likely token begins with.
        draft_ids: ``[tokens]`` the draft's tokens that were translated.
        first_ids: ``[tokens]`` for each the first of its tokens to the target.
        draft_logits: ``[tokens]`` for each what the draft gave it.
    """

    logits: FloatArray
    draft_ids: Int64Array
    first_ids: Int64Array
    draft_logits: FloatArray

    def likeliest(self, first_id: int) -> int:
        """Return the draft's likeliest token that begins with a token of the target."""
        of_group = np.flatnonzero(self.first_ids == first_id)
        return int(self.draft_ids[of_group[self.draft_logits[of_group].argmax()]])


class TokenMapping:
    """A draft's tokens as tokens of a target.

    Args:
        target: the target's vocabulary.
        draft: the draft's.
        pairs: spellings of a token of the draft and of the token of the target that it stands for, asked for by a user.

    Attributes:
        target: turns bytes into the target's tokens.
        draft: turns bytes into the draft's tokens.
        num_shared: bytes that are a token to both.

    Raises:
        InputError: a spelling of ``pairs`` is no token.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, pairs: Iterable[tuple[str, str]] = ()) -> None:
        self.target, self.draft = ExactTokenizer(target), ExactTokenizer(draft)
        self._by_bytes: dict[bytes, int | list[int]] = {}
        for token_id in range(target.size):
            piece = target.token_bytes(token_id)
            if piece:
                known = self._by_bytes.setdefault(piece, token_id)
                if known is not token_id and known != token_id:
                    self._by_bytes[piece] = [*known, token_id] if isinstance(known, list) else [known, token_id]
        spelled = [(draft.token_bytes(token_id), token_id) for token_id in range(draft.size)]
        in_order = sorted(pair for pair in spelled if pair[0])
        self._sorted_bytes = [piece for piece, _ in in_order]
        self._sorted_ids = np.array([token_id for _, token_id in in_order], dtype=np.int64)
        self.num_shared = len({piece for piece in self._sorted_bytes if piece in self._by_bytes})
        self._tokens: dict[int, tuple[int, ...]] = {}
        self._first = np.full(draft.size, _UNKNOWN, dtype=np.int64)
        self._control = self._match_control()
        for of_draft, of_target in self._match_pairs(pairs):
            self._control[of_target] = of_draft
            self._know(of_draft, (of_target,))
        for of_target, of_draft in self._control.items():
            if of_draft not in self._tokens:
                self._know(of_draft, (of_target,))

    def control_id(self, target_id: int) -> int | None:
        """Return the draft's token for a control token of the target; ``None`` where there is none."""
        return self._control.get(target_id)

    def target_tokens(self, draft_id: int) -> tuple[int, ...]:
        """Return what a token of the draft is to the target; empty where that has no tokens of these bytes."""
        known = self._tokens.get(draft_id)
        if known is None:
            known = self._translate(self.draft.vocabulary.token_bytes(draft_id))
            self._know(draft_id, known)
        return known

    def project(self, row: FloatArray) -> ProjectedRow | None:
        """Return a row of the draft ``[draft vocab]`` as one of the target; ``None`` where no likely token is one.

        Raises:
            EngineError: the row's largest logit is not a finite number.
        """
        row = row[: len(self._first)]
        head = np.flatnonzero(row >= finite_top(row) - _RANGE_NATS)
        if len(head) > _MAX_TRANSLATED:
            head = np.sort(largest(row, _MAX_TRANSLATED)[:_MAX_TRANSLATED])
        first = self._first[head]
        unknown = first == _UNKNOWN
        if unknown.any():
            for draft_id in head[unknown]:
                self.target_tokens(int(draft_id))
            first = self._first[head]
        is_translated = first != _NOTHING
        if not is_translated.any():
            return None
        return self.gather(head[is_translated], first[is_translated], row[head[is_translated]])

    def gather(self, draft_ids: Int64Array, first_ids: Int64Array, logits: FloatArray) -> ProjectedRow:
        """Return the row of the target in which tokens of the draft weigh for their first token each."""
        top = logits.max()
        groups, of_group = np.unique(first_ids, return_inverse=True)
        weights = np.bincount(of_group.ravel(), np.exp((logits - top).astype(np.float64)), len(groups))
        row = np.full(self.target.vocabulary.size, -np.inf, dtype=logits.dtype)
        row[groups] = np.log(weights) + top
        return ProjectedRow(row, draft_ids, first_ids, logits)

    def draft_id(self, piece: bytes) -> int | None:
        """Return the draft's token of some bytes, if there is one."""
        place = bisect.bisect_left(self._sorted_bytes, piece)
        is_token = place < len(self._sorted_bytes) and self._sorted_bytes[place] == piece
        return int(self._sorted_ids[place]) if is_token else None

    def extensions(self, start: bytes) -> Int64Array:
        """Return the draft's tokens whose bytes begin with ``start`` and go on."""
        first = bisect.bisect_right(self._sorted_bytes, start)
        bare = start.rstrip(b"\xff")
        last = (
            bisect.bisect_left(self._sorted_bytes, bare[:-1] + bytes([bare[-1] + 1]))
            if bare
            else len(self._sorted_bytes)
        )
        return self._sorted_ids[first:last]

    def space_after(self, piece: bytes) -> bytes:
        """Return the space that a draft has left to the word after an indentation, which the target counts to it."""
        is_indentation = len(piece) > 1 and piece.isspace() and piece.endswith(b" ")
        return b" " if is_indentation and self.draft.joins_space else b""

    def _know(self, draft_id: int, token_ids: tuple[int, ...]) -> None:
        self._tokens[draft_id] = token_ids
        self._first[draft_id] = token_ids[0] if token_ids else _NOTHING
        piece = self.draft.vocabulary.token_bytes(draft_id)
        space = self.space_after(piece)
        if space:
            whole = self._translate(piece + space)
            self._first[draft_id] = whole[0] if whole else self._first[draft_id]

    def _translate(self, piece: bytes) -> tuple[int, ...]:
        if not piece:
            return ()
        known = self._by_bytes.get(piece)
        if isinstance(known, int):
            return (known,)
        token_ids = self.target.continuation(piece)
        if known is None:
            return tuple(token_ids or ())
        return (token_ids[0],) if token_ids is not None and len(token_ids) == 1 else (known[0],)

    def _match_control(self) -> dict[int, int]:
        """Return the draft's control tokens by the target's that they stand for."""
        target, draft = self.target.vocabulary, self.draft.vocabulary
        theirs: dict[bytes, int] = {}
        for token_id in sorted(draft.control_ids):
            spelling = draft.token_spelling(token_id)
            if spelling:
                theirs.setdefault(spelling, token_id)
        matched: dict[int, int] = {}
        for token_id in sorted(target.control_ids):
            spelling = target.token_spelling(token_id)
            of_draft = theirs.get(spelling) if spelling else None
            if of_draft is None and spelling:
                of_draft = _in_role(spelling, theirs)
            if of_draft is None and token_id in target.end_ids and draft.end_ids:
                of_draft = min(draft.end_ids)
            if of_draft is not None:
                matched[token_id] = of_draft
        ours, its = self.target.opening_ids, self.draft.opening_ids
        if len(ours) == len(its) == 1:
            matched.setdefault(ours[0], its[0])
        return matched

    def _match_pairs(self, pairs: Iterable[tuple[str, str]]) -> list[tuple[int, int]]:
        target, draft = self.target.vocabulary, self.draft.vocabulary
        found = []
        for ours, its in pairs:
            asked = f"`DraftOptions.token_map` {ours}={its}"
            of_draft, of_target = _token_spelled(draft, ours), _token_spelled(target, its)
            for token_id, whose, spelling in ((of_draft, "draft", ours), (of_target, "target", its)):
                if token_id is None:
                    raise InputError(
                        f"{asked}: the {whose} has no token {spelling!r}; give the draft's token, =, and the target's"
                    )
            assert of_draft is not None
            assert of_target is not None
            if draft.token_bytes(of_draft) and target.token_bytes(of_target):
                raise InputError(f"{asked}: both are text, which is translated as it is spelled; leave it out")
            found.append((of_draft, of_target))
        return found


def check_translation(mapping: TokenMapping) -> None:
    """Raise unless what a draft says can be said in the target's tokens.

    Raises:
        VocabularyMismatchError: with what is in the way, and the way out.
    """
    way_out = "choose another draft, or draft without a model (`drafters=['suffix']`)"
    probe = _PROBE.encode()
    for tokenizer, whose in ((mapping.target, "target"), (mapping.draft, "draft")):
        if tokenizer.continuation(probe) is None:
            raise VocabularyMismatchError(
                f"the draft model speaks other tokens than the target, and they cannot be translated: the {whose}'s "
                f"{tokenizer.vocabulary.kind} tokenizer does not give a text back as it was; {way_out}"
            )
    if not mapping.num_shared:
        raise VocabularyMismatchError(
            "the draft model speaks other tokens than the target, and they cannot be translated: no token of the one "
            f"spells what a token of the other does; {way_out}"
        )


def _in_role(spelling: bytes, theirs: dict[bytes, int]) -> int | None:
    text = spelling.decode("utf-8", "replace")
    for role in _ROLES:
        if text in role:
            return next((theirs[other.encode()] for other in sorted(role) if other.encode() in theirs), None)
    return None


def _token_spelled(vocabulary: Vocabulary, spelling: str) -> int | None:
    wanted = spelling.encode()
    return next((i for i in range(vocabulary.size) if vocabulary.token_spelling(i) == wanted), None)
