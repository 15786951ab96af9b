"""Prompt lookup: copy what followed the last few tokens earlier in the text, and stay with what is being copied.

Where the text's end was seen before, what followed its latest occurrence is proposed (as in transformers). Text that
repeats a passage with changes, as edited files and records do, gets two things more. A long copy is followed for as
long as it is right, even where its last few tokens came again later. And where it breaks off, the place is remembered:
behind another word, an insertion or a deletion the text mostly goes on near there, so a match there is preferred to
one elsewhere, and soon behind a very long copy a single token is a match::

    passage   ... def area ( width , height ) : return width * height
    answer    ... def area ( width , height , unit ) : return width * height
                                           ^          ^
                           the copy breaks off here   goes on here: ")" is near, though ", unit )" was never seen

A text that a request predicts is such a passage too. It counts as being copied from before the answer begins, so its
beginning is proposed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from weakref import WeakValueDictionary

from paceline.core.errors import InputError
from paceline.core.request import Request
from paceline.core.tree import ROOT, Evidence
from paceline.drafters.base import Commit, DraftJob

FIRST_MATCH_PROBABILITY = 0.5
"""What one earlier sighting of a continuation counts as, by Laplace's rule."""

COPY_LENGTH: Final = 8
"""Tokens that make a match a copy: it is followed, and where it breaks off is remembered."""

RESUMED_LENGTH: Final = 3
"""Tokens that make a match near there the same copy going on."""

CLEAR_COPY_LENGTH: Final = 16
"""Tokens of a copy behind which one token near where it broke off is a match ..."""

SHORT_CHANGE: Final = 8
"""... for this many tokens."""

LONGEST_CHANGE: Final = 64
"""Tokens behind its end after which a copy is over for good."""

_BEHIND, _AHEAD = 16, 32
"""How far from where it broke off, and from where it would stand by now, a copy is looked for."""

PREDICTION: Final = "prediction"
"""Name of the drafter of predictions in reports and choices."""

_BORDER: Final = -1
"""Stands between a prediction and the answer: no token is equal to it, so no copy goes on across it."""


class _NgramIndex:
    """Where each n-gram of a growing text last ended, for n up to ``longest``."""

    __slots__ = ("__weakref__", "_ends", "_length", "longest")

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self._ends: dict[tuple[int, ...], int] = {}
        self._length = 0

    def follow(self, token_ids: Sequence[int], length: int) -> None:
        """Index the n-grams that end before the last of the first ``length`` tokens: those with a continuation."""
        for end in range(max(1, self._length), length):
            for n in range(1, min(self.longest, end) + 1):
                self._ends[tuple(token_ids[end - n : end])] = end
        self._length = length

    def find(self, token_ids: Sequence[int], length: int, shortest: int) -> _Match | None:
        """Return the latest indexed occurrence of the longest n-gram at the end of the first ``length`` tokens."""
        for n in range(min(self.longest, length - 1), shortest - 1, -1):
            start = self._ends.get(tuple(token_ids[length - n : length]))
            if start is not None:
                return _Match(start, n)
        return None


class _Match(NamedTuple):
    """Where the text's end occurred before.

    Attributes:
        start: index of what followed there.
        length: tokens known to be the same.
        resumed: whether it is near where a copy broke off.
    """

    start: int
    length: int
    resumed: bool = False


class _Copy:
    """A passage that the text repeats, or did not long ago.

    Args:
        match: where it stands.
        length: tokens of the text so far.

    Attributes:
        source: index of what comes next in the passage.
        end: tokens of the text up to where it was repeated.
        copied: tokens repeated, changes aside.
    """

    __slots__ = ("copied", "end", "source")

    def __init__(self, match: _Match, length: int) -> None:
        self.source = match.start
        self.end = length
        self.copied = match.length

    def follow(self, token_ids: Sequence[int], length: int) -> bool:
        """Return whether it is repeated up to the last of the first ``length`` tokens, which is the only new one."""
        if self.end < length - 1 or token_ids[self.source] != token_ids[length - 1]:
            return False
        self.source += 1
        self.end += 1
        self.copied += 1
        return True

    def resumption(self, token_ids: Sequence[int], length: int, longest: int, stop: int) -> _Match | None:
        """Return the longest match of the text's end near where the copy broke off; of equal ones the nearest.

        It begins before index ``stop``.
        """
        last_token = token_ids[length - 1]
        # Where the copy would stand if the new tokens had replaced as many of its own.
        expected = self.source + length - self.end
        # Matches within the new tokens have nothing to do with the copy.
        place, stop = max(self.source - _BEHIND, 0), min(expected + _AHEAD, self.end, stop)
        best, best_rank = None, (0, 0)
        while True:
            try:
                place = token_ids.index(last_token, place, stop) + 1
            except ValueError:
                return best
            same = _same_before(token_ids, place, length, longest)
            rank = (same, -abs(place - expected))
            if best is None or rank > best_rank:
                best, best_rank = _Match(place, same, resumed=True), rank


