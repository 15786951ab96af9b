"""The figures as tables, for a terminal and as a fragment of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.reporting import table
from rich.console import Console

from paceline.core.params import SamplingParams
from paceline.lab.intervals import ALL, Ratio, Share
from paceline.lab.task import LOOPING_BELOW
from training.pair.evaluation import (
    COPIED_TOKENS,
    DRAFT_LENGTH,
    GREEDY,
    INTERLUDE_TOKENS,
    PASSAGE_TOKENS,
    PROMPT_TOKENS,
    SAMPLED,
    SETTINGS,
    SIDE_TOKENS,
    Figures,
    Setting,
)

_NONE = "-"
_WRITTEN = (GREEDY, SAMPLED)


@dataclass(frozen=True, slots=True)
class Table:
    """A table in words."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(figures: Figures, max_tokens: int) -> list[Table]:
    """Return all tables; ``max_tokens`` is how long the answers were."""
    # One kind alone is all there is.
    groups = [*figures.texts, ALL] if len(figures.texts) > 1 else list(figures.texts)
    return [
        _loss(figures, groups),
        _agreement(figures, groups, max_tokens),
        _coupled(figures, groups[-1]),
        *_chains(figures, groups),
        _looping(figures, groups, max_tokens),
        _copying(figures, groups),
    ]


def print_tables(console: Console, shown: Sequence[Table], figures: Figures) -> None:
    """Print the tables, and the bars below them."""
    for each in shown:
        made = table(each.title, *each.columns)
        for row in each.rows:
            made.add_row(*row)
        console.print(made)
        # Not as the table's caption, which would be as narrow as the table.
        console.print(each.note, style="dim", markup=False)
        console.print()
    console.print("\n".join(_bars(figures)), markup=False)


def markdown(shown: Sequence[Table], figures: Figures, files: Mapping[str, str]) -> str:
    """Return the tables as Markdown."""
    texts = ", ".join(f"{count} of {kind}" for kind, count in figures.texts.items())
    lines = [
        f"Measured on `{files['target']}` and `{files['draft']}` as the engine runs them, on held-out texts "
        f"({texts}), by `python -m training pair`. A figure after ± is one standard error, with whole texts as the "
        "independent units.",
        "",
        *(f"- {bar}" for bar in _bars(figures)),
        "",
    ]
    for each in shown:
        rules = ["---", *["---:"] * (len(each.columns) - 1)]
        lines += [f"### {each.title}", "", each.note, ""]
        lines += [f"| {' | '.join(row)} |" for row in (each.columns, rules, *each.rows)]
        lines.append("")
    return "\n".join(lines[:-1])


def _loss(figures: Figures, groups: Sequence[str]) -> Table:
    nats, bits = figures.loss["nats_per_token"], figures.loss["bits_per_byte"]
    rows = [
        [
            group,
            *(_number(by_model[name][group]) for by_model in (nats, bits) for name in ("target", "draft")),
            f"{nats['target'][group].trials:,}",
        ]
        for group in groups
    ]
    columns = ["text", "target, nats/token", "draft, nats/token", "target, bits/byte", "draft, bits/byte", "tokens"]
    return Table("Loss on held-out text", "Each text from its start; its first token is not predicted.", columns, rows)


def _agreement(figures: Figures, groups: Sequence[str], max_tokens: int) -> Table:
    sources = [figures.agreement[name] for name in ("held-out", *(setting.name for setting in _WRITTEN))]
    rows = [[group, *(_percent(by_group[group]) for by_group in sources)] for group in groups]
    trials = ", ".join(f"{by_group[groups[-1]].trials:,}" for by_group in sources)
    columns = ["text", "held-out", *(f"own, {_short(setting)}" for setting in _WRITTEN)]
    return Table(
        "Same argmax of target and draft",
        f"Both read the same tokens: held-out text, and the target's own {max_tokens} tokens after {PROMPT_TOKENS} of "
        f"held-out text, greedy and at temperature {SAMPLED.temperature:g} with the default filters. Over {trials} "
        "tokens.",
        columns,
        rows,
    )


def _coupled(figures: Figures, group: str) -> Table:
    rows = []
    for setting in SETTINGS:
        ratios, deviation = figures.coupled[setting.name], figures.coupled_deviation[setting.name][group]
        rows.append(
            [
                f"{setting.temperature:g}",
                _NONE if setting == GREEDY else "default" if setting.filters else "none",
                *(_percent(ratios[column][group]) for column in ("held-out", "own", "judged", "measured")),
                _NONE if deviation is None else f"{deviation:+.2f}",
                f"{ratios['measured'][group].trials:,}",
            ]
        )
    defaults = SamplingParams()
    return Table(
        "Acceptance of a draft token under coupled verification",
        f"Given that what is before it was accepted. Default filters are top-k {defaults.top_k}, top-p "
        f"{defaults.top_p:g} and min-p {defaults.min_p:g}. Closed form: sum_i 1 / sum_j max(p_j/p_i, q_j/q_i), "
        "averaged over places in held-out text, in own text, and over the places where live runs judged a draft; "
        "measured: what became of these drafts; deviation: measured less closed form in standard errors of the draws. "
        f"Temperatures other than 0 and {SAMPLED.temperature:g}, and no filters: {SIDE_TOKENS} tokens from every "
        "second prompt.",
        ["temperature", "filters", "held-out", "own", "judged places", "measured", "deviation", "drafts"],
        rows,
    )


