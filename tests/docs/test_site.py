"""What is generated of the documentation is as its sources are, and the site's own checks find what they are for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.scripts import DOCS, ROOT, script


@pytest.mark.parametrize("name", ["compute_results", "make_tables", "draw_how"])
def test_generating_anew_changes_nothing(name: str) -> None:
    ran = subprocess.run(
        [sys.executable, str(DOCS / f"{name}.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", ""), "run make tables"


def test_every_table_of_results_is_on_a_page() -> None:
    tables = script("make_tables")
    shown = set().union(*(tables.named(page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")))
    assert shown == {path.stem for path in (DOCS / "results").glob("*.json")}


def test_every_cell_has_one_figure() -> None:
    """Ranges and pairs are columns of their own; a cost of a pass may be a range, as a condition."""
    for path in (DOCS / "results").glob("*.json"):
        data = json.loads(path.read_text(encoding="utf-8"))
        for row in data["rows"]:
            for column, cell in zip(data["columns"], row, strict=True):
                if isinstance(cell, str) and not column.endswith("rows, ms") and not column.endswith("row, ms"):
                    assert not re.match(r"[\d.,]+ (/ |to |\()\d", cell), f"{path.name}: {cell!r}"


RESULTS = {
    "machine": "Two cores",
    "date": "2026-11-27",
    "commands": ["paceline bench"],
    "notes": ["Medians."],
    "columns": ["text", "of plain", "requests"],
    "rows": [["code", "1.10", 1200], ["prose", None, 7]],
}
PAGE = "# Page\n\n<!-- table: one -->\nold\n<!-- end of table -->\n"


def test_a_table_is_written_between_its_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = script("make_tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "one.json").write_text(json.dumps(RESULTS))
    filled = tables.filled(PAGE)
    assert filled == (
        "# Page\n\n<!-- table: one -->\n\n"
        "| text | of plain | requests |\n| --- | --: | --: |\n| code | 1.10 | 1,200 |\n| prose |  | 7 |\n\n"
        "Medians.\n\n*Two cores. 2026-11-27.*\n\n```sh\npaceline bench\n```\n\n<!-- end of table -->\n"
    )
    assert tables.filled(filled) == filled


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rows": [["code", "1.10"]]}, "one.json: row 1 has 2 cells for 3 columns"),
        ({"place": "here"}, "one.json: has the keys"),
    ],
)
def test_results_that_are_not_whole_are_refused(
    change: dict[str, object], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = script("make_tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "one.json").write_text(json.dumps({**RESULTS, **change}))
    with pytest.raises(ValueError, match=re.escape(error)):
        tables.filled(PAGE)


def test_a_table_without_results_or_end_is_refused() -> None:
    tables = script("make_tables")
    with pytest.raises(ValueError, match=r"there are no results nothing-such\.json"):
        tables.filled(PAGE.replace("one", "nothing-such"))
    with pytest.raises(ValueError, match="lacks its beginning or its end"):
        tables.filled("<!-- table: one -->\n")


def test_a_site_is_searched_for_links_that_lead_nowhere(tmp_path: Path) -> None:
    faults = script("check_site").faults
    (tmp_path / "sub").mkdir()
    (tmp_path / "other.html").write_text('<p id="here"><a href="sub/index.html#there">x</a> <a href="#here">y</a>')
    (tmp_path / "sub" / "index.html").write_text('<h1 id="there">z</h1><a href="https://example.org">away</a>')
    assert faults(tmp_path) == []
    (tmp_path / "index.html").write_text(
        '<a href="none.html">x</a> <a href="other.html#gone">y</a> <img src="https://example.org/x.png">'
        '<script src="//cdn.example.org/x.js"></script>'
    )
    assert faults(tmp_path) == [
        "index.html: there is no none.html",
        "index.html: there is no anchor other.html#gone",
        "index.html: fetches https://example.org/x.png",
        "index.html: fetches //cdn.example.org/x.js",
    ]
    assert faults(tmp_path / "empty") == [f"{tmp_path / 'empty'}: there are no pages"]


@pytest.mark.parametrize("page", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_pages_beside_the_site_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        if ":" in path:
            continue
        goal = ROOT / path if path else ROOT / page
        assert goal.exists(), link
        if anchor and goal.suffix == ".md":
            heads = re.findall(r"^#+ (.+)$", goal.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, link


def test_the_search_finds_names_and_leaves_out_what_is_not_for_users(tmp_path: Path) -> None:
    check = script("check_site")
    index = {
        "docnames": ["guides/deploy", "notes/2026-11-24-a-real-model", "architecture"],
        "terms": {"caddi": 0, "proxi": [0, 1]},
        "titleterms": {"systemd": 0},
    }
    (tmp_path / "searchindex.js").write_text(f"Search.setIndex({json.dumps(index)})")
    names = {
        "Caddy": "guides/deploy",
        "systemd proxy": "guides/deploy",
        "Caddies of nginx": "guides/deploy",
        "x": "gone",
    }
    assert check.search_faults(tmp_path, names) == [
        "the search finds notes/2026-11-24-a-real-model",
        "the search for Caddies of nginx does not find guides/deploy, which lacks nginx",
        "the search for x does not find gone, which lacks x",
    ]
    assert [page for page in ("guides/clients", "release", "parts/loop", "glossary") if check.is_searched(page)] == [
        "guides/clients",
        "glossary",
    ]
