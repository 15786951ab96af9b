"""What speculation gave, in plain numbers: for people and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.api import Model
from paceline.cli.display import error_console
from paceline.core.fields import fields_of
from paceline.core.params import SamplingParams
from paceline.core.stats import OFF_REASONS, RequestStats, percentile
from paceline.drafters.following import FollowingDrafter
from paceline.drafters.translated import Case, TranslatedDrafter
from paceline.engines.memory import MemoryPlan
from paceline.lab.comparison import Comparison
from paceline.planning.report import PlannerReport
from paceline.sizes import format_bytes, format_memory
from paceline.streams import Generation

PERCENTILES = (0.5, 0.9, 0.99)
"""Shares of the gaps between tokens (0 to 1) at which a report gives their length."""
_ENDINGS = {
    "cancelled": "stopped",
    "length": "cut off at -n",
    "context": "cut off where the context is full (-c)",
}
_VERDICT_STYLES = {"speculation is faster": "green", "plain is faster": "yellow"}


def generation_report(console: Console, model: Model, generation: Generation) -> None:
    """Print the closing block: llama.cpp's figures first, then what they leave out."""
    stats = generation.stats
    decoded = max(stats.predicted_tokens - 1, 0)
    lines = [
        "",
        f"encoded {stats.prompt_tokens:4d} tokens in {stats.prompt_s:8.3f} seconds, "
        f"speed: {stats.prompt_per_second or 0.0:8.3f} t/s",
        f"decoded {decoded:4d} tokens in {stats.decode_s:8.3f} seconds, "
        f"speed: {stats.predicted_per_second or 0.0:8.3f} t/s  (the first token came with the prompt)",
        "",
    ]
    if model.drafter_names:
        share = stats.accept_share
        lines += [
            f"n_draft   = {model.policy.draft_length}",
            f"n_predict = {stats.predicted_tokens}",
            f"n_drafted = {stats.num_drafted}",
            f"n_accept  = {stats.num_accepted}",
            f"accept    = {'-' if share is None else f'{share:.3%}'}",
            "",
            f"acceptance rate alpha   = {_format_number(stats.acceptance_rate)}  "
            "(accepted / judged: neither what follows a wrong token nor a second guess at a place is judged)",
            f"acceptance length tau   = {_format_number(stats.acceptance_length)}  "
            "(tokens a round, with the target's own bonus token)",
        ]
        if (translated := _find_translated(model)) is not None:
            lines.append(f"draft model             = translated: {_describe_levels(translated.cases)}")
        # A request may bring drafters of its own.
        sources = dict.fromkeys([*(drafter.name for drafter in model.drafters), *stats.drafted_by_source])
        if len(sources) > 1:
            lines.append(
                "accepted from           = "
                + ", ".join(
                    f"{name} {stats.accepted_by_source[name]} of {stats.drafted_by_source[name]}" for name in sources
                )
            )
    else:
        lines += [f"n_predict = {stats.predicted_tokens}", ""]
    lines += [_gain_line(stats), f"time                    = {_breakdown(stats)}"]
    gaps = stats.inter_token_s()
    if gaps:
        shown = [f"p{share:.0%} {percentile(gaps, share) * 1e3:.2f}".replace("%", "") for share in PERCENTILES]
        longest = f"max {max(gaps) * 1e3:.2f} ms"
        lines.append(f"between tokens          = {', '.join(shown)}, {longest}  (tokens of a round arrive together)")
    lines += [
        f"ended by                = {generation.finish_reason}; seed {generation.seed}",
        *_default_lines(model, generation),
        f"target                  = {model.target.description}",
        *(f"draft                   = {each.engine.description}" for each in _find_draft_models(model)),
    ]
    console.print("\n".join(lines), markup=False)


def one_line_report(model: Model, generation: Generation) -> str:
    """Return what an answer of a chat took, and what speculation gained, as one line."""
    stats = generation.stats
    parts = [stats.summarize()]
    first = f"{'first' if stats.predicted_tokens else 'ended'} after {stats.prompt_s:.1f} s"
    if stats.cached_tokens:
        first += f", {stats.cached_tokens} of {stats.cached_tokens + stats.prompt_tokens} prompt tokens reused"
    parts.append(first)
    if generation.finish_reason not in ("end", "stop"):
        parts.append(_ENDINGS.get(generation.finish_reason or "", f"ended by {generation.finish_reason}"))
    return "; ".join(parts)


