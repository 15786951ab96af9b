"""``paceline run``: one prompt, the answer as it is decided, and what speculation gave."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.status import Status

from paceline.api import GenerateOptions, Generation, Model, load
from paceline.cli import exits
from paceline.cli.display import AnswerWriter, error_console, print_json
from paceline.cli.interrupts import interrupts_held
from paceline.cli.options import (
    OF_THE_DRAFT_MODEL,
    WITHOUT_DRAFT_MODEL,
    BatchThreads,
    ContextSize,
    Devices,
    DraftBatchThreads,
    DraftContextSize,
    DraftDevices,
    DraftGpuLayers,
    DraftModel,
    DraftThreads,
    EngineChoice,
    Exact,
    FlashAttention,
    GpuLayers,
    TargetModel,
    TensorOverrides,
    Threads,
    WeightsType,
    is_given,
    options_for_draft,
    options_for_target,
    refuse_given,
)
from paceline.cli.prompt import read_prompt, typed_text
from paceline.cli.report import comparison_json, comparison_report, generation_json, generation_report
from paceline.comparison import Comparison, OpenReader, Stopped, Trial, answer, run_trials, summarise
from paceline.core.errors import InputError
from paceline.core.params import LLAMA_CPP_ORDER, TRANSFORMERS_ORDER, SamplingParams, StopRules, VerifierName
from paceline.drafters.registry import DRAFTER_NAMES
from paceline.engines.loading import check_prompt, reader_of
from paceline.models.cache import resolve
from paceline.models.embedded import HELDOUT_KINDS, embedded_draft, embedded_target
from paceline.planning.base import Policy
from paceline.planning.costs.meter import Report
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import POLICY_NAMES, check_policy_name

_SAMPLING, _SPECULATION, _OUTPUT = "Sampling", "Speculation", "Prompt and output"
_SAMPLING_DEFAULTS = SamplingParams()
_STOP_DEFAULTS = StopRules()
_POLICY_DEFAULTS = FixedPolicy()

EPILOG = """[bold]Examples[/bold]

paceline run  [dim]# the embedded pair on a text it has not seen[/dim]

paceline run --sample prose:3 --temp 0.8 --compare

paceline run -m big.gguf -md small.gguf -p "Once upon" -n 200

paceline run -m big.gguf -f draft.txt --drafters suffix,lookup --temp 0

paceline run -m big.gguf -md small.gguf -p "Once upon" --compare

