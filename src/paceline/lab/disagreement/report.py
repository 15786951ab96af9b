"""What comparing found, as a report and as JSON."""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from paceline.lab.charts import draw_survival
from paceline.lab.disagreement.places import CAUSES, ComparedToken, Tops
from paceline.lab.disagreement.statistics import DivergenceStatistics, WithError, summarize
from paceline.lab.intervals import ALL, Ratio, Tally
from paceline.lab.report import (
    NONE,
    Block,
    Charts,
    Line,
    Passage,
    Report,
    Row,
    Section,
    Table,
    Tile,
    Token,
    describe_size,
    format_percent,
    machine_fact,
)

if TYPE_CHECKING:
    from paceline.lab.disagreement.comparer import Disagreement
    from paceline.models.description import ModelDescription

_WORST: Final = 20
"""Places that are listed: those at which the models are furthest apart."""
_BEFORE: Final = 24
"""Characters that are shown before such a place."""
_MAX_TOKENS_SHOWN: Final = 2000
"""Tokens of all passages on a page."""
_VISIBLE: Final = str.maketrans({"\n": "↵", "\t": "⇥"})

_ABOUT_PASSAGES: Final = (
    "Every token of the text, darker and underlined the further apart both distributions are there: dotted from 25%, "
    "one line from 45%, two from 75% total variation. Point at a token, or move to it with the Tab key, to see what "
    "both models would have said."
)
_ABOUT_STATISTICS: Final = (
    "The figures of llama-perplexity under its names: Q is the draft, base the target. They are of the models' own "
    "distributions, before temperature and filters."
)


@dataclass(frozen=True, slots=True)
class Figures:
    """What is told of all tokens, by kind of text, all kinds under ``"all"``.

    Attributes:
        coupled: share of first draft tokens that the coupled verifier accepts.
        overlap: 1 - TV.
        same_top: share of places where both have the same most likely token.
        kld: KL(target || draft) in nats, before temperature and filters; ``None`` where rows cannot be compared.
        causes: share of all disagreement that each cause has.
        statistics: of all tokens; ``None`` where rows cannot be compared.
    """

    coupled: Mapping[str, Ratio]
    overlap: Mapping[str, Ratio]
    same_top: Mapping[str, Ratio]
    kld: Mapping[str, Ratio] | None
    causes: Mapping[str, float]
    statistics: DivergenceStatistics | None


def sum_up(found: Disagreement) -> Figures:
    def ratios(value: Callable[[ComparedToken], float]) -> dict[str, Ratio]:
        tally = Tally()
        for text in found.texts:
            tally.add(text.kind, sum(map(value, text.tokens)), len(text.tokens))
        return tally.ratios()

    tokens = [token for text in found.texts for token in text.tokens]
    divergences = [token.divergence for token in tokens if token.divergence is not None]
    is_comparable = len(divergences) == len(tokens)
    whole = sum(token.disagreement for token in tokens)
    return Figures(
        coupled=ratios(lambda token: token.coupled),
        overlap=ratios(lambda token: token.overlap),
        same_top=ratios(lambda token: token.same_top),
        kld=ratios(lambda token: token.divergence.kld if token.divergence else 0.0) if is_comparable else None,
        causes={
            cause: sum(token.disagreement for token in tokens if token.cause == cause) / whole if whole else 0.0
            for cause in CAUSES
        },
        statistics=summarize(divergences) if is_comparable else None,
    )


def build_report(
    target: ModelDescription,
    draft: ModelDescription,
    found: Disagreement,
    *,
    temperature: float,
    machine: Mapping[str, str],
) -> Report:
    figures = sum_up(found)
    tokens = sum(len(text.tokens) for text in found.texts)
    facts = [
        f"{tokens:,} tokens in {len(found.texts)} texts, "
        + ("greedy" if temperature == 0 else f"temperature {temperature:g}"),
        *machine_fact(machine),
    ]
    if found.fitting is not None:
        facts.append(f"tokens: {found.fitting.words}")
    named = [f"{role}: {what.path}, {describe_size(what)}" for role, what in (("target", target), ("draft", draft))]
    anchors = _Anchors(found)
    sections = [Section("Agreement", list(_agreement_blocks(found, figures)))]
    sections.append(Section("Where they part most", [anchors.table()]))
    sections.append(Section("The text", list(_passages(found, anchors)), _ABOUT_PASSAGES))
    if figures.statistics is not None:
        sections.append(Section("Divergence", list(_statistics_tables(figures.statistics)), _ABOUT_STATISTICS))
    return Report("paceline compare", named, facts, sections, _tiles(figures))


def _tiles(figures: Figures) -> list[Tile]:
    shares = (
        (figures.coupled, "of first draft tokens accepted", "auto"),
        (figures.overlap, "1 - TV: accepted under rejection", "static"),
        (figures.same_top, "same most likely token: accepted greedily", "static"),
    )
    tiles = [Tile(_percent(ratios[ALL].value), words, kind) for ratios, words, kind in shares]
    if figures.statistics is not None:
        tiles.append(Tile(f"{figures.statistics.kld.value:.4f}", "mean KL divergence, nats"))
    return tiles


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.1%}"


