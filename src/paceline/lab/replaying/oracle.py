"""The oracle: the least time in which any policy could have decoded a recording.

It knows the text, so it never verifies a wrong token unless a wider pass is cheaper, and never asks a drafter in vain.
What it may do is what a policy may: ask any of the drafters, the draft model for any number of levels, and verify any
part of the tree that came of it. A share of it is the honest measure of a policy: what is missing to 1 is what not
knowing the future costs, and no rule can be above it.

For one request the search is exact, by dynamic programming over (tokens out, tokens in the draft model's cache): what
a level costs first depends on how much the draft model has to catch up. From every state each choice leads to a later
one, so the earliest arrival at each, in order, is all there is to compute. Under drift the same holds as long as who
starts a pass earlier also ends it earlier, that is, unless costs fall faster than time passes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from paceline.core.arrays import Float64Array
from paceline.core.errors import InputError
from paceline.core.tree import ROOT
from paceline.lab.replaying.recording import Chain, DrafterTrace, Recording
from paceline.lab.replaying.replay import Drift, trace_named
from paceline.planning.base import RoundCosts


def oracle_s(
    recording: Recording,
    costs: RoundCosts,
    *,
    drafters: Sequence[str] | None = None,
    drift: Drift | None = None,
    free_s: float = 0.0,
) -> float:
    """Return the least seconds of decoding any policy could have reached, alone on the machine.

    It takes what :func:`~paceline.lab.replaying.replay.replay` takes. What changes of width cost is left out, so with
    costs that have any it is less than can be reached. Drafters without a model are taken to be asked before the
    draft model.

    Raises:
        InputError: a drafter was not recorded, or there are several draft models, whose caches it cannot follow.
    """
    names = [trace.name for trace in recording.traces] if drafters is None else drafters
    traces = [trace_named(recording, name) for name in names]
    models = [trace for trace in traces if trace.is_model]
    if len(models) > 1:
        raise InputError(f"the oracle follows one draft model, not {len(models)}: name the drafters to replay")
    free = [trace for trace in traces if not trace.is_model]
    search = _Search(recording, costs, free, models[0] if models else None, drift, free_s)
    return search.run(costs.round_s(recording.num_prompt, 0, 1) * (drift(0.0) if drift else 1.0))


class _Search:
    """Earliest arrivals, state by state.

    ``arrivals[t][j]`` is the earliest time at which ``t`` tokens are out and the draft's cache holds the prompt and the
    first ``j`` tokens of the answer, or nothing for ``j = 0``: its cache holds whole prompts or none.
    """

    def __init__(
        self,
        recording: Recording,
        costs: RoundCosts,
        free: Sequence[DrafterTrace],
        model: DrafterTrace | None,
        drift: Drift | None,
        free_s: float,
    ) -> None:
        self._recording = recording
        self._costs = costs
        self._model = model
        self._drift = drift
        self._free_s = free_s
        # Where asking costs nothing, asking all is as good as asking any of them.
        counts = range(len(free) + 1) if free_s > 0 else [len(free)]
        self._asked = [subset for count in counts for subset in itertools.combinations(free, count)]

    def run(self, started_s: float) -> float:
        num_tokens = len(self._recording.token_ids)
        self._arrivals: list[Float64Array] = [np.full(num_tokens + 1, math.inf) for _ in range(num_tokens + 1)]
        self._arrivals[1][0] = started_s
        for done in range(1, num_tokens):
            self._leave(done)
        return float(self._arrivals[num_tokens].min()) - started_s

    def _leave(self, done: int) -> None:
        """Take every choice there is with ``done`` tokens out."""
        recording = self._recording
        position = done - 1
        context = recording.num_prompt + done - 1
        arrivals = self._arrivals[done][:done]
        most_depth = min(recording.depth, recording.max_tokens - done - 1)
        chain: Chain = () if self._model is None else self._model.chains[position][: max(most_depth, 0)]
        text = recording.token_ids[done:]
        followed = _followed(chain, text)
        after = [
            self._arrivals[min(done + accepted + 1, len(recording.token_ids))] for accepted in range(len(text) + 1)
        ]
        rounds_s = [math.nan]
        for asked in self._asked:
            starts = arrivals + self._free_s * len(asked)
            levels_s = self._level_starts(done, starts, len(chain))
            tree = _Tree(text)
            for trace in asked:
                parent = ROOT
                for level in trace.chains[position][: max(most_depth, 0)]:
                    parent = tree.hang(parent, level.token_ids)
            leading = ROOT
            for levels in range(len(chain) + 1):
                if levels:
                    leading = tree.hang(leading, chain[levels - 1].token_ids)
                while len(rounds_s) <= len(tree):
                    rounds_s.append(self._costs.round_s(len(rounds_s), context, 1))
                for accepted in range(len(tree.path)):
                    # Any nodes may fill the pass but those by which the walk would go on.
                    pass_s = min(rounds_s[accepted + 1 : len(tree) - tree.further(accepted) + 1])
                    if levels == 0:
                        ends = starts + pass_s * self._factors(starts)
                        np.minimum(after[accepted][:done], ends, out=after[accepted][:done])
                    else:
                        start_s = levels_s[levels - 1]
                        # Of the chain, the tokens that were fed and accepted stay in the draft's cache.
                        cached = done + min(followed, levels - 1, accepted)
                        end_s = start_s + pass_s * self._factor(start_s)
                        after[accepted][cached] = min(after[accepted][cached], end_s)

    def _level_starts(self, done: int, arrivals: Float64Array, num_levels: int) -> list[float]:
        """Return the earliest time at which 1, 2, ... levels of the model's chain are there."""
        if not num_levels:
            return []
        length = self._recording.num_prompt + done
        first_s = math.inf
        for index in np.argsort(arrivals, kind="stable").tolist():
            arrival = float(arrivals[index])
            # Nobody who arrives later can be there first.
            if arrival >= first_s:
                break
            cached = self._recording.num_prompt + index if index else 0
            cost_s = self._costs.draft_s(length - cached, cached)
            first_s = min(first_s, arrival + cost_s * self._factor(arrival))
        levels_s = [first_s]
        for level in range(1, num_levels):
            levels_s.append(levels_s[-1] + self._costs.draft_s(1, length + level - 1) * self._factor(levels_s[-1]))
        return levels_s

    def _factor(self, now_s: float) -> float:
        return 1.0 if self._drift is None else self._drift(now_s)

    def _factors(self, starts_s: Float64Array) -> Float64Array | float:
        if self._drift is None:
            return 1.0
        return np.array([self._drift(start_s) if start_s < math.inf else 1.0 for start_s in starts_s.tolist()])


