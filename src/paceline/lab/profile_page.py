"""What passes cost as one page that needs nothing else: the staircase of each model, and its figures."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.lab.bench.charts import draw_staircase
from paceline.lab.bench.page import style, template
from paceline.planning.costs.profile import CostProfile


def render(profile: CostProfile, *, target: str, draft: str | None, machine: Mapping[str, str]) -> str:
    """Return the page; ``target`` and ``draft`` are what the engines call the models."""
    models = [("target", "rows in a round", profile.target)]
    if profile.draft is not None:
        models.append(("draft", "tokens fed to the draft", profile.draft))
    return template("paceline.lab", "profile.html").render(
        style=style(),
        target=target,
        draft=draft,
        facts=" · ".join(f"{name} {value}" for name, value in machine.items()),
        pictures=[draw_staircase(cost, title, about) for title, about, cost in models],
        tables=[
            {
                "title": title,
                "columns": (about, "ms median", "lower quartile", "upper quartile"),
                "rows": [
                    (step.rows, *(f"{1e3 * value:.3f}" for value in (step.median_s, step.low_s, step.high_s)))
                    for step in cost.widths
                ],
            }
            for title, about, cost in models
        ],
    )
