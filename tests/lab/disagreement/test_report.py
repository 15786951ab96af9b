"""The report of a comparison: figures by kind, the worst places, and passages that these link into."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.lab.disagreement.comparer import Disagreement
from paceline.lab.disagreement.places import ComparedText, ComparedToken
from paceline.lab.disagreement.report import build_report, disagreement_json, sum_up
from paceline.lab.disagreement.statistics import Divergence
from paceline.lab.intervals import ALL
from paceline.lab.report import Passage, Table, render_page
from paceline.models.description import describe
from paceline.models.embedded import embedded_draft, embedded_target

SPELLINGS = {0: b"a", 1: b" b", 2: b"\n", 3: b"\xc3", 4: b"\xa9", 5: b"<b>"}


def token(token_id: int, overlap: float, *, kld: float | None = 0.5) -> ComparedToken:
    divergence = None if kld is None else Divergence(1.0, 1.5, kld, overlap > 0.5)
    cause = None if overlap == 1.0 else "other top"
    return ComparedToken(token_id, overlap / 2, overlap, overlap > 0.5, cause, ((token_id, 0.9),), (), divergence)  # type: ignore[arg-type]


def found_of(*texts: Sequence[ComparedToken]) -> Disagreement:
    kinds = ("code", "prose")
    return Disagreement(
        [ComparedText(kinds[n % 2], f"{kinds[n % 2]}:{n}", (0, 1), tokens) for n, tokens in enumerate(texts)],
        None,
        SPELLINGS,
        {},
        is_whole=True,
    )


def page_of(found: Disagreement) -> str:
    return render_page(
        build_report(describe(embedded_target()), describe(embedded_draft()), found, temperature=0.8, machine={})
    )


def test_figures_go_by_kind() -> None:
    figures = sum_up(found_of([token(0, 0.25), token(1, 0.75)], [token(2, 1.0)]))
    assert figures.overlap["code"].value == pytest.approx(0.5)
    assert figures.overlap["prose"].value == 1.0
    assert figures.coupled[ALL].value == pytest.approx(1 / 3)
    assert figures.causes["other top"] == pytest.approx(1.0)
    assert figures.kld is not None
    assert figures.statistics is not None
    assert figures.statistics.tokens == 3


def test_a_draft_of_other_tokens_has_no_divergences() -> None:
    found = found_of([token(0, 0.25, kld=None)])
    assert sum_up(found).statistics is None
    assert disagreement_json(found)["divergence"] is None
    assert "no divergences" in page_of(found)


def test_worst_places_come_first_and_lead_into_the_text() -> None:
    report = build_report(
        describe(embedded_target()),
        describe(embedded_draft()),
        found_of([token(0, 0.9), token(1, 0.1), token(2, 1.0)]),
        temperature=0.8,
        machine={},
    )
    blocks = [block for section in report.sections for block in section.blocks]
    worst = next(block for block in blocks if isinstance(block, Table) and block.columns[0].startswith("text"))
    (passage,) = (block for block in blocks if isinstance(block, Passage))
    assert [row.cells[0] for row in worst.rows] == ["a b[a]", "a ba[ b]", "a ba b[↵]"][1::-1]
    anchors = {each.anchor: each.text for each in passage.tokens if each.anchor}
    assert [anchors[row.link] for row in worst.rows] == [" b", "a"]
    assert [each.level for each in passage.tokens] == [1, 9, 0]


def test_a_character_of_two_tokens_is_shown_once() -> None:
    page = page_of(found_of([token(3, 0.5), token(4, 0.5)]))
    assert "é" in page
    assert "�" not in page.partition("<body>")[2].partition("target</b>")[0]


def test_what_models_say_is_no_markup() -> None:
    page = page_of(found_of([token(5, 0.5)]))
    assert "&lt;b&gt;" in page
    assert "<b><b>" not in page


def test_json_has_every_token() -> None:
    (text,) = disagreement_json(found_of([token(0, 0.25), token(1, 0.75)]))["texts"]
    assert text["prompt"] == "a b"
    assert [(each["text"], each["tv"]) for each in text["tokens"]] == [("a", 0.75), (" b", 0.25)]
