"""Recording: every drafter asked at every position of an answer, through the decoding loop and without the target.

::

    the answer ──> TextVerifier ──┐
                                  ├── DecodingLoop, one for each drafter ──> trees ──> chains of a Recording
    ReplayEngine, for nothing ────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias, Unpack

import numpy as np

from paceline.core.arrays import FloatArray
from paceline.core.clock import VirtualClock
from paceline.core.errors import CapabilityError, InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import FinishReason, Request
from paceline.core.tree import ROOT, DraftTree
from paceline.core.vocabulary import Vocabulary
from paceline.drafters.base import DraftBudget, Drafter, DraftJob
from paceline.drafters.head import CacheHeadDrafter, HeadDrafter
from paceline.engines.base import COMMITTED_END, Engine, Step
from paceline.engines.state_track import MAX_STATES
from paceline.lab.replaying.models import NoteRow, ReplayEngine, TextVerifier
from paceline.lab.replaying.recording import (
    RECORDED_DEPTH,
    RECORDED_SIBLINGS,
    Chain,
    DrafterTrace,
    Level,
    Recording,
)
from paceline.planning.base import PolicyBase, RoundRecord
from paceline.runtime.loop import DecodingLoop

if TYPE_CHECKING:
    from paceline.api import Model
    from paceline.options import GenerateOptions

Report: TypeAlias = Callable[[float], None]
"""Told the share of a recording that is made, from 0 to 1."""


def record(
    model: Model,
    prompt: str | Sequence[int],
    *,
    name: str = "",
    depth: int = RECORDED_DEPTH,
    siblings: int = RECORDED_SIBLINGS,
    report: Report | None = None,
    **options: Unpack[GenerateOptions],
) -> Recording:
    """Decode a prompt plainly, then ask every drafter of ``model`` what it would propose at every position.

    With a draft model that is ``depth`` passes of it for each token of the answer. A replayed policy cannot draft
    deeper, nor with more than ``siblings`` proposals for a position. ``report`` is called in the engine's thread.

    Raises:
        InputError: the prompt or an option cannot be used, or the text would depend on what is drafted.
        CapabilityError: a drafter proposes what a recording cannot hold.
    """
    _check_shape(depth, siblings)
    options["speculate"] = False
    with model.stream(prompt, **options) as stream:
        if not model.repeats_text({"temperature": stream.params.temperature}):
            raise InputError("under rejection the text depends on what is drafted: record with coupled, or greedily")
        generation = stream.result()

    def ask() -> Recording:
        model.pool.make_room()
        return record_answer(
            model.drafters,
            model.target.vocabulary,
            stream.prompt_ids,
            generation.token_ids,
            params=stream.params,
            rules=stream.rules,
            finish_reason=generation.finish_reason,
            name=name,
            depth=depth,
            siblings=siblings,
            report=report,
            target=model.target,
        )

    return model.worker.call(ask)


def record_answer(
    drafters: Sequence[Drafter],
    vocabulary: Vocabulary,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    *,
    params: SamplingParams,
    rules: StopRules,
    finish_reason: FinishReason | None,
    name: str = "",
    depth: int = RECORDED_DEPTH,
    siblings: int = RECORDED_SIBLINGS,
    report: Report | None = None,
    target: Engine | None = None,
    note_row: NoteRow | None = None,
) -> Recording:
    """Ask every drafter what it would propose at every position of an answer that is there already.

    Each drafter has a loop of its own, which decodes the answer without its target (``models.py``), unless it reads the
    target's cache.

    Args:
        drafters: in the order they are asked. They may serve requests of other loops meanwhile, between two rounds.
        params: how the answer was sampled; a draft model's proposals are drawn by them.
        rules: when the answer was to end.
        target: for drafters that read its states; it must have a sequence to spare.
        note_row: told of each token of the answer but the first what row the draft model proposes by.

    Raises:
        InputError: there is no answer, or the depth or the siblings are below 1.
        CapabilityError: a drafter reads the target's rows, or proposes what a recording cannot hold.
    """
    _check_shape(depth, siblings)
    if not answer_ids:
        raise InputError("an answer of no tokens cannot be recorded: give one of at least one token")
    budget = DraftBudget(depth, siblings, probability=True, margin=True)
    notes = [_NotingPolicy(drafter.name, budget) for drafter in drafters]
    loops = []
    for drafter, note in zip(drafters, notes, strict=True):
        engine, states = target, None
        if engine is None or not isinstance(drafter, CacheHeadDrafter):
            if target is not None and isinstance(drafter, HeadDrafter):
                states = _read_states(target, [*prompt_ids, *answer_ids])
            engine = ReplayEngine(_for_nothing, VirtualClock(), vocabulary, states=states)
        loops.append(DecodingLoop(engine, [drafter], note))
    # So long that the last position has drafts as deep as the others.
    unending = StopRules(len(answer_ids) + depth, ignore_end=True)
    with ExitStack() as running:
        for loop in loops:
            running.callback(_cancel_all, loop)
            verifier = TextVerifier(params, len(prompt_ids), answer_ids, note_row)
            loop.add(prompt_ids, params, unending, verifier=verifier)
        # The first round reads the prompt.
        for done in range(len(answer_ids)):
            for loop in loops:
                loop.step()
            if done == 0:
                is_model = [
                    drafter.unread(request) is not None
                    for drafter, loop in zip(drafters, loops, strict=True)
                    for request in loop.active
                ]
            if done and report is not None:
                report(done / (len(answer_ids) - 1))
    return Recording(
        name=name,
        num_prompt=len(prompt_ids),
        token_ids=tuple(answer_ids),
        # A stop text or a full context ends a request where its text ends, whatever was allowed.
        max_tokens=rules.max_tokens if finish_reason == "end" else len(answer_ids),
        ignore_end=rules.ignore_end,
        end_ids=vocabulary.end_ids,
        temperature=params.temperature,
        vocab_size=vocabulary.size,
        depth=depth,
        siblings=siblings,
        traces=tuple(
            DrafterTrace(drafter.name, has_model, drafter.end_ids, tuple(note.chains))
            for drafter, has_model, note in zip(drafters, is_model, notes, strict=True)
        ),
    )


def _read_states(target: Engine, token_ids: Sequence[int]) -> FloatArray:
    """Return the states ``[tokens, width]`` of a text."""
    sequence = target.open()
    rows, found = min(target.capabilities.max_rows, MAX_STATES), []
    try:
        for start in range(0, len(token_ids), rows):
            chunk = token_ids[start : start + rows]
            target.forward([Step(sequence, chunk, range(COMMITTED_END, len(chunk) - 1), ())])
            target.commit(sequence, range(len(chunk)))
            found.append(target.states(sequence, start, start + len(chunk)).copy())
    finally:
        target.close_sequence(sequence)
    return np.concatenate(found)


class _NotingPolicy(PolicyBase):
    """Lets one drafter say all it would, notes that in ``chains``, a position each, and has nothing of it verified."""

    def __init__(self, name: str, budget: DraftBudget) -> None:
        self._name = name
        self._budget = budget
        self.chains: list[Chain] = []

    def check(self, request: Request) -> None:
        """Any request can be recorded whose text is known."""

    def begin(self, request: Request) -> None:
        """There is one request."""

    def budgets(self, requests: Sequence[Request]) -> list[DraftBudget | None]:
        return [self._budget] * len(requests)

    def choose(self, drafter: Drafter, jobs: Sequence[DraftJob]) -> list[DraftJob]:
        """Have every level that the drafter adds."""
        return list(jobs)

    def select(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> None:
        """Note what was proposed, and drop it."""
        for tree in trees:
            self.chains.append(_read_chain(tree, self._name))
            tree.keep((ROOT,))

    def observe(self, record: RoundRecord) -> None:
        """Nothing is learned."""

    def end(self, request: Request) -> None:
        """Keep the chains."""


def _for_nothing(rows: int, context: int, requests: int) -> float:
    return 0.0


def _cancel_all(loop: DecodingLoop) -> None:
    for request in loop.active:
        loop.cancel(request)


def _check_shape(depth: int, siblings: int) -> None:
    if depth < 1 or siblings < 1:
        raise InputError(f"recording of depth {depth} with {siblings} siblings: both are at least 1")


def _read_chain(tree: DraftTree, name: str) -> Chain:
    """Read a drafter's own tree: the first proposal of each position leads on."""
    levels = []
    node, num_nodes = ROOT, 0
    while candidates := tree.candidates(node):
        evidence = [tree.evidence[candidate.node] for candidate in candidates]
        levels.append(
            Level(
                tuple(candidate.token_id for candidate in candidates),
                tuple(each.margin for each in evidence),
                evidence[0].probability,
                evidence[0].match_length,
                evidence[0].count,
                evidence[0].resumed,
            )
        )
        num_nodes += len(candidates)
        node = candidates[0].node
    if num_nodes != tree.num_drafted:
        raise CapabilityError(f"{name} drafts more than a chain with siblings, which a recording cannot hold")
    return tuple(levels)
