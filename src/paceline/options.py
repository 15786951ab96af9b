"""What a call may set, read into the parts that a request is made of.

:class:`GenerateOptions` spells the fields of these parts out for type checkers, and a test holds it to them.
"""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar

from paceline.constraints import Source
from paceline.core.constraint import Constraint
from paceline.core.did_you_mean import no_such_option
from paceline.core.errors import InputError
from paceline.core.fields import fields_of
from paceline.core.logprobs import LogprobParams
from paceline.core.params import (
    CacheParams,
    PolicyName,
    SamplingParams,
    SpeculationParams,
    StopRules,
    VerifierName,
    draw_seed,
)
from paceline.core.reasoning import ReasoningBudget

_T = TypeVar("_T")
_PartT = TypeVar("_PartT", SamplingParams, StopRules, SpeculationParams, CacheParams, LogprobParams)


class GenerateOptions(TypedDict, total=False):
    """What a call may set.

    Meanings and defaults are those of :class:`SamplingParams`, :class:`StopRules`, :class:`SpeculationParams`,
    :class:`CacheParams` and :class:`LogprobParams`. ``constraint`` is what the answer keeps to: a source, such as
    :class:`~paceline.constraints.JsonSchema`, or what :meth:`Model.compile` made of one. ``prediction`` is a text, or
    its tokens.

    The default of ``verify`` is the model's. :attr:`Model.defaults` go before those of :class:`SamplingParams`.
    ``None`` is the default, as if the option were left out. Numbers may be numpy's.
    """

    max_tokens: int | None
    stop: Sequence[str] | None
    ignore_end: bool | None
    preserved_ids: Sequence[int] | None
    min_tokens: int | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    allowed_token_ids: Sequence[int] | None
    min_indent: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    penalty_last_n: int | None
    top_n_sigma: float | None
    typical_p: float | None
    dynatemp_range: float | None
    dynatemp_exponent: float | None
    dry_multiplier: float | None
    dry_base: float | None
    dry_allowed_length: int | None
    dry_penalty_last_n: int | None
    dry_sequence_breakers: Sequence[str] | None
    xtc_probability: float | None
    xtc_threshold: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    choice: int | None
    order: Sequence[str] | None
    reasoning_budget: ReasoningBudget | None
    speculate: bool | None
    drafters: Sequence[str] | None
    draft_max: int | None
    verify: VerifierName | None
    draft_min: int | None
    p_min: float | None
    policy: PolicyName | None
    prediction: str | Sequence[int] | None
    cache_prompt: bool | None
    namespace: str | None
    client: str | None
    logprobs: int | None
    post_sampling_probs: bool | None
    prompt_logprobs: int | None
    constraint: Source | Constraint | None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request asks for, complete and checked.

    Attributes:
        params: how it is sampled.
        rules: when it ends.
        speculation: how it is sped up.
        cache: whose it is, and what it may start from.
        logprobs: which log-probabilities come with its answer.
        constraint: what the answer keeps to; ``None`` for nothing.
        model_defaults: what of ``params`` the model's own defaults said, by field.
    """

    params: SamplingParams
    rules: StopRules
    speculation: SpeculationParams
    cache: CacheParams
    logprobs: LogprobParams
    constraint: Constraint | None = None
    model_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Any, ...]:
        """The parts, as :data:`REQUEST_PARTS` lists them."""
        return self.params, self.rules, self.speculation, self.cache, self.logprobs

    def replaced(self, changes: Mapping[str, object]) -> RequestOptions:
        """Return the same but for some fields of the parts."""

        def changed(part: _PartT) -> _PartT:
            # Building a part checks all of its fields.
            own: dict[str, Any] = {
                name: value for name, value in changes.items() if getattr(part, name, value) != value
            }
            return dataclasses.replace(part, **own) if own else part

        return dataclasses.replace(
            self,
            params=changed(self.params),
            rules=changed(self.rules),
            speculation=changed(self.speculation),
            cache=changed(self.cache),
            logprobs=changed(self.logprobs),
        )


REQUEST_PARTS: tuple[type, ...] = (SamplingParams, StopRules, SpeculationParams, CacheParams, LogprobParams)
"""The dataclasses whose fields a request may set."""


def read_options(
    options: Mapping[str, object], *, verify: VerifierName = "coupled", drafters: Sequence[str] | None = None
) -> RequestOptions:
    """Return what was set, with defaults for the rest; a seed that is not given is drawn.

    Args:
        options: by the names of :class:`GenerateOptions`; ``None`` is the default. A constraint is compiled.
        verify: how drafts are judged where that is not said.
        drafters: those there are, which ``drafters`` may choose from; ``None`` lets any name pass.
    """
    known = {each.name for part in REQUEST_PARTS for each in fields_of(part)} | {"constraint"}
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        there_are = ", ".join(part.__name__ for part in REQUEST_PARTS)
        raise InputError(no_such_option(unknown, sorted(known), f"see the fields of {there_are}"), field=unknown)
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    given.setdefault("seed", draw_seed())
    given.setdefault("verify", verify)
    speculation = make_part(SpeculationParams, given)
    if drafters is not None:
        for name in speculation.drafters or ():
            if name not in drafters:
                there_are = f"choose from {', '.join(drafters)}" if drafters else "none is loaded"
                raise InputError(f"unknown drafter {name!r}: {there_are}, or leave it out", field="drafters")
    return RequestOptions(
        make_part(SamplingParams, given),
        make_part(StopRules, given),
        speculation,
        make_part(CacheParams, given),
        make_part(LogprobParams, given),
        given.get("constraint"),
    )


def describe_options() -> str:
    """Return a section of a docstring with what a call may set, as the classes that it is of describe it."""
    sections = ((inspect.getdoc(part) or "").partition("Attributes:\n")[2] for part in REQUEST_PARTS)
    about = [textwrap.indent(inspect.cleandoc(" \n" + section).strip("\n"), "    ") for section in sections]
    constraint = "    constraint: what the answer keeps to, such as :class:`~paceline.constraints.JsonSchema`."
    return textwrap.indent("\n".join(["Keyword Args:", *about, constraint]), "        ").lstrip()


def make_part(part: type[_T], given: Mapping[str, Any]) -> _T:
    return part(**{each.name: given[each.name] for each in fields_of(part) if each.name in given})
