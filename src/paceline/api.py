"""The Python API: load a model with its drafters, then generate or stream.

>>> import paceline
>>> with paceline.load() as model:  # the embedded pair
...     answer = model.generate("def fibonacci(n):", max_tokens=64, temperature=0)
...     print(answer.text, answer.stats.acceptance_length)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypedDict, Unpack

from paceline.core.clock import Clock
from paceline.core.errors import CapabilityError, ClosedError, InputError
from paceline.core.params import VERIFIER_NAMES, SamplingParams, SpeculationParams, StopRules, VerifierName
from paceline.core.request import FinishReason, Request
from paceline.core.stats import RequestStats
from paceline.core.text import TextSegment
from paceline.drafters.base import Drafter
from paceline.drafters.registry import build_drafters, check_drafter_names
from paceline.engines.base import Engine
from paceline.engines.loading import DEFAULT_BRANCHES, MAX_BRANCHES, ModelOptions, open_engine
from paceline.engines.sequence_pool import SequencePool
from paceline.models.cache import resolve
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.options import read_options
from paceline.planning.auto.learned import load_learned, store_learned
from paceline.planning.base import Policy
from paceline.planning.costs.attention import MAX_S as ATTENTION_S
from paceline.planning.costs.attention import like_target, open_model
from paceline.planning.costs.meter import FIRST_LOAD, Report
from paceline.planning.costs.profile_cache import find_or_measure
from paceline.planning.keeping import PairKey
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.planning.registry import COST_POLICIES, build_policy, check_policy_name
from paceline.prompts import Prompt, read_prompt
from paceline.runtime.loop import DecodingLoop
from paceline.runtime.turns import Turns


class GenerateOptions(TypedDict, total=False):
    """What a call may set.

    Meanings and defaults are those of :class:`SamplingParams`, :class:`StopRules` and :class:`SpeculationParams`; the
    default of ``verify`` is the model's. ``None`` is the default, as if the option were left out. Numbers may be
    numpy's.
    """

    max_tokens: int | None
    stop: Sequence[str] | None
    ignore_end: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalty_last_n: int | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    choice: int | None
    order: Sequence[str] | None
    speculate: bool | None
    drafters: Sequence[str] | None
    draft_max: int | None
    verify: VerifierName | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer, without the prompt.
        token_ids: its tokens.
        sources: for each token the drafter it came from, or ``"target"``.
        finish_reason: why it ended; ``None`` if it has not yet.
        seed: the seed it was sampled with; the same seed gives the same text under ``coupled``.
        stats: counts and times.
    """

    text: str
    token_ids: Sequence[int]
    sources: Sequence[str]
    finish_reason: FinishReason | None
    seed: int
    stats: RequestStats


class Stream:
    """An answer while it is written: iterate for its text, as it becomes final.

    Closing it early (``close()``, leaving its ``with`` block, or dropping it) cancels the request and keeps what there
    is. An interrupt or error while it is iterated cancels it too. The place of one that was dropped is free again
    before the next round or request.

    Args:
        loop: decodes the answer.
        prompt_ids: at least one token.
        params: how the answer is sampled.
        rules: when it ends.
        speculation: how it is sped up.

    Attributes:
        request: the request, as the loop carries it.
    """

    def __init__(
        self,
        loop: DecodingLoop,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        rules: StopRules,
        speculation: SpeculationParams,
    ) -> None:
        self._loop = loop
        self._num_read = 0
        self.request: Request = loop.add(prompt_ids, params, rules, speculation, owner=self)

    def __iter__(self) -> Iterator[TextSegment]:
        for segments in self.rounds():
            yield from segments

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def rounds(self) -> Iterator[list[TextSegment]]:
        """Iterate round by round: the text each made final, which may be none (while a long prompt is read).

        Raises:
            PacelineError: the request ended by an error.
        """
        while True:
            running = self.request.finish_reason is None
            if running:
                try:
                    self._loop.step()
                except BaseException:
                    self._loop.cancel(self.request)
                    raise
            # Another stream's rounds may have written some of it, so read from the request, not from the round.
            segments = self._unread()
            if segments or running:
                yield segments
            if not running:
                break
        if self.request.error is not None:
            raise self.request.error

    def close(self) -> list[TextSegment]:
        """Cancel the request if it still runs; return text that was not read yet."""
        self._loop.cancel(self.request)
        return self._unread()

    def result(self) -> Generation:
        """Return the answer, run to its end if it is not there yet."""
        for _ in self.rounds():
            pass
        return self.so_far()

    def so_far(self) -> Generation:
        """Return the answer as it stands; ``finish_reason`` is ``None`` while it runs."""
        request = self.request
        return Generation(
            text="".join(segment.text for segment in request.segments),
            token_ids=request.output_ids,
            sources=list(request.sources),
            finish_reason=request.finish_reason,
            seed=request.params.seed,
            stats=request.stats,
        )

    def _unread(self) -> list[TextSegment]:
        segments = self.request.segments[self._num_read :]
        self._num_read += len(segments)
        return segments


