"""What commands that generate have in common: the models they were told, how to speculate, and loading them."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias, cast

import typer
from rich.status import Status

from paceline.api import Model, load
from paceline.cli import exits
from paceline.cli.display import error_console
from paceline.cli.downloads import locate_pair, make_draft
from paceline.cli.interrupts import hold_interrupts
from paceline.cli.options import (
    NAMES_OF_THE_DRAFT_MODEL,
    OF_THE_DRAFT_MODEL,
    WITHOUT_DRAFT_MODEL,
    GivenOptions,
    is_given,
    is_of_file,
    is_set,
    names_draft_model,
    refuse_given,
)
from paceline.cli.report import print_memory_plan
from paceline.conversion.own_draft import OwnDraft
from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.core.params import MAX_TOKENS, SamplingParams, SpeculationParams, StopRules, VerifierName
from paceline.engines.libraries import idle_parts
from paceline.engines.loading import foreseen_context_length, memory_limit
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.environment import ModelChoice
from paceline.model_pair import default_draft, default_own_draft
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft
from paceline.models.hub.reference import HubModel
from paceline.options import GenerateOptions
from paceline.planning.base import Policy
from paceline.planning.costs.meter import Report
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
from paceline.planning.registry import POLICY_NAMES, check_policy_name
from paceline.server_options import DEFAULT_PARALLEL, ServerOptions
from paceline.terminal_text import printable_line

SPECULATION_PANEL: Final = "Speculation"
"""Heading of the options of speculation in ``--help``."""

_OF_A_FIXED_POLICY: Final = {field.name: field.flags[0] for field in fields_of(FixedPolicy)}
_OF_SPECULATION: Final = (
    *("drafters", "policy", "draft_min", "p_min", "siblings", "verify", "remember", "compare"),
    "prediction",
)
_OF_DRAFTING_BY_MODEL: Final = (*NAMES_OF_THE_DRAFT_MODEL, *OF_THE_DRAFT_MODEL, "siblings")


def _complete_policies(incomplete: str) -> list[str]:
    return [name for name in POLICY_NAMES if name.startswith(incomplete)]


PolicyName: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help=f"What decides how much is drafted: {', '.join(POLICY_NAMES)}. "
        "[dim]\\[auto; fixed where a draft length is given][/dim]",
        metavar="NAME",
        autocompletion=_complete_policies,
        rich_help_panel=SPECULATION_PANEL,
    ),
]
Remember: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--remember/--no-remember",
        help="Of policy auto: start with what earlier runs learned of these models, and keep what this one learns. "
        "It is figures only, nothing of any text.",
        rich_help_panel=SPECULATION_PANEL,
    ),
]


def announce_builtin_model(models: ModelChoice) -> None:
    """Say what answers where nobody named a model, neither on the command line nor in the environment.

    To be called when it is about to answer: an error before is one line.
    """
    if models.target is None:
        error_console().print(
            "no model is named (-m FILE), so the small built-in one answers: it only continues code, prose, JSON and "
            "logs",
            style="yellow",
            markup=False,
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """Models and a way to speculate, as they were asked for; nothing was looked up yet.

    Attributes:
        draft: what the draft model was called; ``None`` for none.
        remember: whether what was learned is kept.
        may_draft: whether a target that needs a draft model may be given one.
    """

    models: ModelChoice
    draft: str | Path | HubModel | None
    drafters: tuple[str, ...] | None
    policy: Policy | str
    verify: VerifierName
    remember: bool
    may_draft: bool

    def find(self) -> FoundModels:
        """Return where the models are; those of the hub are fetched if they are not there.

        A target whose layers will be read while they are used gets a draft of its own, where none was named.
        """
        target, draft = locate_pair(self.models, self.draft, may_draft=self.may_draft)
        if draft is not None and (doubt := doubt_draft(target, Path(draft.path), self.draft)) is not None:
            error_console().print(f"warning: {printable_line(doubt)}", style="yellow", markup=False)
        if draft is not None or not self.may_draft:
            return FoundModels(target, draft)
        if (own := default_own_draft(target)) is None:
            return FoundModels(target, self.models.draft if default_draft(target) is not None else None)
        error_console().print(
            f"{Path(target.path).name} does not fit into memory: its own copy in {own.file_type} drafts (-md for "
            "another)",
            style="dim",
            markup=False,
        )
        with contextlib.suppress(InputError):  # it is tried again at load, which says what is wrong, and goes on
            make_draft(own)
        return FoundModels(target, self.models.draft)

    def load(self, found: FoundModels, report: Report, **options: Any) -> Model:
        """Load what was found; ``options`` are further ones of :func:`paceline.load`."""
        return load(
            found.target,
            draft=found.draft,
            drafters=self.drafters,
            policy=self.policy,
            verify=self.verify,
            remember=self.remember,
            report=report,
            **options,
        )


@dataclass(frozen=True, slots=True)
class FoundModels:
    """The models of a setup as engines are given them; a draft without a path is the default one of the target."""

    target: ModelOptions
    draft: ModelOptions | DraftOptions | None


def doubt_draft(target: ModelOptions, draft: Path, named: str | Path | HubModel | None) -> str | None:
    """Return why a draft model that was named will hardly gain anything; ``None`` where it may."""
    path = Path(target.path)
    is_same, is_copy = draft.exists() and path.exists() and draft.samefile(path), OwnDraft.parse(named) is not None
    if not (is_same or is_copy) or target.rpc or memory_limit(target) is not None:
        # Layers that are sent or read for each pass make it cost more than the file's size tells.
        return None
    if is_same:
        return f"{path.name} drafts for itself (-md), at its own cost, so nothing is gained: name a smaller model"
    bits = re.match(r"I?Q([1-4])_|MXFP(4)", describe(path).file_type or "")
    if bits is None:
        return None
    return f"{path.name} has {bits[1] or bits[2]} bits a weight, and its own copy (-md {named}) seldom pays there"


def choose_setup(
    context: typer.Context,
    models: ModelChoice,
    speculation: SpeculationParams,
    fixed: FixedPolicy,
    *,
    policy: str | None,
    remember: bool,
    without_effect: Mapping[str, str] | None = None,
) -> Setup:
    """Return what was asked for; refuses what would do nothing, or contradicts something else.

    ``without_effect`` has further parameters that do nothing in this call, and why.
    """
    names = speculation.drafters
    named_draft = models.named_draft
    if names is not None and "draft" not in names and not names_draft_model(context):
        named_draft = None
    uses_draft_model = named_draft is not None or (models.target is None and (names is None or "draft" in names))
    plain = not speculation.speculate or fixed.draft_max == 0
    reasons = _find_ineffective(context, fixed, plain=plain, uses_draft_model=uses_draft_model)
    refuse_given(context, {**reasons, **(without_effect or {})})
    if plain:
        # Of the environment: on the command line they are refused.
        names = named_draft = None
    elif named_draft is None and uses_draft_model:
        named_draft = embedded_draft()
    chosen = _choose_policy(context, policy, plain, fixed)
    if remember and chosen != "auto":
        way_out = "applies to policy auto only: leave it out, or leave out --policy and the --draft-* options"
        refuse_given(context, {"remember": way_out})
    may_draft = not plain and named_draft is None and (names is None or "draft" in names)
    return Setup(models, named_draft, names, chosen, speculation.verify, remember, may_draft)


def count_requests(context: typer.Context, models: ModelChoice, *, exact: bool) -> tuple[int, bool]:
    """Return how many requests a server answers at once, and whether somebody said so."""
    if is_set(context, "max_sequences") or models.settings.max_sequences != 1:
        return models.settings.max_sequences, True
    return 1 if exact else DEFAULT_PARALLEL, False


def size_models(context: typer.Context, found: FoundModels, models: ModelChoice, options: ServerOptions) -> FoundModels:
    """Return the models of a server with the room that requests have, as llama-server deals it out.

    ``-c`` is the room of all requests together. Each has an equal part of it, or with ``--kv-unified`` whatever the
    others leave. Exact texts need rooms that are parted, so that without ``-np`` one request has all of it.
    """
    target = found.target
    parallel, by_number = count_requests(context, models, exact=target.exact)
    unified = options.kv_unified if options.kv_unified is not None else not (by_number or target.exact)
    total = target.context_length
    if total is None and options.kv_unified is False and not target.exact:
        total = foreseen_context_length(target)
    if total is None:
        # As elsewhere: the model's own, which all share.
        target = replace(target, max_sequences=parallel)
    else:
        if not unified and total // parallel < 1:
            raise InputError(f"-c {total} for {parallel} requests (-np) leaves none a token: raise -c or lower -np")
        # One request has no more than the model was made for, however much room there is.
        trained = describe(Path(target.path)).context_length or total
        if total // parallel > trained:
            each = "one request" if parallel == 1 else f"each of {parallel} requests"
            error_console().print(
                f"warning: -c {total} is more than {each} can use: {printable_line(Path(target.path).name)} was made "
                f"for {trained} tokens, and gets no more; for longer texts take a model made for them",
                style="yellow",
                markup=False,
            )
        length = min(total if unified else total // parallel, trained)
        target = replace(target, max_sequences=parallel, context_length=length, cells=total if unified else None)
    draft = found.draft
    if isinstance(draft, ModelOptions):
        if draft.context_length is not None and draft.context_may_shrink:
            draft = replace(draft, context_length=target.context_length)
        draft = replace(draft, max_sequences=parallel)
    return FoundModels(target, draft)


def tell_idle(options: ModelOptions) -> None:
    """Say which GPU of this machine, or which part of its processor, the engine of a model was built without."""
    for idle in idle_parts(options):
        error_console().print(printable_line(str(idle)), style="yellow", markup=False)


@contextlib.contextmanager
def open_model(setup: Setup, found: FoundModels, *, silent: bool = False) -> Iterator[tuple[Model, threading.Event]]:
    """Load the models for as long as the block runs; yield the model, and what the first interrupt sets.

    The first interrupt ends measuring at its next step. Within the block it only sets the event. ``silent`` leaves out
    remarks.
    """
    with hold_interrupts() as interrupted, contextlib.ExitStack() as stack:
        with show_measuring(interrupted) as report:
            model = stack.enter_context(setup.load(found, report))
        if interrupted.is_set():
            raise typer.Exit(exits.INTERRUPTED)
        if model.memory_plan is not None:
            print_memory_plan(model.memory_plan)
        if not silent:
            tell_idle(found.target)
        yield model, interrupted


def request_options(
    context: typer.Context,
    model: Model,
    given: GivenOptions,
    params: SamplingParams,
    rules: StopRules,
    speculation: SpeculationParams,
) -> GenerateOptions:
    """Return the options of a request: what was set, and the model's own defaults for what was not."""
    if rules.max_tokens == MAX_TOKENS:
        rules = replace(rules, max_tokens=model.target.capabilities.context_length)
    of_model = {field.name for field in fields_of(SpeculationParams)}
    options = GenerateOptions(seed=params.seed, stop=rules.stop, max_tokens=rules.max_tokens)
    others = {name: value for name, value in given.values.items() if name not in of_model | options.keys()}
    options.update(cast("GenerateOptions", others))
    if speculation.draft_max is not None and not is_set(context, "draft_max"):
        options["draft_max"] = speculation.draft_max
    return options


