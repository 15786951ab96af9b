"""From a pass's rows to tokens: verifies the trees, appends tokens and text up to where an answer ends, commits.

A draft is judged in ``core/verify.py``; a stop string cuts the text in ``core/text.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.logprobs import compute_logprob, compute_prompt_logprob
from paceline.core.request import SOURCE_TARGET, Emission, FinishReason, JudgedDrafts, Request
from paceline.core.tree import ROOT
from paceline.core.verify import Walk
from paceline.drafters.base import Commit, TargetRows
from paceline.engines.base import Engine, ForwardOutput
from paceline.runtime.batch_builder import BatchPart
from paceline.runtime.drafting import Drafting
from paceline.runtime.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class PartResult:
    """What became of one request's part in a pass.

    Attributes:
        walk: down its tree; ``None`` where nothing was emitted.
        emission: what it added to the answer; ``None`` while a prompt is read.
    """

    part: BatchPart
    walk: Walk | None
    emission: Emission | None


class Postprocessor:
    """Turns rows of a pass into tokens that stand. Nobody else asks the target to commit a round."""

    def __init__(self, engine: Engine, drafting: Drafting, scheduler: Scheduler) -> None:
        self._engine = engine
        self._drafting = drafting
        self._scheduler = scheduler
        self._context_length = engine.capabilities.context_length
        self._vocabulary = engine.vocabulary
        self._end_ids = engine.vocabulary.end_ids

    def verify(self, parts: Sequence[BatchPart], output: ForwardOutput) -> list[Walk | None]:
        """Walk down the trees of all parts that emit; ``None`` for the others, and where rows cannot be sampled.

        Prompts are listed here too, as far as their log-probabilities are wanted: the rows are not kept.
        """
        walks: list[Walk | None] = []
        for index, part in enumerate(parts):
            if part.num_listed:
                self._list_prompt(part, output, index)
            walks.append(_walk(part, _rows(part, output, index)) if part.emits else None)
        return walks

    def commit(
        self, parts: Sequence[BatchPart], walks: Sequence[Walk | None], output: ForwardOutput
    ) -> list[PartResult]:
        """Write what the walks emitted, end what ends with it, and commit the rest."""
        return [
            PartResult(part, walk, self._commit_part(part, walk, _rows(part, output, index)))
            for index, (part, walk) in enumerate(zip(parts, walks, strict=True))
        ]

    def _list_prompt(self, part: BatchPart, output: ForwardOutput, index: int) -> None:
        """Add log-probabilities of the tokens of the prompt that follow the rows of a chunk."""
        request = part.request
        try:
            for place in range(part.num_listed):
                token_id, row = request.token_ids[len(request.prompt_logprobs) + 1], output.logits(index, place)
                request.prompt_logprobs.append(compute_prompt_logprob(token_id, row, request.logprob_params))
        except Exception as error:
            request.error = error
        if not request.lists_prompt:
            self._scheduler.share_listed(request)

    def _commit_part(self, part: BatchPart, walk: Walk | None, rows: TargetRows) -> Emission | None:
        request = part.request
        first_token, first_segment = request.num_output, len(request.segments)
        if request.error is not None:
            self._scheduler.finish(request, "error")
        elif walk is None:
            self._commit_nodes(part, [])
            return None
        else:
            reason = self._append_tokens(part, walk, rows)
            if reason is not None:
                # Committed all the same: later requests that begin alike share it.
                self._commit_nodes(part, walk.path[: request.num_output - first_token - 1])
                self._scheduler.finish(request, reason)
            else:
                self._continue(part, walk, rows)
        return Emission(
            request,
            token_ids=request.token_ids[request.num_prompt + first_token :],
            sources=request.sources[first_token:],
            segments=request.segments[first_segment:],
            finish_reason=request.finish_reason,
            segment_ends=[end - first_segment for end in request.segment_ends[first_token:]],
            logprobs=tuple(request.logprobs[first_token:]),
            drafts=_copy_judged(part, walk, request.num_output - first_token),
        )

    def _append_tokens(self, part: BatchPart, walk: Walk, rows: TargetRows) -> FinishReason | None:
        """Add what was emitted to the request, up to where it ends, and return why it ends, if it does."""
        request, sources, path = part.request, part.tree.sources, walk.path
        wants_logprobs = request.logprob_params.logprobs is not None
        for depth, token_id in enumerate(walk.token_ids):
            if wants_logprobs:
                # Here, for emitted tokens alone, and while the rows are valid: until the next pass.
                row = rows.logits(path[depth - 1] if depth else ROOT)
                request.logprobs.append(
                    compute_logprob(token_id, row, request.token_ids, request.verifier.sampler, request.logprob_params)
                )
            request.token_ids.append(token_id)
            request.sources.append(sources[path[depth]] if depth < len(path) else SOURCE_TARGET)
            reason = self._append_text(request, token_id)
            request.segment_ends.append(len(request.segments))
            if reason is not None:
                return reason
        return None

    def _append_text(self, request: Request, token_id: int) -> FinishReason | None:
        """Add the text of the token just emitted and return why the request ends with it, if it does."""
        rules = request.rules
        if token_id in rules.stop_token_ids:
            if rules.include_stop:
                request.segments += request.text.push_token(token_id, request.sources[-1], self._vocabulary)
            return "end"
        if token_id in self._end_ids and not rules.ignore_end:
            return "end"
        request.segments += request.text.push_token(token_id, request.sources[-1], self._vocabulary)
        if request.text.stopped:
            return "length" if request.text.outdented else "stop"
        if request.num_output >= request.rules.max_tokens:
            return "length"
        if len(request.token_ids) >= self._context_length:
            return "context"
        return None

    def _continue(self, part: BatchPart, walk: Walk, rows: TargetRows) -> None:
        """Commit what stands of a request that goes on, and tell the drafters."""
        request = part.request
        self._drafting.forget(request)
        if walk.unread_node is not None:
            self._drafting.keep(request, part.tree.below(walk.unread_node))
        self._commit_nodes(part, walk.path)
        if part.decodes:
            commit = Commit(part.tree, walk.path, walk.token_ids, rows)
            for drafter in self._drafting.drafters_of(request):
                drafter.observe(request, commit)

    def _commit_nodes(self, part: BatchPart, path: Sequence[int]) -> None:
        """Commit the root and an accepted path, or all rows of what was read."""
        nodes = [ROOT, *path] if part.decodes else range(len(part.step.token_ids))
        part.request.cached += len(nodes)
        self._engine.commit(part.request.sequence, nodes)


def _copy_judged(part: BatchPart, walk: Walk | None, num_emitted: int) -> JudgedDrafts | None:
    """Return the drafts that were in the pass, as plain lists: the tree may hold a distribution for each draft."""
    num_rows = part.num_rows
    if walk is None or not part.decodes or num_rows == 1:
        return None
    tree = part.tree
    return JudgedDrafts(
        tree.token_ids[:num_rows], tree.parents[:num_rows], tree.sources[:num_rows], walk.path[:num_emitted]
    )


def _rows(part: BatchPart, output: ForwardOutput, index: int) -> TargetRows:
    return TargetRows(output, index, first=part.num_listed)


def _walk(part: BatchPart, rows: TargetRows) -> Walk | None:
    request = part.request
    if request.error is not None:
        return None
    try:
        return request.verifier.walk(part.tree, part.num_rows, rows.logits, request.token_ids)
    except Exception as error:
        # Ends this request, not the others in the pass.
        request.error = error
        return None
