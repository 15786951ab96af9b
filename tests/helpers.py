"""Models, vocabularies, drafters and policies that try to trip the loop up, and plain decoding to compare with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from paceline.core.arrays import Float64Array, FloatArray
from paceline.core.constraint import Constraint
from paceline.core.logprobs import LogprobParams, TokenLogprob
from paceline.core.params import CacheParams, SamplingParams, SpeculationParams, StopRules, VerifierName
from paceline.core.request import Emission, FinishReason, Request, StateSource
from paceline.core.sampling import RowSampler
from paceline.core.stats import OffReason, PlainTimes
from paceline.core.text import TextStream
from paceline.core.tree import ROOT, DraftTree, Evidence
from paceline.core.verify import make_verifier
from paceline.drafters.base import Commit, DraftBudget, Drafter, DraftJob
from paceline.engines.base import Step
from paceline.engines.pending_tree import PendingTree, check_step
from paceline.engines.scripted import HeadRow, LogitFunction, ScriptedEngine, ScriptedOutput, ScriptedVocabulary
from paceline.engines.sequence_pool import Opened, SequencePool
from paceline.engines.state_track import StateTrack, states_for_rows
from paceline.planning.base import Policy, PolicyBase, RoundRecord
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.loop import DecodingLoop

PLAIN_PARAMS = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
"""The model's own distribution: every filter off."""

NO_LOGPROBS = LogprobParams()

CacheHeadFunction: TypeAlias = Callable[[Sequence[int], Sequence[HeadRow]], Any]


class CountingPool(SequencePool):
    """Counts the sequences it opened, those that held something already, and how many tokens those held."""

    opened = hits = reused_tokens = 0

    def open(self, token_ids: Sequence[int], *, most: int | None = None, namespace: str = "") -> Opened:
        opened = super().open(token_ids, most=most, namespace=namespace)
        self.opened += 1
        self.hits += opened.cached > 0
        self.reused_tokens += opened.cached
        return opened


class CacheHead:
    """A scripted head that reads the cache of a scripted target, in that one's sequences, and checks what it is asked.

    Args:
        say: the logits of a row, given the tokens of the target's cache and the rows from the root to it.
        own: the state that a row leaves, given the same.
    """

    description = "scripted head"

    def __init__(self, lender: ScriptedEngine, say: CacheHeadFunction, own: CacheHeadFunction, max_rows: int) -> None:
        self.lender = lender
        self.vocabulary = lender.vocabulary
        # It opens no sequences.
        limits = replace(
            lender.capabilities, max_rows=max_rows, max_outputs=max_rows, max_sequences=0, max_rollback=None
        )
        self.capabilities = replace(limits, trees=True, reads_states=True)
        self._say = say
        self._own = own
        self._pending: dict[int, tuple[PendingTree, list[HeadRow], StateTrack]] = {}
        self.fed: list[list[tuple[int, FloatArray]]] = []

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        assert 0 < sum(len(step.token_ids) for step in steps) <= self.capabilities.max_rows
        prefixes: list[list[list[Any]]] = []
        for step in steps:
            target = self.lender._sequence(step.sequence)
            assert target.committed
            assert not len(target.pending)
            width = self.capabilities.state_width
            known = self._pending.setdefault(step.sequence, (PendingTree(), [], StateTrack(width)))
            pending, rows, track = known
            check_step(step, pending, len(target.committed), self.capabilities)
            read = states_for_rows(step, track, len(pending), width)
            self.fed.append(list(zip(step.token_ids, np.array(read), strict=True)))
            pending.append(step.parents)
            rows += self.fed[-1]
            paths = [pending.path_to(len(rows) - len(step.token_ids) + row) for row in range(len(step.token_ids))]
            track.append(np.stack([self._own(target.committed, [rows[node] for node in path]) for path in paths]))
            prefixes.append([[target.committed[:], [rows[node] for node in paths[row]]] for row in step.outputs])
        return ScriptedOutput(lambda prefix: self._say(*prefix), prefixes)

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        assert not path
        self._pending.pop(sequence, None)

    def close(self) -> None:
        pass


BlockFunction: TypeAlias = Callable[[Sequence[HeadRow], int, Sequence[int]], Float64Array]
"""A head of blocks: takes the rows of a text, its last token and drafts, and returns the logits of the next token."""


