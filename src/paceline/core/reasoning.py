"""How long an answer may reason, and the tokens that end its reasoning once the budget is spent.

With a budget of 3 tokens, a start of one and an end of two::

    answer     <think>  a  b  c  </  think>  Paris  .
                 │      1  2  3  └ forced ┘  └ free again
                 └ opens the reasoning

What is forced is a function of the tokens before it, drafted ancestors included. So drafts are judged by the same rows
as plain decoding has, and the text stays that of plain decoding.

Reasoning may be ended from outside as well, while an answer is written. That counts as a budget which is spent at the
place where it was asked for, so what is forced is a function of the tokens before it and of those places::

    answer     <think>  a  b  │  </  think>  Paris  .
                              └ asked for here, between two rounds
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from paceline.core.errors import SamplingError
from paceline.core.numbers import token_ids, truth_value, whole_number

_NEVER: Final = sys.maxsize
"""Where a budget of any number of tokens is spent."""


@dataclass(frozen=True, slots=True)
class ReasoningBudget:
    """How many tokens an answer may spend on reasoning.

    Reasoning that ends earlier is left alone, and so is an answer that never opens any. Every reasoning of an answer
    has the whole budget. A character that is cut off by the budget is not completed: it is U+FFFD in the text.

    Attributes:
        tokens: most tokens of one reasoning, markers not counted; 0 ends it as soon as it is open. ``None`` is any
            number: what is said of the markers lets the reasoning be ended while the answer is written.
        start: tokens that open it, looked for in the answer; empty only where it is ``begun``.
        end: tokens that close it, at least one.
        begun: whether the prompt opened it, so that the first token of the answer is the first one counted.
        forced: tokens that are written once the budget is spent, such as a message and ``end``; empty for ``end``.
            Where the reasoning's last tokens are the beginning of these, only the rest is written.
    """

    tokens: int | None
    start: tuple[int, ...]
    end: tuple[int, ...]
    begun: bool = False
    forced: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tokens is not None:
            tokens = whole_number(self.tokens, "the reasoning budget", SamplingError)
            if tokens < 0:
                raise SamplingError(
                    f"a reasoning budget of {tokens} tokens: give 0 or more, or none at all for reasoning without a "
                    "limit"
                )
            object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "begun", truth_value(self.begun, "begun of the reasoning budget", SamplingError))
        for name in ("start", "end", "forced"):
            object.__setattr__(
                self, name, token_ids(getattr(self, name), f"{name} of the reasoning budget", SamplingError)
            )
        if not self.end:
            raise SamplingError("a reasoning budget needs the tokens that end the reasoning: give at least one as end")
        if not self.start and not self.begun:
            raise SamplingError(
                "a reasoning budget needs to know where reasoning starts: give the tokens that open it as start, or "
                "begun=True where the prompt ends inside of it"
            )

    @property
    def closing(self) -> tuple[int, ...]:
        """Tokens that are written once the budget is spent."""
        return self.forced or self.end


class _Turn(NamedTuple):
    """A place where reasoning was opened or closed: after ``position`` tokens, which alone decide it.

    ``opens`` says whether reasoning is open from here on.
    """

    position: int
    opens: bool


class BudgetKeeper:
    """Says which token has to come next, for one request.

    The turns of the latest history are remembered. Another history is compared with that one, token by token, and is
    read only from where the two part. So what is said depends on the history alone, and on where an end was asked for.

    Args:
        budget: how long the request may reason.
        num_prompt: tokens of every history that are the prompt; no marker is looked for in them.
        opens_once: whether reasoning is opened by the first tokens of an answer only, as where the rest of it keeps to
            a grammar. What looks like a marker there is text.
    """

    def __init__(self, budget: ReasoningBudget, num_prompt: int, *, opens_once: bool = False) -> None:
        self._budget = budget
        self._opens_once = opens_once
        self._num_prompt = num_prompt
        # No budget can be spent in a shorter history.
        self._shortest = _NEVER
        if budget.tokens is not None:
            self._shortest = num_prompt + budget.tokens + (0 if budget.begun else len(budget.start))
        # Lengths of the histories at which an open reasoning was to end, ascending.
        self._ends: list[int] = []
        self._read: list[int] = []
        self._turns = [_Turn(num_prompt, budget.begun)]

    @property
    def may_force(self) -> bool:
        """Whether there is any history after which a token is forced."""
        return self._shortest < _NEVER

    def end(self, history: Sequence[int]) -> bool:
        """End the reasoning that is open after ``history``, if one is, and return whether one is.

        Args:
            history: all tokens so far; those that are asked about later begin with them.
        """
        self._follow(list(history))
        if not self._turns[-1].opens:
            return False
        self._ends.append(len(history))
        self._shortest = min(self._shortest, len(history))
        return True

    def forced(self, history: Sequence[int]) -> int | None:
        """Return the token that has to follow; ``None`` where the choice is free."""
        length = len(history)
        if length < self._shortest:
            return None
        if not isinstance(history, list):
            history = list(history)
        self._follow(history)
        turn = self._turns[-1]
        spent = self._spent(turn.position)
        if not turn.opens or length < spent:
            return None
        return self._budget.closing[self._num_written(history, turn.position) + length - spent]

    def first_end(self, history: list[int]) -> int | None:
        """Return the length of the history at which the reasoning that an answer begins with was closed.

        ``None`` while it is open. Of an answer that begins with none it is that of the prompt. Only of a keeper for
        whom reasoning ``opens_once``.
        """
        self._follow(history)
        turns = self._turns if self._budget.begun else self._turns[1:]
        if not turns:
            return self._num_prompt
        return turns[1].position if len(turns) > 1 else None

    def _follow(self, history: list[int]) -> None:
        """Make the turns those of ``history``. Cut short by an interrupt, it leaves what the next call can start on."""
        known = self._num_prompt + num_common(self._read, history, self._num_prompt)
        turns = self._turns
        del self._read[known - self._num_prompt :]
        while turns[-1].position > known:
            turns.pop()
        for position in range(known + 1, len(history) + 1):
            if self._turns_at(history, position):
                turns.append(_Turn(position, not turns[-1].opens))
        self._read += history[known:]

    def _turns_at(self, history: Sequence[int], position: int) -> bool:
        """Return whether the token before ``position`` opens what is closed, or closes what is open."""
        budget, (since, is_open) = self._budget, self._turns[-1]
        if not is_open:
            if self._opens_once and (budget.begun or position != self._num_prompt + len(budget.start)):
                return False
            return bool(budget.start) and _ends_with(history, since, position, budget.start)
        spent = self._spent(since)
        if position <= spent:
            return _ends_with(history, since, position, budget.end)
        return self._num_written(history, since) + position - spent == len(budget.closing)

    def _spent(self, since: int) -> int:
        """Return the length of the history at which reasoning that was opened at ``since`` has to end."""
        asked = next((end for end in self._ends if end >= since), _NEVER)
        return asked if self._budget.tokens is None else min(since + self._budget.tokens, asked)

    def _num_written(self, history: Sequence[int], since: int) -> int:
        """Return how many tokens of the closing the reasoning that was opened at ``since`` wrote itself at its end."""
        spent, closing = self._spent(since), self._budget.closing
        lengths = range(len(closing) - 1, 0, -1)
        return next((length for length in lengths if _ends_with(history, since, spent, closing[:length])), 0)


def _ends_with(history: Sequence[int], first: int, end: int, wanted: tuple[int, ...]) -> bool:
    """Return whether ``history[first:end]`` ends with ``wanted``, which is not empty."""
    start = end - len(wanted)
    return start >= first and history[end - 1] == wanted[-1] and tuple(history[start:end]) == wanted


def num_common(known: list[int], history: list[int], offset: int) -> int:
    """Return with how many tokens of ``known`` the history goes on after ``offset``.

    Slices are compared, as a loop over the tokens of a long text would take longer than all else about a row.
    """
    low, high = 0, min(len(known), len(history) - offset)
    step = high
    while step:
        if history[offset + low : offset + low + step] == known[low : low + step]:
            low += step
            if low >= high:
                break
        else:
            high = low + step - 1
        step = (high - low + 1) // 2
    return low
