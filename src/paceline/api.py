"""The Python API: load a model with its drafters, then generate or stream.

>>> import paceline
>>> with paceline.load() as model:  # the embedded pair
...     answer = model.generate("def fibonacci(n):", max_tokens=64, temperature=0)
...     print(answer.text, answer.stats.acceptance_length)
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypedDict

from paceline.core.clock import Clock
from paceline.core.errors import CapabilityError, ClosedError, InputError
from paceline.core.loop import DecodingLoop
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import FinishReason, Request
from paceline.core.stats import RequestStats
from paceline.core.text import TextSegment
from paceline.core.verify import VERIFIER_NAMES, VerifierName
from paceline.drafters.base import Drafter
from paceline.drafters.registry import build_drafters, check_drafter_names
from paceline.engines.base import Engine
from paceline.engines.loading import ModelOptions, open_engine
from paceline.models.embedded import embedded_draft, embedded_target
from paceline.planning.base import Policy
from paceline.planning.fixed import NO_SPECULATION, FixedPolicy

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GenerateOptions(TypedDict, total=False):
    """What a call may set; see :class:`SamplingParams` and :class:`StopRules` for meanings and defaults."""

    max_tokens: int
    stop: Sequence[str]
    ignore_end: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    penalty_last_n: int
    logit_bias: Mapping[int, float]
    seed: int | None
    choice: int
    order: tuple[str, ...]
    speculate: bool


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        text: the answer, without the prompt.
        token_ids: its tokens.
        sources: for each token the drafter it came from, or ``"target"``.
        finish_reason: why it ended.
        seed: the seed it was sampled with; the same seed gives the same text under ``coupled``.
        stats: counts and times.
    """

    text: str
    token_ids: Sequence[int]
    sources: Sequence[str]
    finish_reason: FinishReason
    seed: int
    stats: RequestStats


class Stream:
    """An answer while it is written: iterate for its text, as it becomes final.

    Closing it early (``close()``, or leaving its ``with`` block) cancels the request and keeps what there is.
    """

    def __init__(self, loop: DecodingLoop, request: Request) -> None:
        self._loop = loop
        self.request = request
        self._sources: list[str] = []
        self._text: list[str] = []
        self._rounds = self._run()

    def __iter__(self) -> Iterator[TextSegment]:
        for segments in self._rounds:
            yield from segments

    def rounds(self) -> Iterator[list[TextSegment]]:
        """Iterate round by round: the text each made final, which may be none (while a long prompt is read)."""
        return self._rounds

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> list[TextSegment]:
        """Cancel the request if it still runs; return text that was withheld until now."""
        emission = self._loop.cancel(self.request)
        segments = list(emission.segments) if emission is not None else []
        self._text += [segment.text for segment in segments]
        return segments

    def result(self) -> Generation:
        """Return the answer, run to its end if it is not there yet."""
        for _ in self._rounds:
            pass
        return self.so_far()

    def so_far(self) -> Generation:
        """Return the answer as it stands; ``finish_reason`` is ``"cancelled"`` while it still runs."""
        request = self.request
        return Generation(
            text="".join(self._text),
            token_ids=request.output_ids,
            sources=list(self._sources),
            finish_reason=request.finish_reason or "cancelled",
            seed=request.params.seed,
            stats=request.stats,
        )

    def _run(self) -> Iterator[list[TextSegment]]:
        while self.request.finish_reason is None:
            segments: list[TextSegment] = []
            for emission in self._loop.step():
                if emission.request is self.request:
                    self._sources += emission.sources
                    segments += emission.segments
            self._text += [segment.text for segment in segments]
            yield segments