class Model:
    """A target with its drafters. Use it as a context manager, or call :meth:`close` to free native memory.

    It owns its engine and drafters and closes them. Threads that use it at once take turns, round by round; how many
    answers may be under way together is the engine's ``max_sequences``.

    Args:
        target: see below; and so ``drafters``, ``policy`` and ``verify``.
        clock: where times come from.
        target_options: what the target was opened with.
        closing: called once, before anything is freed.

    Attributes:
        target: the engine that runs the target.
        target_options: what it was opened with, with all that was found out at load; ``None`` where it is not said.
        drafters: in the order they are asked.
        policy: what decides how much is drafted.
        verify: how drafts are judged.
        loop: the decoding loop, for running several requests at once.
    """

    def __init__(
        self,
        target: Engine,
        drafters: Sequence[Drafter],
        policy: Policy,
        *,
        verify: VerifierName = "coupled",
        clock: Clock | None = None,
        target_options: ModelOptions | None = None,
        closing: Callable[[], object] | None = None,
    ) -> None:
        self.target = target
        self.target_options = target_options
        self.drafters = list(drafters)
        self.policy = policy
        self.verify: VerifierName = verify
        self._turns = Turns()
        self.loop = DecodingLoop(target, drafters, policy, clock=clock, turns=self._turns)
        self._plain = DecodingLoop(target, [], NO_SPECULATION, clock=clock, turns=self._turns)
        self._closed = False
        self._closing = closing

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Generation:
        """Return the answer to a prompt: a text or token ids, ``[num_tokens]`` or ``[1, num_tokens]``, in any sequence.

        ``speculate=False`` decodes plainly; under ``coupled`` the text is the same.

        Raises:
            InputError: the prompt or an option cannot be used.
            ClosedError: the model is closed.
        """
        with self.stream(prompt, **options) as stream:
            return stream.result()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """Start an answer and return it for iteration. Raises as :meth:`generate` does."""
        if self._closed:
            raise ClosedError("this model is closed: load it again")
        names = [drafter.name for drafter in self.drafters]
        params, rules, speculation = read_options(options, verify=self.verify, drafters=names)
        # In a turn, as another thread may close the model, and its vocabulary with it.
        prompt_ids = self._turns.run("a prompt", lambda: read_prompt(prompt, self.target.vocabulary))
        loop = self.loop if speculation.speculate else self._plain
        return Stream(loop, prompt_ids, params, rules, speculation)

    def repeats_text(self, options: GenerateOptions) -> bool:
        """Return whether a seed gives the same text with and without speculation."""
        return (options.get("verify") or self.verify) == "coupled" or options.get("temperature") == 0.0

    def close(self) -> None:
        """Cancel what still runs and free native memory. Idempotent; using the model afterwards is a clear error.

        Raises:
            BusyError: a round is being made by this thread.
        """
        self._closed = True
        for loop in (self.loop, self._plain):
            # Twice, as cancelling takes back a round that was cut short, and what that had ended is active again.
            for _ in range(2):
                for request in loop.active:
                    loop.cancel(request)
        self._turns.run("the end of a model", self._free)

    def _free(self) -> None:
        closing, self._closing = self._closing, None
        with ExitStack() as stack:
            stack.callback(self.target.close)
            for drafter in self.drafters:
                stack.callback(drafter.close)
            if closing is not None:
                stack.callback(closing)


