"""Words by intervals of pairs, and kinds apart."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs paceline[torch]")

from paceline.lab.agreement import TextAgreement
from paceline.lab.distil.report import build_report
from paceline.lab.distil.steps import Distilled
from paceline.lab.distil.training import Training
from paceline.lab.distil.verdict import Live, Verdict, judge, summarise
from paceline.lab.intervals import Interval
from paceline.lab.report import Line, Table

PLACES = 100


def texts(kind: str, before: list[float], gains: list[float]) -> list[tuple[TextAgreement, TextAgreement]]:
    def text(share: float) -> TextAgreement:
        return TextAgreement(kind, PLACES, share * PLACES, share * PLACES, share * PLACES)

    return [(text(share), text(share + gain)) for share, gain in zip(before, gains, strict=True)]


@pytest.mark.parametrize(
    ("interval", "outcome"),
    [
        (Interval(0.02, 0.01, 0.03), "gain"),
        (Interval(0.02, -0.01, 0.05), "no gain"),
        (Interval(0.0, 0.0, 0.0), "no gain"),
        (Interval(0.5, None, None), "no gain"),
        (Interval(-0.02, -0.03, -0.01), "loss"),
    ],
)
def test_words_go_by_the_interval(interval: Interval, outcome: str) -> None:
    assert judge(interval) == outcome


def test_pairs_tell_what_texts_apart_would_not() -> None:
    """Texts differ by half, and each gains two points."""
    before = [0.2, 0.4, 0.6, 0.8]
    verdict = summarise(texts("own", before, [0.018, 0.02, 0.022, 0.02]), [], None)
    assert verdict.outcome == "gain"
    accepted = verdict.overall.accepted
    assert accepted.difference.value == pytest.approx(0.02)
    assert accepted.before.standard_error is not None
    assert accepted.before.standard_error > 0.1


def test_kinds_stand_apart_and_those_not_trained_on_do_not_count() -> None:
    held = [*texts("code", [0.5, 0.6, 0.5], [0.1, 0.11, 0.1]), *texts("prose", [0.5, 0.6, 0.5], [0.1, 0.09, 0.1])]
    verdict = summarise(held, texts("logs", [0.7, 0.8, 0.7], [-0.2, -0.21, -0.2]), None)
    assert [(kind.kind, kind.trained_on) for kind in verdict.kinds] == [
        ("code", True),
        ("prose", True),
        ("logs", False),
    ]
    assert verdict.overall.texts == 6
    assert verdict.outcome == "gain"


def report_of(verdict: Verdict) -> tuple[list[str], list[list[str]]]:
    training = Training(10, 1.0, 40, 9000, 1e-3, 0.7, 0.4, "epochs")
    found = Distilled(path=None, answers=40, answer_tokens=9000, training=training, verdict=verdict)  # type: ignore[arg-type]
    report = build_report(found, target="t", draft="d", temperature=0.8, took_s=100.0, machine={})
    blocks = [block for section in report.sections for block in section.blocks]
    lines = [block.words for block in blocks if isinstance(block, Line)]
    return lines, [list(row.cells) for block in blocks if isinstance(block, Table) for row in block.rows]


def test_the_report_says_no_gain_and_what_was_forgotten() -> None:
    held = texts("own", [0.5, 0.6, 0.5, 0.4], [0.01, -0.01, 0.02, -0.02])
    other = texts("logs", [0.7, 0.8, 0.7], [-0.2, -0.21, -0.2])
    lines, rows = report_of(summarise(held, other, Live(200.0, 150.0, 151.0, Interval(1.01, 0.98, 1.04), 4)))
    assert any("plainly is faster" in line for line in lines)
    assert lines[0].startswith("no gain on held-out prompts: 50.0% accepted before, 50.0% after")
    assert "contains zero" in lines[0]
    assert any("not trained on" in line and "logs" in line for line in lines)
    assert [row[0] for row in rows] == ["all that were trained on", "logs, not trained on"]