def _agreement_blocks(found: Disagreement, figures: Figures) -> Iterator[Block]:
    kinds = [kind for kind in figures.coupled if kind != ALL]
    deepest = max((len(depths) for depths in found.survival.values()), default=0)
    rows = []
    for kind in (*(kinds if len(kinds) > 1 else ()), ALL):
        cells = [format_percent(ratios[kind]) for ratios in (figures.coupled, figures.overlap, figures.same_top)]
        if figures.kld is not None:
            cells.append(_nats(figures.kld[kind]))
        if deepest:
            survivals = (each.survival for each in found.survival[kind] if each.survival is not None)
            cells.append(" ".join(f"{share:.0%}" for share in survivals))
        rows.append(Row([kind, *cells]))
    columns = ["agreement on", "accepted", "1 - TV", "same top", *(["KLD"] if figures.kld is not None else [])]
    yield Table([*columns, *([f"right to depth 1 to {deepest}"] if deepest else [])], rows)
    if any(figures.causes.values()):
        shares = ", ".join(f"{cause} {share:.0%}" for cause, share in figures.causes.items() if share >= 0.005)
        yield Line(f"why they differ, by share of the disagreement: {shares}", "soft")
    if figures.statistics is None:
        yield Line(
            "the draft's rows are not of the target's tokens, so there are no divergences and perplexities of them",
            "soft",
        )
    if deepest:
        yield Charts([draw_survival(found.survival)])


def _nats(ratio: Ratio) -> str:
    if ratio.value is None:
        return NONE
    return f"{ratio.value:.4f}" + ("" if ratio.standard_error is None else f" ± {ratio.standard_error:.4f}")


def _statistics_tables(statistics: DivergenceStatistics) -> Iterator[Table]:
    def plain(figure: WithError) -> str:
        return f"{figure.value:.6f} ± {figure.error:.6f}"

    def percent(figure: WithError) -> str:
        return f"{100 * figure.value:.3f} ± {100 * figure.error:.3f} %"

    correlation = NONE if statistics.correlation is None else f"{100 * statistics.correlation:.2f}%"
    yield Table(
        ("figure", "value"),
        [
            Row(["Mean PPL(Q)", plain(statistics.ppl)]),
            Row(["Mean PPL(base)", plain(statistics.base_ppl)]),
            Row(["Cor(ln(PPL(Q)), ln(PPL(base)))", correlation]),
            Row(["Mean ln(PPL(Q)/PPL(base))", plain(statistics.ln_ratio)]),
            Row(["Mean PPL(Q)/PPL(base)", plain(statistics.ratio)]),
            Row(["Mean PPL(Q)-PPL(base)", plain(statistics.difference)]),
            Row(["Mean KLD", plain(statistics.kld)]),
            Row(["Mean Δp", percent(statistics.delta_p)]),
            Row(["RMS Δp", percent(statistics.rms_delta_p)]),
            Row(["Same top p", percent(statistics.same_top)]),
        ],
    )
    rows = []
    for at, delta_p in statistics.delta_p_percentiles.items():
        kld = statistics.kld_percentiles.get(at)
        name = {100: "Maximum", 50: "Median", 0: "Minimum"}.get(int(at) if at == int(at) else -1, f"{at:.1f}%")
        rows.append(Row([name, NONE if kld is None else f"{kld:.6f}", f"{100 * delta_p:.3f}%"]))
    yield Table(("percentile", "KLD", "Δp"), rows)


class _Anchors:
    """The worst places of all texts, and what the rows of their table link to."""

    def __init__(self, found: Disagreement) -> None:
        self._found = found
        places = [(number, index) for number, text in enumerate(found.texts) for index in range(len(text.tokens))]

        def distance(place: tuple[int, int]) -> tuple[float, float]:
            token = found.texts[place[0]].tokens[place[1]]
            return -token.disagreement, -(token.divergence.kld if token.divergence else 0.0)

        worst = sorted(places, key=distance)[:_WORST]
        self.names = {place: f"place-{rank}" for rank, place in enumerate(worst, 1)}
        self.worst = [place for place in worst if found.texts[place[0]].tokens[place[1]].disagreement > 0.0]

    def table(self) -> Table | Line:
        if not self.worst:
            return Line("nowhere: both would say the same with the same probabilities")
        shown = set(_shown_places(self._found))
        rows = []
        for place in self.worst:
            text = self._found.texts[place[0]]
            token = text.tokens[place[1]]
            before = _pieces(self._found, [*text.prompt_ids, *(each.token_id for each in text.tokens[: place[1] + 1])])
            where = f"{''.join(before[:-1])[-_BEFORE:]}[{before[-1]}]".translate(_VISIBLE)
            cells = [where, text.kind, _percent(token.disagreement)]
            cells += [self._first(tops) for tops in (token.target_tops, token.draft_tops)]
            rows.append(Row([*cells, token.cause or ""], link=self.names[place] if place in shown else ""))
        columns = ("text, and the token it goes on with", "kind", "TV", "target says", "draft says", "why")
        return Table(columns, rows, wordy=("kind", "target says", "draft says", "why"))

    def _first(self, tops: Tops) -> str:
        if not tops:
            return NONE
        token_id, probability = tops[0]
        return f"{_spell(self._found, token_id)} {probability:.0%}"