class Model:
    """A target with its drafters. Use it as a context manager, or call :meth:`close` to free native memory.

    Attributes:
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
    ) -> None:
        self.target = target
        self.drafters = list(drafters)
        self.policy = policy
        self._verify: VerifierName = verify
        self.loop = DecodingLoop(target, drafters, policy, clock=clock)
        self._plain = DecodingLoop(target, [], NO_SPECULATION, clock=clock)
        self._closed = False

    def __enter__(self) -> Model:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Generation:
        """Return the answer to a prompt, a text or token ids.

        ``speculate=False`` decodes plainly; under ``coupled`` the text is the same.

        Raises:
            InputError: the prompt or an option cannot be used.
            ClosedError: the model is closed.
        """
        return self.stream(prompt, **options).result()

    def stream(self, prompt: str | Sequence[int], **options: Unpack[GenerateOptions]) -> Stream:
        """Start an answer and return it for iteration. Raises as :meth:`generate` does."""
        if self._closed:
            raise ClosedError("this model is closed: load it again")
        given = dict(options)
        speculate = given.pop("speculate", True)
        seed = given.pop("seed", None)
        given["seed"] = secrets.randbits(32) if seed is None else seed
        if "stop" in given:
            stop = options["stop"]
            given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        rules = StopRules(**_pick(StopRules, given))  # type: ignore[arg-type]
        params = SamplingParams(**_pick(SamplingParams, given))  # type: ignore[arg-type]
        if given:
            raise InputError(f"unknown option {next(iter(given))!r}: see SamplingParams and StopRules")
        prompt_ids = self.target.vocabulary.tokenize(prompt) if isinstance(prompt, str) else prompt
        loop = self.loop if speculate else self._plain
        return Stream(loop, loop.add(prompt_ids, params, rules, verifier=self._verify))

    def close(self) -> None:
        """Cancel what still runs and free native memory. Idempotent; using the model afterwards is a clear error."""
        self._closed = True
        for loop in (self.loop, self._plain):
            for request in loop.active:
                loop.cancel(request)
        for drafter in self.drafters:
            drafter.close()
        self.target.close()


def _pick(kind: type, given: dict[str, object]) -> dict[str, object]:
    """Take the fields of a dataclass out of ``given``."""
    return {f.name: given.pop(f.name) for f in dataclasses.fields(kind) if f.name in given}


def load(
    target: str | Path | ModelOptions | None = None,
    *,
    draft: str | Path | ModelOptions | None = None,
    drafters: Sequence[str] | None = None,
    policy: Policy | None = None,
    verify: VerifierName = "coupled",
    context_length: int | None = None,
) -> Model:
    """Load a target, its draft model if any, and the drafters.

    Args:
        target: a GGUF file or Hugging Face folder; ``None`` for the embedded pair.
        draft: a smaller model with the same vocabulary.
        drafters: names from :data:`~paceline.drafters.registry.DRAFTER_NAMES` in the order they are asked; by default
            the draft model if there is one, else ``suffix``.
        policy: what to draft; by default :class:`~paceline.planning.fixed.FixedPolicy`.
        verify: ``"coupled"`` or ``"rejection"``.
        context_length: tokens of prompt and answer together, for models given by path.

    Raises:
        InputError: a file, a name or a value cannot be used; nothing stays loaded.
    """
    if verify not in VERIFIER_NAMES:
        raise InputError(f"unknown verifier {verify!r}: choose from {', '.join(VERIFIER_NAMES)}")
    if drafters is not None:
        check_drafter_names(drafters)
    policy = FixedPolicy() if policy is None else policy
    speculates = policy != NO_SPECULATION
    if target is None:
        target = embedded_target()
        if draft is None and speculates and (drafters is None or "draft" in drafters):
            draft = embedded_draft()
    if draft is not None and not speculates:
        raise InputError("a draft model has no use without speculation: leave out one or the other")
    names = drafters if drafters is not None else ([] if not speculates else ["suffix"] if draft is None else ["draft"])
    target_options = _options(target, context_length)
    if target_options.branches is None and isinstance(policy, FixedPolicy):
        target_options = dataclasses.replace(target_options, branches=policy.most_branches(len(names)))
    target_engine = open_engine(target_options)
    draft_engine: Engine | None = None
    try:
        if speculates and target_engine.capabilities.max_rollback == 0:
            raise CapabilityError(
                f"{target_engine.description} cannot take tokens back, so drafts cannot be verified: "
                "decode it with --no-speculation"
            )
        if draft is not None:
            # The draft's own pending tree is a chain: siblings are proposed but never fed.
            draft_engine = open_engine(dataclasses.replace(_options(draft, context_length), branches=0))
        built = build_drafters(names, target=target_engine, draft=draft_engine)
    except BaseException:
        if draft_engine is not None:
            draft_engine.close()
        target_engine.close()
        raise
    return Model(target_engine, built, policy, verify=verify)


def _options(model: str | Path | ModelOptions, context_length: int | None) -> ModelOptions:
    if isinstance(model, ModelOptions):
        return model
    return ModelOptions(Path(model), context_length=context_length)