def generation_json(model: Model, generation: Generation) -> dict[str, Any]:
    """Return the answer and its figures as plain data; times in milliseconds."""
    stats = generation.stats
    gaps = stats.inter_token_s()
    planned = model.policy.report()
    return {
        "text": generation.text,
        "token_ids": list(generation.token_ids),
        "sources": list(generation.sources),
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "model_defaults": dict(generation.model_defaults),
        "target": model.target.description,
        "drafters": [drafter.name for drafter in model.drafters],
        "draft_levels": None if (translated := _find_translated(model)) is None else dict(translated.cases),
        "memory": None if model.memory_plan is None else memory_json(model.memory_plan),
        "planner": None if planned is None else planner_json(planned),
        "stats": {
            **stats.to_dict(),
            "inter_token_ms": {f"p{share:.0%}".rstrip("%"): percentile(gaps, share) * 1e3 for share in PERCENTILES}
            if gaps
            else None,
        },
    }


def planner_json(report: PlannerReport) -> dict[str, Any]:
    """Return what the planner learned as plain data; times in milliseconds."""
    return {
        "calibration": {
            name: {
                "error": reliability.error,
                "verdicts": reliability.trials,
                "bins": [
                    {"predicted": predicted, "actual": actual, "verdicts": count}
                    for predicted, actual, count in reliability.rows()
                ],
            }
            for name, reliability in report.reliability.items()
        },
        "debt_ms": report.debt_s * 1e3,
        "plain_ms": report.plain_s * 1e3,
        "drift": report.drift,
        "remembered": list(report.remembered),
    }


def comparison_report(console: Console, model: Model, comparison: Comparison) -> None:
    """Print which way is faster, by how much, and whether the texts are equal."""
    trials = comparison.trials
    speedups = [trial.speedup for trial in trials]
    noise = [trial.noise for trial in trials]
    plain = [speed for trial in trials for speed in (trial.plain_before, trial.plain_after)]
    speculative = [trial.speculative for trial in trials]
    verdict = comparison.verdict
    spread = f"({min(speedups):.2f} to {max(speedups):.2f} in {len(trials)} pairs)"
    if comparison.num_drafted == 0:
        words = f"both ways are plain decoding, so their ratio of {comparison.speedup:.2f} {spread} names no winner"
    else:
        words = f"speculative decoding runs at {comparison.speedup:.2f} times the speed of plain {spread}"
    console.print(f"\n{verdict}: {words}", style=_VERDICT_STYLES.get(verdict))
    lines = [
        f"speculative             = {_format_speeds(speculative)}",
        f"plain                   = {_format_speeds(plain)}",
        f"plain against plain     = {min(noise):.2f} to {max(noise):.2f}",
        f"acceptance length tau   = {_format_number(comparison.speculative.stats.acceptance_length)}",
        f"texts                   = {_describe_equality(model, comparison)}",
        *_default_lines(model, comparison.speculative),
    ]
    console.print("\n".join(lines), markup=False)


def comparison_json(model: Model, comparison: Comparison) -> dict[str, Any]:
    divergence = comparison.divergence
    return {
        "verdict": comparison.verdict,
        "speedup": comparison.speedup,
        "num_drafted": comparison.num_drafted,
        "trials": [
            {
                "plain_tokens_per_s": [trial.plain_before, trial.plain_after],
                "speculative_tokens_per_s": trial.speculative,
                "speedup": trial.speedup,
                "plain_against_plain": trial.noise,
            }
            for trial in comparison.trials
        ],
        "equal": comparison.equal,
        "repeatable": comparison.repeatable,
        "divergence": None if divergence is None else asdict(divergence),
        "plain": generation_json(model, comparison.plain),
        "speculative": generation_json(model, comparison.speculative),
    }


def _default_lines(model: Model, generation: Generation) -> list[str]:
    """Say in a line what the model's own defaults set, if they set anything."""
    applied = [
        f"{field.called} {','.join(value) if isinstance(value, tuple) else value}"
        for field in fields_of(SamplingParams)
        if (value := generation.model_defaults.get(field.name)) is not None
    ]
    return [f"defaults of the model   = {', '.join(applied)}  ({model.defaults.source})"] if applied else []


def _find_draft_models(model: Model) -> list[FollowingDrafter[Any]]:
    return [drafter for drafter in model.drafters if isinstance(drafter, FollowingDrafter)]


def _find_translated(model: Model) -> TranslatedDrafter | None:
    return next((drafter for drafter in model.drafters if isinstance(drafter, TranslatedDrafter)), None)


def _describe_levels(cases: Mapping[Case, int]) -> str:
    """Return what became of a translated draft's levels, in words."""
    words: Mapping[Case, str] = {
        "aligned": "one token",
        "split": "several",
        "merged": "replaced others",
        "none": "none",
        "healed": "a cut word",
        "unreadable": "text not readable",
    }
    found = [f"{word} {cases[case]}" for case, word in words.items() if cases[case]]
    return "levels that gave " + ", ".join(found) if found else "nothing was asked of it"