class BlockHead(ScriptedEngine):
    """A scripted head that says a block of tokens in one pass, and checks what it is asked.

    Args:
        say: the function.
        size: tokens of a block.
    """

    def __init__(self, say: BlockFunction, vocabulary: ScriptedVocabulary, *, size: int, **limits: Any) -> None:
        super().__init__(lambda rows: np.zeros(0), vocabulary, reads_states=True, trees=False, **limits)
        self.block_size = size
        self.block_rows = size + 1
        self.num_blocks = 0
        self._say = say

    def forward(self, steps: Sequence[Step]) -> ScriptedOutput:
        assert all(step.states is not None and not step.outputs for step in steps)
        return super().forward(steps)

    def draft_blocks(self, roots: Sequence[tuple[int, int]]) -> list[ScriptedBlock]:
        rows = len(roots) * self.block_rows
        assert 0 < rows <= self.capabilities.max_rows
        assert len({sequence for sequence, _ in roots}) == len(roots)
        used = self._take_cells(rows)
        self._num_passes += 1
        self.num_blocks += len(roots)
        blocks = []
        for sequence, root in roots:
            state = self._sequence(sequence)
            assert state.committed
            assert not len(state.pending)
            assert len(state.committed) + self.block_rows <= self.capabilities.context_length
            blocks.append(ScriptedBlock(self, list(state.committed), root))
        self.clock.advance(self._cost(rows, used))
        return blocks


class ScriptedBlock:
    """What a :class:`BlockHead` says behind a text and a root."""

    def __init__(self, head: BlockHead, rows: list[HeadRow], root: int) -> None:
        self._head, self._rows, self._root = head, rows, root
        self._pass = head._num_passes

    def logits(self, drafted: Sequence[int]) -> Float64Array:
        assert self._pass == self._head._num_passes, "a block is read after another pass"
        assert len(drafted) < self._head.block_size
        return self._head._say(self._rows, self._root, drafted)

    def confidence(self, drafted: Sequence[int]) -> float | None:
        return None


def frozen(model: LogitFunction, dtype: type[np.floating[Any]] = np.float64) -> LogitFunction:
    """Return ``model`` with read-only rows, as engines lend theirs: writing to one is a fault."""

    def logits(tokens: Sequence[int]) -> Float64Array:
        row: Float64Array = model(tokens).astype(dtype)
        row.setflags(write=False)
        return row

    return logits


def looping_model(vocab_size: int, base: LogitFunction, *, period: int, pull: float) -> LogitFunction:
    """Return ``base`` with the token ``period`` places back made more likely: text that repeats itself."""

    def logits(tokens: Sequence[int]) -> Float64Array:
        row: Float64Array = base(tokens).copy()
        row[tokens[-period] if len(tokens) >= period else tokens[0]] += pull
        return row

    return logits


def resized(model: LogitFunction, vocab_size: int, size: int) -> LogitFunction:
    """Return ``model`` over ``vocab_size`` tokens with the last ids missing, or padded by ids that it finds likely."""

    def logits(tokens: Sequence[int]) -> Float64Array:
        row = model([token % vocab_size for token in tokens])
        padded: Float64Array = np.concatenate((row, np.full(max(0, size - vocab_size), row.max())))
        return padded[:size]

    return logits


def softmax(logits: Float64Array) -> Float64Array:
    weights = np.exp(logits - logits.max())
    probs: Float64Array = weights / weights.sum()
    return probs


