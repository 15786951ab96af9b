"""``paceline plan`` as its users call it: one plan of the embedded pair, small enough to wait for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

QUICK = ("-t", "1", "-c", "512", "--budget-s", "5")


@pytest.mark.long
def test_a_plan_has_its_tables_its_page_and_its_figures(tmp_path: Path) -> None:
    found = subprocess.run(
        [
            *(sys.executable, "-m", "paceline", "plan", *QUICK, "--users", "60", "--replicas", "2,1", "-n", "12"),
            *("--prompt-tokens", "64", "--prefixes", "2", "--requests", "6", "--target-ttft", "30"),
            *("--target-tpot", "30", f"--json={tmp_path / 'plan.json'}", "--html", str(tmp_path / "plan.html")),
        ],
        env={**os.environ, "PACELINE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["loads"]["Poisson"]["rate"] == 1.0, "60 users, each once a minute"
    assert facts["loads"]["Poisson"]["prefix_tokens"] == 48, "three quarters of a prompt"
    assert facts["slots"] == facts["balance_abs_threshold"] == 4
    cells = facts["simulations"]
    assert len(cells) == 2 * (2 + 4)
    assert [cell["replicas"] for cell in cells] == [1, 1, 2, 2, 2, 2] * 2
    # All have the same requests, and serve them whole.
    assert len({cell["answer_tokens"] for cell in cells}) == 1
    assert all(cell["prompt_tokens"] == 6 * 64 for cell in cells)
    assert all(0 < cell["ttft_s"]["p50"] <= cell["ttft_s"]["p99"] for cell in cells)
    # Half a minute is enough for one replica, however busy this machine is.
    least = [advice["least"] for load in facts["advice"] for advice in load["replicas"]]
    assert least == [1] * 8
    assert "What to buy" in found.stdout
    assert "Poisson load; bold rows" in found.stdout
    assert "simulating" in found.stderr
    page = (tmp_path / "plan.html").read_text()
    assert page.count("<svg") == 6
    for picture in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