def _choose_policy(context: typer.Context, name: str | None, plain: bool, fixed: FixedPolicy) -> Policy | str:
    """Return the policy that was asked for: draft lengths set by hand ask for a fixed one."""
    by_hand = [flag for each, flag in _OF_A_FIXED_POLICY.items() if is_set(context, each)]
    if plain:
        return NO_SPECULATION
    if name is None:
        return fixed if by_hand else "auto"
    check_policy_name(name)
    if name != "fixed" and by_hand:
        raise InputError(
            f"{by_hand[0]} belongs to policy fixed, and policy {name} chooses draft lengths itself: leave out one"
        )
    return fixed if name == "fixed" else name


@contextlib.contextmanager
def show_measuring(interrupted: threading.Event) -> Iterator[Report]:
    """Show on a terminal how far measuring has come; an interrupt ends it.

    What is shown is gone when the block ends, however far measuring came: it may end before its time is up.
    """
    with contextlib.ExitStack() as stack:
        status: Status | None = None

        def report(share: float) -> None:
            nonlocal status
            if interrupted.is_set():
                raise KeyboardInterrupt
            if status is None:
                status = stack.enter_context(error_console().status(""))
            status.update(f"measuring what passes cost here: {share:.0%}")

        yield report


def _find_ineffective(
    context: typer.Context, fixed: FixedPolicy, *, plain: bool, uses_draft_model: bool
) -> dict[str, str]:
    """Return why flags would do nothing, by parameter."""
    without_effect: dict[str, str] = {}
    if not uses_draft_model:
        without_effect |= dict.fromkeys(_OF_DRAFTING_BY_MODEL, WITHOUT_DRAFT_MODEL)
    if plain:
        by_environment = fixed.draft_max != 0 and not is_given(context, "speculate")
        off = "leave out --no-speculation (or --draft-max 0)"
        if is_of_file(context, "speculate"):
            off = f"take no-speculation out of {cast('Any', context.default_map).file}"
        elif by_environment:
            off = "unset PACELINE_SPECULATE"
        way_out = f"has no effect without speculation: leave it out, or {off}"
        without_effect |= dict.fromkeys((*_OF_SPECULATION, *_OF_DRAFTING_BY_MODEL), way_out)
        if fixed.draft_max != 0:
            without_effect["draft_max"] = (
                way_out if by_environment else "has no effect with --no-speculation: leave out one of them"
            )
    return without_effect