def _chains(figures: Figures, groups: Sequence[str]) -> list[Table]:
    result = []
    for setting in _WRITTEN:
        chains = [figures.chain[setting.name][group] for group in groups]
        depths = [str(at_depth.depth) for at_depth in chains[0]]
        accepted = [
            [depth, *(_percent_of(chain[index].accepted) for chain in chains)] for index, depth in enumerate(depths)
        ]
        survival = [
            [depth, *(_plus_minus(chain[index].survival, chain[index].survival_error) for chain in chains)]
            for index, depth in enumerate(depths)
        ]
        columns = ["depth", *groups]
        result += [
            Table(
                f"Chain acceptance by depth, {_long(setting)}",
                f"Share of drafts accepted, of those whose predecessors all were; in brackets how many those are. "
                f"Live runs with the draft model alone, always {DRAFT_LENGTH} drafts a round, default filters.",
                columns,
                accepted,
            ),
            Table(
                f"Survival by depth, {_long(setting)}",
                "Chance that a round accepts at least so many drafts: the product of the shares above.",
                columns,
                survival,
            ),
        ]
    return result


def _looping(figures: Figures, groups: Sequence[str], max_tokens: int) -> Table:
    names = [setting.name for setting in _WRITTEN]
    rows = [
        [
            group,
            *(_share(figures.looping[name][group]) for name in ("held-out", *names)),
            *(_share(figures.ended[name][group]) for name in names),
        ]
        for group in groups
    ]
    return Table(
        "Answers that loop",
        f"Fewer than {LOOPING_BELOW:.0%} of the 4-grams of {max_tokens} generated tokens are distinct. Ends of text "
        "are written over, so that every answer has as many tokens; the last columns say how many had one. The first "
        "column is the held-out text that stands where the answers do: JSON and logs repeat themselves. Greedy, and "
        f"at temperature {SAMPLED.temperature:g} with the default filters. In brackets the 95% Wilson interval.",
        [
            "text",
            "held-out text",
            *(f"{what}, {_short(setting)}" for what in ("loop", "had an end") for setting in _WRITTEN),
        ],
        rows,
    )


def _copying(figures: Figures, groups: Sequence[str]) -> Table:
    missing = Ratio(None, None, 0, 0)
    with_copy, without = figures.copying["with"], figures.copying["without"]
    rows = [
        [
            group,
            _percent(with_copy.get(group, missing)),
            _percent(without.get(group, missing)),
            f"{with_copy.get(group, missing).trials:,}",
        ]
        for group in groups
    ]
    return Table(
        "Copying",
        f"A passage of {PASSAGE_TOKENS} tokens, the {INTERLUDE_TOKENS} that follow it, and the passage again up to its "
        f"middle: share of its next {COPIED_TOKENS} tokens that are the target's argmax, each given those before; and "
        "of the same tokens without the first copy.",
        ["text", "with the first copy", "without", "tokens"],
        rows,
    )


def _short(setting: Setting) -> str:
    return "greedy" if setting == GREEDY else f"{setting.temperature:g}"


def _long(setting: Setting) -> str:
    return "greedy" if setting == GREEDY else f"temperature {setting.temperature:g}"


def _bars(figures: Figures) -> list[str]:
    return [
        f"{bar.name}: {_NONE if bar.value is None else f'{bar.value:.1%}'}; wanted {bar.wanted}: "
        f"{'met' if bar.met else 'missed'}"
        for bar in figures.bars
    ]


def _number(figure: Ratio) -> str:
    if figure.value is None:
        return _NONE
    error = "" if figure.standard_error is None else f" ± {figure.standard_error:.3f}"
    return f"{figure.value:.3f}{error}"


def _percent(figure: Ratio) -> str:
    return _plus_minus(figure.value, figure.standard_error)


def _percent_of(figure: Ratio) -> str:
    return f"{_percent(figure)} ({figure.trials:,})"


def _plus_minus(value: float | None, error: float | None) -> str:
    if value is None:
        return _NONE
    return f"{value:.1%}" if error is None else f"{value * 100:.1f} ± {error * 100:.1f}%"


def _share(figure: Share) -> str:
    if figure.value is None:
        return _NONE
    return f"{figure.hits} of {figure.texts} ({figure.low:.1%} to {figure.high:.1%})"
