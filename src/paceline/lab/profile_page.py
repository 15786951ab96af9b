"""What passes cost as a report: the staircase of each model, and its figures."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.lab.charts import draw_staircase
from paceline.lab.report import Charts, Report, Row, Section, Table, machine_fact
from paceline.planning.costs.profile import CostProfile

ABOUT_PASSES = (
    "Median and quartiles as measured; the dotted line is one row at a time. Drafting pays where the staircase lies "
    "well below it. Orange marks are cheaper than a narrower pass."
)
"""What is said of charts of passes."""


def build_report(profile: CostProfile, *, target: str, draft: str | None, machine: Mapping[str, str]) -> Report:
    """Return the report; ``target`` and ``draft`` are what the engines call the models."""
    models = [("target", "rows in a round", profile.target)]
    if profile.draft is not None:
        models.append(("draft", "tokens fed to the draft", profile.draft))
    tables = [
        Table(
            (about, "ms median", "lower quartile", "upper quartile"),
            [
                Row([str(step.rows), *(f"{1e3 * value:.3f}" for value in (step.median_s, step.low_s, step.high_s))])
                for step in cost.widths
            ],
            f"{title}, by {about}",
        )
        for title, about, cost in models
    ]
    drawn = Charts([draw_staircase(cost, title, about) for title, about, cost in models])
    return Report(
        "paceline profile",
        [f"target: {target}", *([] if draft is None else [f"draft: {draft}"])],
        machine_fact(machine),
        [Section("What passes cost here", [drawn], ABOUT_PASSES), Section("All figures", tables)],
    )