def load(
    target: str | Path | ModelOptions | None = None,
    *,
    draft: str | Path | ModelOptions | None = None,
    drafters: Sequence[str] | None = None,
    policy: Policy | str | None = None,
    verify: VerifierName = "coupled",
    context_length: int | None = None,
    remember: bool = True,
    report: Report | None = None,
) -> Model:
    """Load a target, its draft model if any, and the drafters.

    Args:
        target: a GGUF file or Hugging Face folder, by path or by a name that ``paceline models`` lists; ``None`` for
            the embedded pair.
        draft: a smaller model with mostly the same tokens, given likewise.
        drafters: names from :data:`~paceline.drafters.registry.DRAFTER_NAMES` in the order they are asked; by default
            ``suffix``, and where there is a draft model ``lookup`` and then that. With a
            :class:`~paceline.planning.policies.fixed.FixedPolicy`, which cannot tell which of them pays, only the draft
            model if there is one.
        policy: what to draft: a policy or the name of one, from :data:`~paceline.planning.registry.POLICY_NAMES`.
            By default ``auto``, which plans by what passes cost on this machine. That is measured when a model is
            loaded for the first time, in at most ten seconds, and kept.
        verify: ``"coupled"`` or ``"rejection"``.
        context_length: tokens of prompt and answer together, for models given by path or name; a draft model takes
            less where it was made for less.
        remember: start with what ``auto`` learned of these models on this machine before, and keep what it learns when
            the model is closed: how often drafts were right and what that was worth, nothing of any text.
        report: told the share done while costs are measured.

    Raises:
        InputError: a file, a name or a value cannot be used; nothing stays loaded.
    """
    if verify not in VERIFIER_NAMES:
        raise InputError(f"unknown verifier {verify!r}: choose from {', '.join(VERIFIER_NAMES)}")
    if drafters is not None:
        check_drafter_names(drafters)
    policy = "auto" if policy is None else policy
    if isinstance(policy, str):
        check_policy_name(policy)
        policy = policy if policy in COST_POLICIES else build_policy(policy)
    speculates = isinstance(policy, str) or policy.speculates
    if not speculates and (draft is not None or drafters):
        raise InputError("drafters and draft models have no effect without speculation: leave out one or the other")
    if target is None:
        target = embedded_target()
        if draft is None and speculates and (drafters is None or "draft" in drafters):
            draft = embedded_draft()
    names = drafters if drafters is not None else _default_drafters(policy, speculates, draft is not None)
    # Both are looked up before either is loaded, which may take long.
    target_options = _options(target, context_length)
    draft_options = None if draft is None else _options(draft, context_length)
    if draft_options is not None and not isinstance(draft, ModelOptions):
        # The context is meant for the target; a draft that was made for less still drafts, from the end of the text.
        draft_options = dataclasses.replace(
            draft_options, context_may_shrink=True, max_sequences=target_options.max_sequences
        )
    most_branches = None if isinstance(policy, str) else policy.most_branches(len(names))
    if target_options.branches is None and most_branches is not None:
        branches = min(most_branches * target_options.max_sequences, MAX_BRANCHES)
        target_options = dataclasses.replace(target_options, branches=branches)
    opened = open_model(dataclasses.replace(target_options, rollback=speculates), report=report)
    target_engine, target_options = opened.engine, opened.options
    draft_engine: Engine | None = None
    closing: Callable[[], object] | None = None
    try:
        if speculates and target_engine.capabilities.max_rollback == 0:
            raise CapabilityError(
                f"{target_engine.description} cannot take tokens back, so drafts cannot be verified: "
                "decode it without speculation (--no-speculation)"
            )
        if draft_options is not None:
            draft_options = like_target(draft_options, target_options)
            # The draft's own pending tree is a chain: siblings are proposed but never fed.
            draft_engine = open_engine(dataclasses.replace(draft_options, branches=0))
        draft_pool = None if draft_engine is None else SequencePool(draft_engine)
        built = build_drafters(names, target=target_engine, draft=draft_engine, draft_pool=draft_pool)
        if isinstance(policy, str):
            budget = FIRST_LOAD.less(ATTENTION_S) if opened.measured else FIRST_LOAD
            kept = find_or_measure(
                target_engine, target_options, draft_engine, draft_options, budget=budget, report=report
            )
            branches = DEFAULT_BRANCHES if target_options.branches is None else target_options.branches
            key = kept.key if remember else None
            learned = load_learned(key) if key is not None else None
            policy = build_policy(policy, costs=kept.profile, branches=branches, learned=learned)
            if key is not None:
                closing = functools.partial(_keep_learned, key, policy)
    except BaseException:
        if draft_engine is not None:
            draft_engine.close()
        target_engine.close()
        raise
    return Model(target_engine, built, policy, verify=verify, target_options=target_options, closing=closing)


def _keep_learned(key: PairKey, policy: Policy) -> None:
    learned = policy.learned()
    if learned is not None:
        store_learned(key, learned)


def _default_drafters(policy: Policy | str, speculates: bool, has_draft: bool) -> list[str]:
    if not speculates:
        return []
    if not isinstance(policy, str) and not policy.weighs_drafters:
        return ["draft"] if has_draft else ["suffix"]
    # Beside a model's drafts, which tell what a copy is worth, a second source of copies brings more than it costs.
    return ["suffix", "lookup", "draft"] if has_draft else ["suffix"]


def _options(model: str | Path | ModelOptions, context_length: int | None) -> ModelOptions:
    if isinstance(model, ModelOptions):
        if context_length is not None:
            raise InputError("context_length is for models given by path: set it in ModelOptions, or give the path")
        return dataclasses.replace(model, path=resolve(model.path))
    return ModelOptions(resolve(model), context_length=context_length)