@dataclass
class Answer:
    """What came of one request."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    constraint: Constraint | None = None

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.token_ids[: self.request.num_prompt]

    def take(self, emission: Emission) -> None:
        assert emission.request is self.request
        assert len(emission.sources) == len(emission.token_ids)
        if self.request.logprob_params.logprobs is None:
            assert emission.logprobs == ()
        else:
            assert [one.token_id for one in emission.logprobs] == emission.token_ids
        assert self.finish_reason is None, "an emission after the last one"
        self.token_ids += emission.token_ids
        self.sources += emission.sources
        self.logprobs += emission.logprobs
        self.text += "".join(segment.text for segment in emission.segments)
        self.finish_reason = emission.finish_reason
        assert emission.finish_reason == self.request.finish_reason
        assert self.token_ids == self.request.output_ids
        assert self.logprobs == self.request.logprobs


def decode(
    engine: ScriptedEngine,
    prompt_ids: Sequence[int],
    params: SamplingParams = PLAIN_PARAMS,
    rules: StopRules | None = None,
    *,
    drafters: Sequence[Drafter] = (),
    policy: Policy = NO_SPECULATION,
    verifier: VerifierName = "coupled",
    logprobs: LogprobParams = NO_LOGPROBS,
    constraint: Constraint | None = None,
) -> Answer:
    """Decode one request in a loop of its own; by default plainly."""
    loop = DecodingLoop(engine, drafters, policy, clock=engine.clock)
    speculation = SpeculationParams(verify=verifier)
    request = loop.add(prompt_ids, params, rules or StopRules(), speculation, logprobs=logprobs, constraint=constraint)
    answer = Answer(request, constraint=constraint)
    while answer.finish_reason is None:
        for emission in loop.step():
            answer.take(emission)
    return answer


def drain(loop: DecodingLoop) -> list[Emission]:
    """Run a loop until nothing is left to do, and return all emissions."""
    emissions = []
    while loop.active:
        emissions += loop.step()
    return emissions


def text_of(vocabulary: ScriptedVocabulary, token_ids: Sequence[int], rules: StopRules) -> str:
    """Return the text of an answer that was ended from outside after ``token_ids``."""
    stream = TextStream(rules.stop)
    segments = []
    for token_id in token_ids:
        if token_id in rules.preserved_ids:
            segments += stream.push(vocabulary.token_spelling(token_id) or b"", "")
            continue
        segments += stream.push(vocabulary.token_bytes(token_id), "")
        if token_id in vocabulary.end_ids:
            segments += stream.push_control(vocabulary.token_spelling(token_id) or b"", "")
    return "".join(segment.text for segment in segments + stream.flush())


class ForcedDrafter:
    """Drafts what a test tells it to: a function from the request to paths, each from below the root downwards."""

    end_ids: frozenset[int] = frozenset()

    def __init__(self, paths: Callable[[Request], Sequence[Sequence[int]]], name: str = "forced") -> None:
        self.name = name
        self._paths = paths
        self.commits: list[Commit] = []
        self.active: set[int] = set()

    def begin(self, request: Request) -> None:
        self.active.add(request.id)

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        for job in jobs:
            for path in self._paths(job.request):
                node = ROOT
                for token_id in path[: job.budget.max_depth]:
                    node = job.tree.add(node, token_id, self.name)
        return [False] * len(jobs)

    def observe(self, request: Request, commit: Commit) -> None:
        self.commits.append(commit)

    def end(self, request: Request) -> None:
        self.active.remove(request.id)

    def close(self) -> None:
        self.active.clear()


class ScribblingDrafter:
    """Drafts wild trees: deep, wide, with duplicates, over several calls, right about the future now and then.

    Args:
        rng: its whims.
        vocab_size: token ids it may write.
        futures: what plain decoding says, by prompt: the source of its lucky guesses.
        branching: whether the engine takes trees.
        luck: chance of a right guess.
        most_nodes: nodes it adds in one call.
    """

    name = "scribble"
    end_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        rng: random.Random,
        vocab_size: int,
        futures: dict[tuple[int, ...], Sequence[int]],
        *,
        branching: bool,
        luck: float,
        most_nodes: int,
    ) -> None:
        self._rng = rng
        self._vocab_size = vocab_size
        self._futures = futures
        self._branching = branching
        self._luck = luck
        self._most_nodes = most_nodes
        self._active: set[int] = set()

    def begin(self, request: Request) -> None:
        assert request.id not in self._active
        self._active.add(request.id)

    def unread(self, request: Request) -> None:
        """There is no model."""

    def grow(self, jobs: Sequence[DraftJob]) -> list[bool]:
        return [self._scribble(job) for job in jobs]

    def observe(self, request: Request, commit: Commit) -> None:
        """Check what every drafter may rely on."""
        assert request.id in self._active
        assert len(commit.token_ids) == len(commit.path) + 1
        assert request.token_ids[-len(commit.token_ids) :] == list(commit.token_ids)
        assert [commit.tree.token_ids[node] for node in commit.path] == list(commit.token_ids[:-1])
        for node in (ROOT, *commit.path):
            assert np.isfinite(commit.rows.logits(node).max())

    def end(self, request: Request) -> None:
        self._active.remove(request.id)

    def close(self) -> None:
        self._active.clear()

    def _scribble(self, job: DraftJob) -> bool:
        rng, tree, request = self._rng, job.tree, job.request
        future = self._futures[tuple(request.token_ids[: request.num_prompt])]
        node = len(tree) - 1
        for _ in range(rng.randint(0, self._most_nodes)):
            if self._branching and rng.random() < 0.4:
                node = rng.randrange(len(tree))
            depth = tree.depths[node]
            if depth >= job.budget.max_depth:
                if not self._branching:
                    break
                node = ROOT
                depth = 0
            ahead = request.num_output + depth
            if ahead < len(future) and rng.random() < self._luck:
                token_id = future[ahead]
            else:
                token_id = rng.randrange(self._vocab_size)
            evidence = Evidence(rng.random(), rng.randint(0, 9), rng.randint(0, 9))
            child = tree.add(node, token_id, self.name, evidence)
            if self._branching and rng.random() < 0.2:
                assert tree.add(node, token_id, self.name) == child
            if not self._branching or rng.random() < 0.8:
                node = child
        return rng.random() < 0.3


@dataclass(frozen=True)
class Told:
    """An observer that hands rounds to a function."""

    observe: Callable[[RoundRecord], None]


class WatchingPolicy(PolicyBase):
    """Another policy, and a count of what the walks did, from the trees and paths themselves.

    A policy does not hear of the drafts of requests that have another one, so that the loop's observers count.

    Attributes:
        observers: for the loop.
        partial: by request id, rounds in which at least one draft was accepted and emitted, and the walk then left
            the tree although more was drafted where it stood.
        active: requests that began and have not ended.
    """

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.observers = [Told(self.count)]
        self._num_output: Counter[int] = Counter()
        self.active: set[int] = set()
        self.partial: Counter[int] = Counter()

    def check(self, request: Request) -> None:
        self._inner.check(request)

    def begin(self, request: Request) -> None:
        assert request.id not in self.active
        self.active.add(request.id)
        self._inner.begin(request)

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        self._num_output = Counter({request.id: request.num_output for request in requests})
        return self._inner.budgets(requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        return self._inner.choose(drafter, jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        self._inner.select(requests, trees)

    def observe(self, record: RoundRecord) -> None:
        for request, emitted in zip(record.requests, record.emitted, strict=True):
            assert request.id in self.active, "observed after its end"
            # It is not asked in rounds that read prompts, too.
            assert emitted == request.num_output - self._num_output.get(request.id, request.num_output - emitted)
        self._num_output = Counter()
        self._inner.observe(record)

    def count(self, record: RoundRecord) -> None:
        for request, tree, path, emitted in zip(
            record.requests, record.trees, record.paths, record.emitted, strict=True
        ):
            left_the_tree = bool(path) and len(tree.candidates(path[-1])) > 0
            if left_the_tree and emitted == len(path) + 1:
                self.partial[request.id] += 1

    def plain_round(self, record: RoundRecord) -> PlainTimes | None:
        return self._inner.plain_round(record)

    def off_reason(self, request: Request) -> OffReason:
        return self._inner.off_reason(request)

    def end(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.active.remove(request.id)
        self._inner.end(request)


class MoodyPolicy(PolicyBase):
    """Changes its mind every round: budgets, whole requests, levels, and which nodes are verified."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def check(self, request: Request) -> None:
        """Anything goes under coupled."""

    def begin(self, request: Request) -> None:
        """Nothing is kept."""

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        rng = self._rng
        return [
            None
            if rng.random() < 0.1
            else DraftBudget(rng.randint(0, 10), rng.randint(1, 3), rng.choice((0.0, 0.0, rng.random())))
            for _ in requests
        ]

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        return [job for job in jobs if self._rng.random() < 0.9]

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        for tree in trees:
            if self._rng.random() < 0.5:
                share = self._rng.random()
                kept = {ROOT}
                for node in range(1, len(tree)):
                    if tree.parents[node] in kept and self._rng.random() < 1 - 0.4 * share:
                        kept.add(node)
                tree.keep(kept)

    def observe(self, record: RoundRecord) -> None:
        """Learn nothing."""

    def end(self, request: Request) -> None:
        """Nothing is kept."""