class _Tree:
    """What was drafted, and how much of it lies on the text.

    Attributes:
        path: the root and the nodes below it that the text follows.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.path = [ROOT]
        self._text = text
        self._parents = [-1]
        self._children: dict[tuple[int, int], int] = {}
        # Nodes from each node downwards, itself included.
        self._sizes = [1]

    def __len__(self) -> int:
        return len(self._parents)

    def hang(self, parent: int, token_ids: Sequence[int]) -> int:
        """Add a level below a node and return the node that leads on."""
        nodes = [self._add(parent, token_id) for token_id in token_ids]
        return nodes[0]

    def further(self, accepted: int) -> int:
        """Return how many nodes must stay out of the pass if only ``accepted`` tokens are to be accepted."""
        return self._sizes[self.path[accepted + 1]] if accepted + 1 < len(self.path) else 0

    def _add(self, parent: int, token_id: int) -> int:
        node = self._children.get((parent, token_id))
        if node is None:
            node = len(self._parents)
            self._children[parent, token_id] = node
            self._parents.append(parent)
            self._sizes.append(0)
            ancestor = node
            while ancestor >= ROOT:
                self._sizes[ancestor] += 1
                ancestor = self._parents[ancestor]
            # Parents come first, so the path grows at its end.
            depth = len(self.path) - 1
            if parent == self.path[-1] and depth < len(self._text) and token_id == self._text[depth]:
                self.path.append(node)
        return node


def _followed(chain: Chain, text: Sequence[int]) -> int:
    """Return how many of a chain's own tokens, siblings aside, the text follows."""
    for index, (level, token_id) in enumerate(zip(chain, text, strict=False)):
        if level.token_ids[0] != token_id:
            return index
    return min(len(chain), len(text))
