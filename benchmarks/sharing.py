"""Several readers of one model: what a long prompt does to them, a beginning that was read before, many at once.

What limits the first figure is how coarse passes are: a pass with a few rows of a prompt takes what it takes. What
limits the second is the copy of a sequence, and the one row that is always read; the third, how much a row adds to a
pass. Answers go on past their end, so that all of them have the same length.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Annotated, Any, Final

import typer

import paceline
from paceline.api import Model
from paceline.core.errors import InputError
from paceline.core.stats import percentile
from paceline.engines.options import ModelOptions
from paceline.machine import machine
from paceline.models.embedded import HELDOUT_KINDS, embedded_target, heldout
from paceline.models.registry import resolve_model
from paceline.options import GenerateOptions

EPILOG = """[bold]Examples[/bold]

python -m benchmarks sharing  [dim]# the embedded pair[/dim]

python -m benchmarks sharing -m target-1b-q4_0 -md draft --prompt 4000 --beginning 2000
"""

STREAMS: Final = 3
AT_ONCE: Final = 16
_RUN_IN: Final = 12
"""Rounds of the streams before the prompt arrives."""


def sharing(
    model: Annotated[str | None, typer.Option("-m", "--model", help="A GGUF file or a name.")] = None,
    model_draft: Annotated[str | None, typer.Option("-md", "--model-draft", help="A draft model.")] = None,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens of the prompt that arrives beside streams.")] = 4000,
    beginning: Annotated[int, typer.Option("--beginning", help="Tokens that two prompts begin with.")] = 2000,
    tokens: Annotated[int, typer.Option("-n", "--tokens", help="Tokens of each of many answers.")] = 64,
    policy: Annotated[str, typer.Option("--policy", help="auto, or plain for no drafts.")] = "auto",
) -> None:
    """Measure what requests do to each other that share a model."""
    if prompt < 2 or beginning < 64 or tokens < 2:
        raise InputError(f"{prompt}, {beginning} and {tokens} tokens: the least is 2, 64 and 2")
    figures: dict[str, Any] = {}
    context = max(prompt, beginning) + 64
    with _load(model, model_draft, context, STREAMS + 1, policy) as shared:
        figures["prompt beside streams"] = beside_streams(shared, _text(shared, prompt))
        figures["same beginning"] = same_beginning(shared, _text(shared, beginning))
    with _load(model, model_draft, 512, AT_ONCE, policy) as shared:
        figures["at once"] = at_once(shared, tokens)
    print(json.dumps({"machine": machine(), "sharing": figures}))


def beside_streams(model: Model, prompt_ids: Sequence[int]) -> dict[str, float]:
    """Let a long prompt arrive beside streams; return the gaps of these in plain rounds, and what it had to wait."""
    options: GenerateOptions = {"max_tokens": 4000, "temperature": 0.8, "ignore_end": True, "cache_prompt": False}
    plain, reading = options.copy(), options.copy()
    plain["speculate"], reading["max_tokens"] = False, 1
    streams = [model.stream(text, **plain) for text in _prompts(STREAMS)]
    for stream in streams:
        for _ in zip(range(_RUN_IN), stream.rounds(), strict=False):
            pass
    round_s = statistics.median(gap for stream in streams for gap in stream.so_far().stats.inter_token_s()[4:])
    for stream in streams:
        stream.close()
    alone = model.generate(prompt_ids, **reading)
    streams = [model.stream(text, **options) for text in _prompts(STREAMS)]
    for stream in streams:
        for _ in zip(range(_RUN_IN), stream.rounds(), strict=False):
            pass
    began_s = perf_counter()
    model.generate(prompt_ids, **reading)
    waited_s = perf_counter() - began_s
    gaps = []
    for stream in streams:
        arrivals = [at for at in stream.so_far().stats.arrivals_s if began_s <= at <= began_s + waited_s]
        stream.close()
        # Tokens of one round arrive together.
        gaps += [later - earlier for earlier, later in itertools.pairwise(arrivals) if later > earlier]
    rounds = [gap / round_s for gap in gaps]
    median, worst = statistics.median(rounds), max(rounds)
    print(
        f"a prompt of {len(prompt_ids)} tokens beside {STREAMS} streams, whose plain rounds take {1e3 * round_s:.1f} "
        f"ms: a round takes {median:.2f} of them ({percentile(rounds, 0.95):.2f} at the 95th percentile, {worst:.2f} "
        f"at most, {len(rounds)} gaps); it is read in {waited_s:.1f} s, alone in {alone.stats.prompt_s:.1f}"
    )
    return {"median": median, "p95": percentile(rounds, 0.95), "worst": worst, "round_s": round_s, "read_s": waited_s}


def same_beginning(model: Model, beginning: Sequence[int]) -> dict[str, float]:
    """Ask twice with the same beginning; return the times to the first token."""
    seconds = []
    for question in ("\nWhat comes first?", "\nAnd then?", "\nAnd last?"):
        prompt_ids = [*beginning, *_token_ids(model, question)]
        # Of its own namespace, as prompts of before begin so, too.
        answer = model.generate(prompt_ids, max_tokens=1, temperature=0.8, namespace="same beginning")
        seconds.append((answer.stats.prompt_s, answer.stats.cached_tokens))
    (first_s, _), *others = seconds
    share = statistics.median(later_s for later_s, _ in others) / first_s
    print(
        f"a beginning of {len(beginning)} tokens: the first token after {first_s:.2f} s, then after "
        + ", ".join(f"{later_s:.3f} s ({cached} tokens not read again)" for later_s, cached in others)
        + f": {share:.3f} of the first"
    )
    return {"first_s": first_s, "share": share}


def at_once(model: Model, tokens: int) -> dict[str, float]:
    """Make sixteen answers in turn and all at once; return tokens a second."""
    options: GenerateOptions = {"max_tokens": tokens, "temperature": 0.8, "ignore_end": True, "cache_prompt": False}
    prompts = _prompts(AT_ONCE)
    speeds: dict[str, float] = {}

    def answer(number: int) -> int:
        own = options.copy()
        own["seed"] = number
        return len(model.generate(prompts[number], **own).token_ids)

    for name, threads in (("in turn", 1), ("at once", AT_ONCE)):
        began_s = perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            total = sum(pool.map(answer, range(AT_ONCE)))
        speeds[name] = total / (perf_counter() - began_s)
    print(
        f"{AT_ONCE} answers of {tokens} tokens, prompts included: {speeds['in turn']:.1f} tokens/s in turn, "
        f"{speeds['at once']:.1f} at once, {speeds['at once'] / speeds['in turn']:.2f} times as many"
    )
    return speeds


def _load(model: str | None, draft: str | None, context: int, sequences: int, policy: str) -> Model:
    target = embedded_target() if model is None else resolve_model(model)
    options = ModelOptions(target, context_length=context, max_sequences=sequences, model_defaults=False)
    if policy == "plain":
        return paceline.load(options, policy=paceline.NO_SPECULATION)
    drafting = (
        None if draft is None else ModelOptions(resolve_model(draft), context_may_shrink=True, max_sequences=sequences)
    )
    return paceline.load(options, draft=drafting, policy=policy)


def _prompts(count: int) -> list[str]:
    pieces = [piece for kinds in zip(*map(heldout, HELDOUT_KINDS), strict=False) for piece in kinds]
    return [pieces[number % len(pieces)][: 60 + 4 * number] for number in range(count)]


def _text(model: Model, length: int) -> list[int]:
    """Return so many tokens of text the embedded pair was not trained on."""
    text = "\n".join(piece for kind in HELDOUT_KINDS for piece in heldout(kind))
    token_ids = _token_ids(model, text)
    while len(token_ids) < length:
        token_ids += token_ids
    return token_ids[:length]


def _token_ids(model: Model, text: str) -> list[int]:
    return model.worker.call(lambda: model.target.vocabulary.tokenize(text))
