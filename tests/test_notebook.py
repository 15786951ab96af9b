"""What a notebook shows of an answer, and while a model is loaded."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import nbformat
import pytest
from nbclient import NotebookClient
from traitlets.config import Config

import paceline
from paceline.api import _Loading
from paceline.core.text import TextSegment
from paceline.models.embedded import embedded_target
from paceline.notebook import answer_html, loading_report


def test_tokens_are_marked_by_who_drafted_them_and_nothing_of_a_text_is_markup() -> None:
    pieces = [("a <b>", "target"), (" & ", "suffix"), ("c", "suffix"), ("\n", "draft"), ("d", "of one's own")]
    shown = answer_html([TextSegment(*piece) for piece in pieces], "4 tokens; <fast>")
    answer, below = ElementTree.fromstring(f"<div>{shown}</div>")
    assert "".join(answer.itertext()) == "a <b> & c\nd"
    assert [(mark.text, mark.get("title")) for mark in answer] == [
        (" & c", "drafted by suffix"),
        ("\n", "drafted by draft"),
        ("d", "drafted by of one's own"),
    ]
    assert "".join(below.itertext()).endswith("4 tokens; <fast>")
    assert [mark.text for mark in below] == ["draft", "of one's own", "suffix"]
    # Neither colours nor shapes alone.
    assert len({mark.get("style") for mark in below}) == 3


def test_an_answer_shows_itself() -> None:
    with paceline.load(embedded_target(), context_length=256, threads=1) as model:
        answer = model.generate("1 2 3 1 2 3 1 2 3", max_tokens=24, temperature=0.0)
    assert "".join(segment.text for segment in answer.segments) == answer.text
    shown, below = ElementTree.fromstring(f"<div>{answer._repr_html_()}</div>")
    assert "".join(shown.itertext()) == answer.text
    assert "".join(below.itertext()).endswith(answer.stats.summarize())


@pytest.mark.parametrize("shell", [None, SimpleNamespace(), SimpleNamespace(kernel=None)])
def test_nothing_is_shown_of_a_load_outside_of_notebooks(
    shell: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert loading_report() is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert loading_report() is None


def test_a_load_is_shown_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str]] = []

    def display(shown: Mapping[str, str], *, raw: bool, display_id: bool) -> SimpleNamespace:
        assert raw
        assert display_id
        said.append(("first", shown["text/plain"]))
        return SimpleNamespace(update=lambda further, raw: said.append(("again", further["text/plain"])))

    kernel = ModuleType("IPython")
    monkeypatch.setattr(kernel, "get_ipython", lambda: SimpleNamespace(kernel=object()), raising=False)
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    report = loading_report()
    assert report is not None
    for share in (0.0, 0.5, 1.0):
        report(share)
    assert said == [
        ("first", "measuring what passes cost on this machine: 0%"),
        ("again", "measuring what passes cost on this machine: 50%"),
        ("again", "measured what passes cost: 100%"),
    ]


def test_whoever_is_told_how_far_a_load_is_is_told_of_its_end() -> None:
    """Measuring may end before its time is up, and most loads measure nothing."""
    told: list[float] = []
    loading = _Loading(told.append)
    loading.end_report()
    assert told == []
    loading.report(0.95)
    loading.end_report()
    loading.end_report()
    assert told == [0.95, 1.0]


@pytest.mark.long
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is, but with shorter answers, and one pair of runs where it takes the median of three."""
    for variable in ("PACELINE_CACHE", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    notebook: Any = nbformat.read(Path(__file__).parents[1] / "examples/notebook.ipynb", as_version=4)
    cells = {cell.id: cell for cell in notebook.cells}
    for name, whole, part in (("answer", '"max_tokens": 200', '"max_tokens": 24'), ("compare", "range(3)", "range(1)")):
        assert whole in cells[name].source
        cells[name].source = cells[name].source.replace(whole, part)
    # No network: the kernel is reached by files.
    by_files = Config({"KernelManager": {"transport": "ipc"}})
    NotebookClient(notebook, kernel_name="python3", config=by_files, timeout=120).execute()

    (loading, _) = cells["load"].outputs
    assert loading.data["text/plain"] == "measured what passes cost: 100%"
    assert cells["answer"].outputs[-1].data["text/html"].startswith("<div")
    assert "times as fast\n" in cells["compare"].outputs[0].text
    drafted = cells["own"].outputs[-1].data
    assert 'title="drafted by pairs"' in drafted["text/html"]