paceline run -m ./hf-model -md ./hf-draft -p "Once upon" --json
"""


def _complete_drafters(incomplete: str) -> list[str]:
    done, _, last = incomplete.rpartition(",")
    taken = done.split(",") if done else []
    return [",".join([*taken, name]) for name in DRAFTER_NAMES if name not in taken and name.startswith(last)]


def _complete_policies(incomplete: str) -> list[str]:
    return [name for name in POLICY_NAMES if name.startswith(incomplete)]


def run(
    context: typer.Context,
    model: TargetModel = None,
    model_draft: DraftModel = None,
    engine: EngineChoice = None,
    ctx_size: ContextSize = None,
    ctx_size_draft: DraftContextSize = None,
    gpu_layers: GpuLayers = -1,
    gpu_layers_draft: DraftGpuLayers = -1,
    device: Devices = "",
    device_draft: DraftDevices = "",
    override_tensor: TensorOverrides = None,
    threads: Threads = None,
    threads_batch: BatchThreads = None,
    threads_draft: DraftThreads = None,
    threads_batch_draft: DraftBatchThreads = None,
    flash_attn: FlashAttention = "auto",
    exact: Exact = False,
    dtype: WeightsType = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="The prompt.", rich_help_panel=_OUTPUT),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="A file with the prompt; - is standard input.", rich_help_panel=_OUTPUT),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(
            "--sample",
            help=f"Take the prompt from text the embedded pair was not trained on: {', '.join(HELDOUT_KINDS)}; "
            "code:2 is the second piece of code.",
            metavar="KIND[:N]",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    escape: Annotated[
        bool,
        typer.Option(
            "--escape/--no-escape",
            help="Read \\n, \\t and the like in -p and --stop; \\xHH is a byte.",
            rich_help_panel=_OUTPUT,
        ),
    ] = True,
    predict: Annotated[
        int,
        typer.Option(
            "-n",
            "--predict",
            "--n-predict",
            help="Most tokens to generate; -1 fills the context.",
            rich_help_panel=_OUTPUT,
        ),
    ] = _STOP_DEFAULTS.max_tokens,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="End where this text begins; may be repeated.", rich_help_panel=_OUTPUT),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on past the end of the answer.", rich_help_panel=_OUTPUT)
    ] = False,
    temp: Annotated[
        float, typer.Option("--temp", "--temperature", help="0 decodes greedily.", rich_help_panel=_SAMPLING)
    ] = _SAMPLING_DEFAULTS.temperature,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=_SAMPLING)
    ] = _SAMPLING_DEFAULTS.top_k,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Keep the likeliest tokens up to this mass.", rich_help_panel=_SAMPLING)
    ] = _SAMPLING_DEFAULTS.top_p,
    min_p: Annotated[
        float,
        typer.Option("--min-p", help="Keep tokens with this share of the best one's.", rich_help_panel=_SAMPLING),
    ] = _SAMPLING_DEFAULTS.min_p,
    repeat_penalty: Annotated[
        float, typer.Option("--repeat-penalty", help="1 switches it off.", rich_help_panel=_SAMPLING)
    ] = _SAMPLING_DEFAULTS.repeat_penalty,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="0 switches it off.", rich_help_panel=_SAMPLING)
    ] = _SAMPLING_DEFAULTS.presence_penalty,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="0 switches it off.", rich_help_panel=_SAMPLING)
    ] = _SAMPLING_DEFAULTS.frequency_penalty,
    repeat_last_n: Annotated[
        int,
        typer.Option("--repeat-last-n", help="Tokens that penalties look at; -1 for all.", rich_help_panel=_SAMPLING),
    ] = _SAMPLING_DEFAULTS.penalty_last_n,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", help="May be repeated.", metavar="TOKEN_ID=BIAS", rich_help_panel=_SAMPLING),
    ] = None,
    sampler_order: Annotated[
        Literal["llama.cpp", "transformers"],
        typer.Option("--sampler-order", help="Temperature last, or before truncation.", rich_help_panel=_SAMPLING),
    ] = "llama.cpp",
    seed: Annotated[
        int,
        typer.Option("--seed", "-s", help="-1 picks one; the report says which.", rich_help_panel=_SAMPLING),
    ] = -1,
    drafters: Annotated[
        str | None,
        typer.Option(
            "--drafters",
            help=f"Among {', '.join(DRAFTER_NAMES)}, in the order to ask. "
            "[dim]\\[suffix, or suffix,lookup,draft with a draft model; of policy fixed, draft alone if there is "
            "one][/dim]",
            metavar="NAME[,...]",
            autocompletion=_complete_drafters,
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            help=f"What decides how much is drafted: {', '.join(POLICY_NAMES)}. "
            "[dim]\\[auto; fixed where a draft length is given][/dim]",
            metavar="NAME",
            autocompletion=_complete_policies,
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    draft_max: Annotated[
        int,
        typer.Option(
            "--draft-max",
            "--draft",
            "--spec-draft-n-max",
            help="Most tokens to draft along one path; 0 decodes plainly. All --draft-* options are of policy fixed.",
            rich_help_panel=_SPECULATION,
        ),
    ] = _POLICY_DEFAULTS.draft_max,
    draft_min: Annotated[
        int,
        typer.Option(
            "--draft-min", "--spec-draft-n-min", help="Don't verify shorter drafts.", rich_help_panel=_SPECULATION
        ),
    ] = _POLICY_DEFAULTS.draft_min,
    draft_p_min: Annotated[
        float,
        typer.Option(
            "--draft-p-min",
            "--spec-draft-p-min",
            help="Stop drafting, at the first token too, where the drafter's likeliest token (at the temperature "
            "in use, 1 if greedy) is less likely than this.",
            rich_help_panel=_SPECULATION,
        ),
    ] = _POLICY_DEFAULTS.p_min,
    draft_siblings: Annotated[
        int,
        typer.Option(
            "--draft-siblings", help="Proposals of the draft model for each position.", rich_help_panel=_SPECULATION
        ),
    ] = _POLICY_DEFAULTS.siblings,
    verify: Annotated[
        VerifierName,
        typer.Option(
            "--verify",
            help="coupled: a seed's text is the same with any drafts or none.",
            rich_help_panel=_SPECULATION,
        ),
    ] = "coupled",
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Decode plainly.", rich_help_panel=_SPECULATION)
    ] = False,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Run plain and speculative in turn and say which is faster, and whether the texts are equal.",
            rich_help_panel=_SPECULATION,
        ),
    ] = False,
    remember: Annotated[
        bool,
        typer.Option(
            "--remember/--no-remember",
            help="Of policy auto: start with what earlier runs learned of these models, and keep what this one learns. "
            "It is figures only, nothing of any text.",
            rich_help_panel=_SPECULATION,
        ),
    ] = True,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Pairs of runs under --compare.", rich_help_panel=_SPECULATION)
    ] = 5,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead.", rich_help_panel=_OUTPUT)
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Let the engine log to stderr.", rich_help_panel=_OUTPUT)
    ] = False,
) -> None:
    """Generate text from a prompt, speculatively: the same text as without, sooner.

    The text goes to standard output, the report to standard error. On a terminal, tokens are coloured by the drafter
    they came from.
    """
    if context.args:
        raise InputError(f"{' '.join(context.args)!r} belongs to no option: give the prompt with -p, in quotes")
    if repeats < 1:
        raise InputError(f"--repeats {repeats}: the least is 1")
    names = None if drafters is None else [name.strip() for name in drafters.split(",") if name.strip()]
    if names == []:
        raise InputError(f"no drafter is named: choose from {', '.join(DRAFTER_NAMES)}, or use --no-speculation")
    uses_draft_model = model_draft is not None or (model is None and (names is None or "draft" in names))
    plain = no_speculation or draft_max == 0
    _refuse_without_effect(context, plain=plain, compares=compare, uses_draft_model=uses_draft_model)
    options: GenerateOptions = {
        "temperature": temp,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repeat_penalty": repeat_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "penalty_last_n": repeat_last_n,
        "logit_bias": _parse_biases(logit_bias or []),
        "order": LLAMA_CPP_ORDER if sampler_order == "llama.cpp" else TRANSFORMERS_ORDER,
        "seed": int.from_bytes(os.urandom(4), "little") if seed == -1 else seed,
        "stop": tuple(typed_text(text, "--stop", escape=escape) for text in stop or ()),
        "ignore_end": ignore_eos,
    }
    chosen = _policy(context, policy, plain, FixedPolicy(draft_max, draft_min, draft_p_min, draft_siblings))
    if remember and chosen != "auto":
        way_out = "is of policy auto, which is not the one in use: leave it out, or --policy and the --draft-* options"
        refuse_given(context, {"remember": way_out})
    text = read_prompt(prompt, file, sample, escape, embedded=model is None)
    target_options = options_for_target(embedded_target() if model is None else resolve(model), context.params)
    draft: str | Path | None = model_draft
    if draft is None and uses_draft_model and not plain:
        draft = embedded_draft()
    draft_options = None if draft is None else options_for_draft(target_options, resolve(draft), context.params)
    # Values are checked before the models are loaded, which may take long.
    options["max_tokens"] = _checked_max_tokens(predict, options)
    check_prompt(target_options, text)
    with (
        # Loading calls back from native code, where an interrupt would be lost: it waits for the next safe moment.
        interrupts_held() as interrupted,
        _measuring(interrupted) as report,
        load(
            target_options,
            draft=draft_options,
            drafters=names,
            policy=chosen,
            verify=verify,
            remember=remember,
            report=report,
        ) as loaded,
    ):
        if interrupted.is_set():
            raise typer.Exit(exits.INTERRUPTED)
        if predict == -1:
            options["max_tokens"] = loaded.target.capabilities.context_length
        if compare:
            _compare(
                loaded, text, options, repeats, as_json, interrupted, reader_of(loaded.target_options or target_options)
            )
        else:
            _generate(loaded, text, options, as_json, interrupted)


def _generate(model: Model, prompt: str, options: GenerateOptions, as_json: bool, interrupted: threading.Event) -> None:
    stream = model.stream(prompt, **options)
    writer = AnswerWriter(prompt, [drafter.name for drafter in model.drafters], silent=as_json)
    for segments in stream.rounds():
        writer.write(segments)
        if interrupted.is_set():
            break
    writer.write(stream.close())
    writer.finish()
    generation = stream.so_far()
    if as_json:
        print_json(generation_json(model, generation))
    else:
        generation_report(error_console(), model, generation)
    if interrupted.is_set():
        raise typer.Exit(exits.INTERRUPTED)


def _compare(
    model: Model,
    prompt: str,
    options: GenerateOptions,
    repeats: int,
    as_json: bool,
    interrupted: threading.Event,
    open_reader: OpenReader,
) -> None:
    console = error_console()
    runs: list[tuple[Trial, Generation, Generation]] = []
    with console.status("warming up") as status, contextlib.suppress(Stopped):
        answer(model, prompt, options, speculate=True, stopped=interrupted.is_set)
        for run in run_trials(model, prompt, options, repeats, stopped=interrupted.is_set):
            runs.append(run)
            trial, _, speculative = run
            found = f"speculative is {trial.speedup:.2f} times plain" if speculative.stats.num_drafted else "no drafts"
            status.update(f"{len(runs)} of {repeats} pairs: {found}")
    if interrupted.is_set():
        console.print(f"interrupted after {len(runs)} of {repeats} pairs of runs")
    if not runs:
        raise typer.Exit(exits.INTERRUPTED)
    with console.status("finding out why texts differ, if they do"):
        comparison: Comparison = summarise(
            model, prompt, options, runs, open_reader=open_reader, stopped=interrupted.is_set
        )
    if as_json:
        print_json(comparison_json(model, comparison))
    else:
        comparison_report(console, model, comparison)
    if interrupted.is_set():
        raise typer.Exit(exits.INTERRUPTED)
    if comparison.divergence is not None and comparison.divergence.verdict == "bug":
        raise typer.Exit(exits.FAILURE)


_OF_A_FIXED_POLICY = ("draft_max", "draft_min", "draft_p_min", "draft_siblings")
_OF_SPECULATION = ("drafters", "policy", "draft_min", "draft_p_min", "draft_siblings", "verify", "remember", "compare")
_OF_DRAFTING_BY_MODEL = ("model_draft", *OF_THE_DRAFT_MODEL, "draft_siblings")


def _policy(context: typer.Context, name: str | None, plain: bool, fixed: FixedPolicy) -> Policy | str:
    """Return the policy that was asked for: draft lengths set by hand ask for a fixed one."""
    by_hand = [option for option in _OF_A_FIXED_POLICY if is_given(context, option)]
    if plain:
        return NO_SPECULATION
    if name is None:
        return fixed if by_hand else "auto"
    check_policy_name(name)
    if name != "fixed" and by_hand:
        option = f"--{by_hand[0].replace('_', '-')}"
        raise InputError(
            f"{option} is of policy fixed, and {name} finds draft lengths by itself: leave out one of them"
        )
    return fixed if name == "fixed" else name


@contextlib.contextmanager
def _measuring(interrupted: threading.Event) -> Iterator[Report]:
    """Show on a terminal how far measuring has come, the first time a model is loaded; an interrupt ends it."""
    with contextlib.ExitStack() as stack:
        status: Status | None = None

        def report(share: float) -> None:
            nonlocal status
            if interrupted.is_set():
                raise KeyboardInterrupt
            if status is None:
                status = stack.enter_context(error_console().status(""))
            status.update(f"measuring what passes cost here, once for this model: {share:.0%}")
            if share >= 1:
                # Attention is measured first, and then all else.
                stack.close()
                status = None

        yield report


def _refuse_without_effect(context: typer.Context, *, plain: bool, compares: bool, uses_draft_model: bool) -> None:
    """Refuse flags that were given and would do nothing."""
    without_effect: dict[str, str] = {}
    if not uses_draft_model:
        without_effect |= dict.fromkeys(_OF_DRAFTING_BY_MODEL, WITHOUT_DRAFT_MODEL)
    if plain:
        way_out = "has no effect without speculation: leave it out, or leave out --no-speculation (or --draft-max 0)"
        without_effect |= dict.fromkeys((*_OF_SPECULATION, *_OF_DRAFTING_BY_MODEL), way_out)
        if context.params["draft_max"] != 0:
            without_effect["draft_max"] = "has no effect with --no-speculation: leave out one of them"
    if not compares:
        without_effect["repeats"] = "has no effect without --compare"
    refuse_given(context, without_effect)


def _checked_max_tokens(predict: int, options: GenerateOptions) -> int:
    """Build the request's parts once, so that a bad value is reported at once; return the token limit."""
    max_tokens = _STOP_DEFAULTS.max_tokens if predict == -1 else predict
    if predict < -1:
        raise InputError(f"-n {predict} is out of range: give 1 or more, or -1 to fill the context")
    StopRules(max_tokens=max_tokens, stop=tuple(options["stop"] or ()))
    sampling = {k: v for k, v in options.items() if k in SamplingParams.__dataclass_fields__}
    SamplingParams(**sampling)  # type: ignore[arg-type]
    return max_tokens


def _parse_biases(values: list[str]) -> dict[int, float]:
    biases = {}
    for value in values:
        token_id, _, bias = value.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise InputError(f"--logit-bias {value!r} is not TOKEN_ID=BIAS, such as 13=-2.5 or 13=-inf") from None
    return biases