def _describe_equality(model: Model, comparison: Comparison) -> str:
    repeatable = "" if comparison.repeatable else "; but runs of one kind differ among themselves"
    divergence = comparison.divergence
    if divergence is None and not comparison.equal:
        return "differ, as they may: rejection keeps the distribution, not the text of a seed"
    if divergence is None:
        return f"equal, {len(comparison.plain.token_ids)} tokens{repeatable}"
    if divergence.verdict == "not judged":
        return f"differ at token {divergence.index}; not judged, as it was interrupted{repeatable}"
    if divergence.verdict == "unrepeatable":
        return f"differ at token {divergence.index}; made again they did not, so there is no telling why{repeatable}"
    spell = model.target.vocabulary.token_bytes
    margin = "at the border of a truncation" if divergence.margin is None else f"margin {divergence.margin:.2g}"
    return (
        f"differ at token {divergence.index}: plain {_show_token(spell(divergence.plain_token))}, "
        f"speculative {_show_token(spell(divergence.speculative_token))}; {margin}, rows differ by "
        f"{divergence.logit_difference:.2g}, of which rounding explains {divergence.allowed:.2g}: "
        f"{divergence.verdict}{repeatable}"
    )


def _show_token(token: bytes) -> str:
    return repr(token.decode("utf-8", "backslashreplace"))


def _format_speeds(speeds: list[float]) -> str:
    return f"{statistics.median(speeds):.1f} t/s ({min(speeds):.1f} to {max(speeds):.1f})"


def _gain_line(stats: RequestStats) -> str:
    """Return a line on how much faster than plain decoding it was, or why nothing was drafted."""
    if not stats.num_drafted:
        reason = stats.off_reason
        words = "the answer ended with its first token" if reason is None else OFF_REASONS[reason]
        return f"nothing was drafted     = {words}"
    if stats.gain is None:
        return "gain                    = not known: this policy does not say what plain rounds take  (--compare does)"
    return (
        f"gain                    = about {stats.gain:.2f} times plain  "
        f"({stats.gain_low:.2f} to {stats.gain_high:.2f} by what plain rounds took)"
    )


def _breakdown(stats: RequestStats) -> str:
    phases = stats.phases
    total = phases.total_s
    if total <= 0:
        return "-"
    parts = (
        ("draft", phases.draft_s),
        ("verify", phases.verify_s),
        ("sampling", phases.sampling_s),
        ("rest", phases.rest_s),
    )
    return ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in parts)


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def print_memory_plan(plan: MemoryPlan) -> None:
    """Print what goes to what, and what a pass reads and takes."""
    console = error_console()
    table = Table(box=None, show_header=False, pad_edge=False, style="dim")
    table.add_column()
    table.add_column(justify="right")
    layers_bytes = plan.resident_bytes + plan.pass_bytes
    rows = (
        (f"layers kept in memory, of {format_bytes(layers_bytes)}", plan.resident_bytes),
        ("other weights of the model", plan.others_bytes),
        ("buffer for streamed layers", plan.ring_bytes),
        ("draft model", plan.draft_bytes),
        ("KV cache and scratch", plan.working_bytes),
        ("prompt cache", plan.prompts_bytes),
        ("Python", plan.process_bytes),
        ("spare", plan.spare_bytes),
    )
    for name, num_bytes in rows:
        if num_bytes:
            table.add_row(name, format_bytes(num_bytes))
    console.print(f"{format_memory(plan.total_bytes)} of memory are used by", style="dim", markup=False)
    console.print(table)
    all_experts = f", all {plan.experts} experts of each layer among them" if plan.experts else ""
    past = "" if plan.is_direct else "; this file system has no reads past the page cache, which costs some of it"
    console.print(
        f"every pass reads {format_bytes(plan.pass_bytes)}{all_experts}, at {format_bytes(int(plan.bytes_per_s))}/s: "
        f"{plan.pass_s:.2g} s for a token without drafts{past}",
        style="dim",
        markup=False,
    )


def memory_json(plan: MemoryPlan) -> dict[str, Any]:
    """Return a memory plan as plain data, in bytes and seconds."""
    parts = ("total", "resident", "others", "ring", "draft", "working", "prompts", "process", "spare", "pass")
    return {
        **{f"{part}_bytes": getattr(plan, f"{part}_bytes") for part in parts},
        "bytes_per_s": plan.bytes_per_s,
        "is_direct": plan.is_direct,
    }