def request_of(
    token_ids: Sequence[int],
    params: SamplingParams = PLAIN_PARAMS,
    *,
    request_id: int = 0,
    verifier: VerifierName = "coupled",
    max_tokens: int = 1000,
    namespace: str = "",
    cache_prompt: bool = True,
    constraint: Constraint | None = None,
    cached: int | None = None,
    prediction: Sequence[int] = (),
    target: StateSource | None = None,
    sequence: int = 0,
) -> Request:
    """Return a request outside any loop, for testing what only reads it; its cache holds all but the last token.

    That is ``sequence`` of ``target``, where one is given.
    """
    request = Request(
        request_id,
        token_ids,
        params,
        StopRules(max_tokens),
        SpeculationParams(verify=verifier, prediction=tuple(prediction)),
        make_verifier(verifier, RowSampler(params, len(token_ids), constraint)),
        CacheParams(cache_prompt, namespace),
    )
    request.sequence = sequence
    request.target = target
    request.cached = len(token_ids) - 1 if cached is None else cached
    return request


def unsay(request: Request, num_tokens: int) -> None:
    """Take back what a request outside any loop said after its first ``num_tokens`` tokens, as its loop would have."""
    del request.token_ids[num_tokens:]
    request.cached = num_tokens - 1


def say(request: Request, *token_ids: int) -> None:
    """Let a request outside any loop go on with ``token_ids``, as its loop would have."""
    request.token_ids.extend(token_ids)
    request.cached = len(request.token_ids) - 1
