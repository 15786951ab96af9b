"""``paceline compare`` as it is called."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.models.embedded import heldout
from tests.cli.invoking import Invoke

FEW = ("--answers", "2", "-n", "16", "-t", "1")


def test_says_where_the_models_part(invoke: Invoke, tmp_path: Path) -> None:
    page, figures = tmp_path / "found.html", tmp_path / "found.json"
    done = invoke("compare", "target", "draft", *FEW, "--html", str(page), f"--json={figures}")
    assert done.status == 0
    assert "Where they part most" in done.out
    assert "Mean KLD" in done.out
    assert 'tabindex="0"' in page.read_text("utf-8")
    facts = json.loads(figures.read_text("utf-8"))
    assert facts["ended_by"] == "done"
    assert facts["agreement"]["one_minus_tv"]["all"]["trials"] == 32
    assert [len(text["tokens"]) for text in facts["texts"]] == [16, 16]


def test_compares_on_a_text_as_it_is(invoke: Invoke, tmp_path: Path) -> None:
    text = tmp_path / "some.txt"
    text.write_text("\n".join(heldout("prose")[:3]), encoding="utf-8")
    done = invoke("compare", "target", "draft", "--as-is", "--text", str(text), "--window", "64", "-t", "1", "--json")
    facts = json.loads(done.out)
    assert (done.status, facts["survival"]) == (0, {})
    assert facts["divergence"]["tokens"] == sum(len(each["tokens"]) for each in facts["texts"])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--as-is",), "--text"),
        (("--window", "3"), "--window 3"),
        (("--answers", "0"), "--answers 0"),
        (("-md", "draft"), "-md"),
        (("--text", "/no/such/file"), "/no/such/file"),
    ],
)
def test_refuses_what_it_cannot_do_in_one_line(invoke: Invoke, options: tuple[str, ...], named: str) -> None:
    done = invoke("compare", "target", "draft", *options)
    assert done.status == 2
    assert done.err.count("\n") == 1
    assert named in done.err
