"""What the engine's thread costs one client: answers through the model beside the loop driven in the caller's thread.

Both do the same passes; what differs is that tokens come from another thread. What limits the figure is how long that
hand-over takes beside a round: a consumer that waits for every round is woken in every round, and competes for the
interpreter and, where all cores are at work in a pass, for a core. The runs take turns, each side with engines of its
own, opened in the thread that uses them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Annotated, Any, Final

import typer

from benchmarks.progress import progress_bar
from paceline.api import Model, load
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.drafters.registry import build_drafters
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.machine import machine
from paceline.models.embedded import embedded_draft, embedded_target, heldout
from paceline.models.registry import resolve_model
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.runtime.loop import DecodingLoop

EPILOG = """[bold]Examples[/bold]

python -m benchmarks worker-overhead

python -m benchmarks worker-overhead -m target-1b-q4_0 -n 48

python -m benchmarks worker-overhead --switch-interval 0.5
"""

LOOP, GENERATE, STREAM = "loop", "generate", "stream"
_PROMPT_CHARACTERS: Final = 200
_SETTLE_S: Final = 0.05
"""By then native threads of the side that was measured before sleep."""


def worker_overhead(
    model: Annotated[
        str | None, typer.Option("-m", "--model", help="A target by path or name. \\[the embedded one]")
    ] = None,
    model_draft: Annotated[
        str | None,
        typer.Option("-md", "--model-draft", help="Its draft. \\[the embedded one, for the embedded target]"),
    ] = None,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of an answer.")] = 256,
    repeats: Annotated[int, typer.Option("--repeats", help="Answers of each side.")] = 9,
    switch_interval: Annotated[
        float | None,
        typer.Option("--switch-interval", help="Milliseconds after which Python has threads take turns. \\[Python's]"),
    ] = None,
) -> None:
    """Measure tokens per second through the model beside the loop driven directly."""
    if tokens < 2 or repeats < 1:
        raise InputError(f"{repeats} answers of {tokens} tokens: the least is 1 of 2")
    if switch_interval is not None:
        sys.setswitchinterval(switch_interval / 1e3)
    target = embedded_target() if model is None else resolve_model(model)
    draft = resolve_model(model_draft) if model_draft is not None else embedded_draft() if model is None else None
    figures: dict[str, Any] = {}
    target_options = ModelOptions(target, model_defaults=False)
    for name, options in {
        "plain": (target_options, None),
        **({"drafting": (target_options, ModelOptions(draft))} if draft is not None else {}),
    }.items():
        figures[name] = _measure(name, *options, tokens=tokens, repeats=repeats)
    settings = {"model": target.name, "tokens": tokens, "switch_interval_ms": 1e3 * sys.getswitchinterval()}
    print(json.dumps({"machine": machine(), "worker_overhead": settings | figures}))


def _measure(
    name: str, target: ModelOptions, draft: ModelOptions | None, *, tokens: int, repeats: int
) -> dict[str, Any]:
    policy = NO_SPECULATION if draft is None else FixedPolicy(4)
    with ExitStack() as stack:
        model = stack.enter_context(load(target, draft=draft, policy=policy))
        assert model.target_options is not None
        here = stack.enter_context(closing(open_engine(model.target_options)))
        draft_here = None if draft is None else stack.enter_context(closing(open_engine(draft)))
        drafters = [] if draft_here is None else build_drafters(["draft"], target=here, draft=draft_here)
        loop = DecodingLoop(here, drafters, policy)
        prompt_ids = here.vocabulary.tokenize(heldout("code")[0][:_PROMPT_CHARACTERS])
        sides: dict[str, Callable[[], float]] = {
            LOOP: lambda: _by_the_loop(loop, prompt_ids, tokens),
            GENERATE: lambda: _generated(model, prompt_ids, tokens),
            STREAM: lambda: _streamed(model, prompt_ids, tokens),
        }
        speeds: dict[str, list[float]] = {side: [] for side in sides}
        with progress_bar() as bar:
            for repeat in bar.track(range(repeats + 1), description=name):
                for side, answer in sides.items():
                    time.sleep(_SETTLE_S)
                    speed = answer()
                    if repeat:  # the first brings the weights into memory
                        speeds[side].append(speed)
    print(f"{target.path}, {name}, {tokens} tokens: {LOOP} {statistics.median(speeds[LOOP]):.1f} t/s")
    ratios = {}
    for side in (GENERATE, STREAM):
        of_each = [ours / direct for ours, direct in zip(speeds[side], speeds[LOOP], strict=True)]
        ratios[side] = statistics.median(of_each)
        print(f"  {side}: {ratios[side]:.3f} of that ({min(of_each):.3f} to {max(of_each):.3f} in {repeats})")
    return {"ratios": ratios, "tokens_per_second": speeds}


def _by_the_loop(loop: DecodingLoop, prompt_ids: list[int], tokens: int) -> float:
    started_s = time.perf_counter()
    loop.add(prompt_ids, SamplingParams(0.0), StopRules(tokens, ignore_end=True))
    while loop.active:
        loop.step()
    return tokens / (time.perf_counter() - started_s)


def _generated(model: Model, prompt_ids: list[int], tokens: int) -> float:
    started_s = time.perf_counter()
    model.generate(prompt_ids, max_tokens=tokens, temperature=0.0, ignore_end=True)
    return tokens / (time.perf_counter() - started_s)


def _streamed(model: Model, prompt_ids: list[int], tokens: int) -> float:
    started_s = time.perf_counter()
    for _ in model.stream(prompt_ids, max_tokens=tokens, temperature=0.0, ignore_end=True):
        pass
    return tokens / (time.perf_counter() - started_s)