def _shown_places(found: Disagreement) -> Iterator[tuple[int, int]]:
    """Yield the places that passages show: text, and index in it."""
    left = _MAX_TOKENS_SHOWN
    for number, text in enumerate(found.texts):
        for index in range(min(len(text.tokens), left)):
            yield number, index
        left = max(left - len(text.tokens), 0)


def _passages(found: Disagreement, anchors: _Anchors) -> Iterator[Block]:
    shown = dict.fromkeys(_shown_places(found))
    for number, text in enumerate(found.texts):
        count = sum((number, index) in shown for index in range(len(text.tokens)))
        if not count:
            break
        pieces = _pieces(found, [*text.prompt_ids, *(token.token_id for token in text.tokens)])
        first = len(text.prompt_ids)
        yield Passage(
            f"{text.kind}: {text.name}",
            "".join(pieces[:first]),
            [
                Token(
                    pieces[first + index],
                    token.disagreement,
                    _describe(token),
                    [
                        ("target", [(_spell(found, i), f"{share:.1%}") for i, share in token.target_tops]),
                        ("draft", [(_spell(found, i), f"{share:.1%}") for i, share in token.draft_tops]),
                    ],
                    anchors.names.get((number, index), ""),
                )
                for index, token in enumerate(text.tokens[:count])
            ],
        )
    tokens = sum(len(text.tokens) for text in found.texts)
    if tokens > len(shown):
        yield Line(f"the first {len(shown):,} of {tokens:,} tokens are shown; --json has all of them", "soft")


def _describe(token: ComparedToken) -> str:
    words = [f"TV {token.disagreement:.1%}", f"accepted {token.coupled:.1%}"]
    if token.divergence is not None:
        words.append(f"KLD {token.divergence.kld:.3f}")
    return ", ".join([*words, *([token.cause] if token.cause else [])])


def _spell(found: Disagreement, token_id: int) -> str:
    """Return a token as text in which everything can be seen."""
    return _text(found, token_id).replace(" ", "␣").translate(_VISIBLE) or "(nothing)"


def _pieces(found: Disagreement, token_ids: Sequence[int]) -> list[str]:
    """Return the text of each token; a character that several tokens spell belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(found.spellings[token_id]) for token_id in token_ids]


# --- JSON -------------------------------------------------------------------------------------------------------------


def disagreement_json(found: Disagreement) -> dict[str, Any]:
    """Return all that was found as plain data."""
    figures = sum_up(found)

    def by_kind(ratios: Mapping[str, Ratio] | None) -> dict[str, Any] | None:
        return None if ratios is None else {kind: dataclasses.asdict(ratio) for kind, ratio in ratios.items()}

    return {
        "agreement": {
            "coupled": by_kind(figures.coupled),
            "one_minus_tv": by_kind(figures.overlap),
            "same_top": by_kind(figures.same_top),
            "kld": by_kind(figures.kld),
        },
        "survival": {
            kind: [{"depth": each.depth, "survival": each.survival, "error": each.survival_error} for each in depths]
            for kind, depths in found.survival.items()
        },
        "causes": dict(figures.causes),
        "divergence": None if figures.statistics is None else figures.statistics.to_json(),
        "texts": [
            {
                "kind": text.kind,
                "name": text.name,
                "prompt": "".join(_pieces(found, text.prompt_ids)),
                "tokens": [_token_json(found, token) for token in text.tokens],
            }
            for text in found.texts
        ],
        "ended_by": "done" if found.is_whole else "interrupt",
    }


def _token_json(found: Disagreement, token: ComparedToken) -> dict[str, Any]:
    def tops(shown: Tops) -> list[dict[str, Any]]:
        return [{"id": i, "text": _text(found, i), "probability": round(share, 7)} for i, share in shown]

    return {
        "id": token.token_id,
        "text": _text(found, token.token_id),
        "tv": round(token.disagreement, 7),
        "coupled": round(token.coupled, 7),
        "same_top": token.same_top,
        "cause": token.cause,
        "target": tops(token.target_tops),
        "draft": tops(token.draft_tops),
        "divergence": None if token.divergence is None else token.divergence._asdict(),
    }


def _text(found: Disagreement, token_id: int) -> str:
    return found.spellings[token_id].decode("utf-8", "backslashreplace")