class _History:
    """A request's text as it was read: what it repeats depends on the text alone, not on when it is asked.

    Args:
        index: of n-grams of the passage that the text repeats, if it repeats anything.
        shortest: fewest tokens of one that counts.
        num_predicted: tokens of that passage, which comes before the text. ``None``: the text repeats itself.
    """

    __slots__ = ("_copy", "_index", "_length", "_match", "_num_predicted", "_shortest")

    def __init__(self, index: _NgramIndex, shortest: int, num_predicted: int | None = None) -> None:
        self._index = index
        self._shortest = shortest
        self._copy: _Copy | None = None
        self._match: _Match | None = None
        self._length = 0
        self._num_predicted = num_predicted
        if num_predicted is not None:
            self._length = num_predicted + 1
            self._match = _Match(start=0, length=0)
            self._copy = _Copy(self._match, self._length)

    def read(self, token_ids: Sequence[int], num_prompt: int) -> _Match | None:
        """Read what is new in a text and return what its end repeats; what the prompt repeats is its own affair."""
        for length in range(max(self._length + 1, num_prompt), len(token_ids) + 1):
            if self._num_predicted is None:
                self._index.follow(token_ids, length)
            self._match = self._find_repeat(token_ids, length)
        self._length = len(token_ids)
        return self._match

    def _find_repeat(self, token_ids: Sequence[int], length: int) -> _Match | None:
        copy = self._copy
        if copy is not None and copy.follow(token_ids, length):
            return _Match(copy.source, copy.copied)
        match = self._index.find(token_ids, length, self._shortest)
        if copy is not None:
            changed = length - copy.end
            if changed > LONGEST_CHANGE:
                self._copy = copy = None
            else:
                stop = length if self._num_predicted is None else self._num_predicted
                near = copy.resumption(token_ids, length, self._index.longest, stop)
                is_clear = self._num_predicted is not None or copy.copied >= CLEAR_COPY_LENGTH
                one_will_do = is_clear and changed <= SHORT_CHANGE
                least = match.length if match is not None else 1 if one_will_do else self._shortest
                if near is not None and near.length >= least:
                    match = near
        if match is None:
            return None
        same = _same_before(token_ids, match.start, length, COPY_LENGTH)
        match = match._replace(length=max(same, match.length))
        if same >= COPY_LENGTH:
            self._copy = _Copy(match, length)
        elif copy is not None and match.resumed and same >= RESUMED_LENGTH:
            self._copy = _Copy(match._replace(length=copy.copied + same), length)
        return match


def _same_before(token_ids: Sequence[int], start: int, length: int, most: int) -> int:
    """Return how many tokens before ``start`` are those at the end of the first ``length``, up to ``most``."""
    same = 0
    while same < min(most, start) and token_ids[start - 1 - same] == token_ids[length - 1 - same]:
        same += 1
    return same


class LookupDrafter:
    """Copies from the request's own prompt and answer.

    Args:
        longest_match: most tokens compared; longer matches are not preferred over the latest, but for a copy that is
            being followed.
        min_match: fewest tokens that must match, but for one where a long copy broke off.
    """

    name = "lookup"
    end_ids: frozenset[int] = frozenset()

    def __init__(self, longest_match: int = 4, min_match: int = 2) -> None:
        if not 1 <= min_match <= longest_match:
            raise InputError(f"lookup of {min_match} to {longest_match} tokens: give 1 or more, the shorter first")
        self._longest_match = longest_match
        self._min_match = min_match
        self._histories: dict[int, _History] = {}

    def begin(self, request: Request) -> None:
        self._histories[request.id] = _History(_NgramIndex(self._longest_match), self._min_match)

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Propose whole continuations; a second call has nothing to add."""
        for job in jobs:
            token_ids = job.request.token_ids
            match = self._histories[job.request.id].read(token_ids, job.request.num_prompt)
            if match is None or job.budget.min_probability > FIRST_MATCH_PROBABILITY:
                continue
            evidence = Evidence(FIRST_MATCH_PROBABILITY, match.length, 1, resumed=match.resumed)
            node = ROOT
            period = len(token_ids) - match.start
            for offset in range(job.budget.max_depth):
                # Past the text's end the copy goes on with what it has copied.
                node = job.tree.add(node, token_ids[match.start + offset % period], self.name, evidence)
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        """Nothing to do: the text is read when it is next needed."""

    def end(self, request: Request) -> None:
        del self._histories[request.id]

    def close(self) -> None:
        self._histories.clear()


class PredictionDrafter:
    """Copies from the text that a request predicts, if it predicts one."""

    name = PREDICTION
    end_ids: frozenset[int] = frozenset()

    def __init__(self, longest_match: int = 4, min_match: int = 2) -> None:
        self._longest_match = longest_match
        self._min_match = min_match
        # By request: its prediction, the border and as much of the answer as was read.
        self._texts: dict[int, tuple[list[int], _History]] = {}
        # Several answers to one prompt have the same, which takes 80 ms and some MiB for 32,768 tokens.
        self._indices: WeakValueDictionary[tuple[int, ...], _NgramIndex] = WeakValueDictionary()

    def begin(self, request: Request) -> None:
        """Index the prediction here: what a drafter's first draft takes counts as what reading the prompt takes it."""
        prediction = request.speculation.prediction
        index = self._indices.get(prediction)
        if index is None:
            index = self._indices[prediction] = _NgramIndex(self._longest_match)
            index.follow(prediction, len(prediction))
        self._texts[request.id] = [*prediction, _BORDER], _History(index, self._min_match, len(prediction))

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        """Propose whole continuations; a second call has nothing to add."""
        for job in jobs:
            request = job.request
            text, history = self._texts[request.id]
            num_predicted = len(request.speculation.prediction)
            text += request.token_ids[request.num_prompt + len(text) - num_predicted - 1 :]
            match = history.read(text, 0)
            if match is None or job.budget.min_probability > FIRST_MATCH_PROBABILITY:
                continue
            evidence = Evidence(FIRST_MATCH_PROBABILITY, match.length, 1, resumed=match.resumed)
            node = ROOT
            for token_id in text[match.start : min(match.start + job.budget.max_depth, num_predicted)]:
                node = job.tree.add(node, token_id, self.name, evidence)
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        """Nothing to do: the text is read when it is next needed."""

    def end(self, request: Request) -> None:
        del self._texts[request.id]

    def close(self) -> None:
        self._texts.clear()
