"""The page at ``/``: its files, and the headers that keep a browser from doing more with them than they need."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

import paceline
from paceline.core.errors import InputError
from paceline.server_options import ServerOptions
from paceline.serving.page import page_files
from tests.serving.hosted import Hosted, hosted, scripted

SOURCES: Final = Path(__file__).parents[2] / "src" / "paceline" / "serving" / "web"

TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".LICENSE": "text/plain"}


LATE: Final = {f"page/{name}.js" for name in ("markdown", "race", "server", "text")}
"""Modules that are loaded where somebody wants what they show."""


class Markup(HTMLParser):
    """Notes what a page refers to, and what of it a browser would run or style by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.inline: list[str] = []
        self._is_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.references += [value for name in ("href", "src") if (value := given.get(name)) is not None]
        self.inline += [f"{tag} {name}" for name in given if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in given) else []


def test_the_page_begins_as_llama_servers_does(server: Hosted) -> None:
    page = server.get("/")
    assert page.text.startswith("<!doctype html>")
    assert page.headers["content-type"] == "text/html; charset=utf-8"


def test_nothing_of_the_page_runs_but_its_own_files(server: Hosted) -> None:
    assert Markup(server.get("/").text).inline == []
    for name in page_files():
        policy = dict(
            part.split(" ", 1) for part in server.get(f"/{name}").headers["content-security-policy"].split("; ")
        )
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert not any("unsafe" in sources or "http" in sources for sources in policy.values())


def test_every_file_has_its_type(server: Hosted) -> None:
    for name, file in page_files().items():
        response = server.get(f"/{name}")
        assert response.status_code == 200
        assert response.content == file.content
        if name:
            assert response.headers["content-type"].split(";")[0] == TYPES[PurePosixPath(name).suffix]
        assert response.headers["x-content-type-options"] == "nosniff"


def test_everything_that_is_referred_to_is_there(server: Hosted) -> None:
    files = page_files()
    found = [reference for reference in Markup(server.get("/").text).references if reference != "openapi.json"]
    assert "page/app.js" in found
    assert set(found) <= set(files)
    assert set(files) >= LATE
    modules = [name for name in files if name.endswith(".js") and "/vendor/" not in name]
    for name in modules:
        text = files[name].content.decode()
        imported = re.findall(r"(?:\bfrom|\bimport)[ (]\"(\./[^\"]+)\"", text)
        here = PurePosixPath(name).parent
        assert {str(here / each) for each in imported} <= set(files), name
        # What is loaded early must be what is needed early.
        assert (name in found) != (name in LATE)
    assert not any(re.search(r"https?://", files[name].content.decode()) for name in modules)


def test_libraries_have_their_licences() -> None:
    vendored = {PurePosixPath(name).name for name in page_files() if "/vendor/" in name}
    assert vendored == {
        "htm-preact-standalone.module.js", "htm.LICENSE", "preact.LICENSE",
        "idb-keyval.js", "idb-keyval.LICENSE",
        "marked.esm.js", "marked.LICENSE",
        "highlight.min.js", "highlight.LICENSE",
        "temml.esm.js", "temml.LICENSE",
        "purify.min.js", "dompurify.LICENSE",
    }  # fmt: skip


def test_what_is_installed_has_all_files_of_the_page() -> None:
    installed = Path(paceline.__file__).parent / "serving" / "web"
    sources = [path for path in SOURCES.rglob("*") if path.is_file()]
    assert len(page_files()) == len(sources)
    for source in sources:
        assert (installed / source.relative_to(SOURCES)).read_bytes() == source.read_bytes()


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_a_browser_is_told_that_nothing_changed(server: Hosted, encoding: str) -> None:
    accepted = {"Accept-Encoding": encoding}
    first = server.get("/page/app.js", headers=accepted)
    assert first.headers.get("content-encoding", "identity") == encoding
    assert (first.headers["vary"], first.headers["cache-control"]) == ("Accept-Encoding", "no-cache")
    again = server.get("/page/app.js", headers={**accepted, "If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert server.get("/page/app.js", headers={**accepted, "If-None-Match": '"older"'}).status_code == 200


@pytest.mark.parametrize("path", ["/page", "/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/files.py"])
def test_no_other_file_is_sent(server: Hosted, path: str) -> None:
    assert server.get(path).status_code == 404


def test_the_page_is_below_the_prefix_and_needs_no_key() -> None:
    options = ServerOptions(prefix="/models/one", api_key=("secret",))
    with hosted(scripted, options) as running:
        assert running.url.endswith("/models/one")
        for name in page_files():
            assert running.get(f"/{name}").status_code == 200
            assert running.web.head(f"{running.url}/{name}").status_code == 200
        root = running.url.removesuffix("/models/one")
        assert running.web.get(f"{root}/page/app.js").status_code != 200
        for path in ("/props", "/slots", "/v1/models"):
            assert running.get(path).status_code == 401


def test_another_page_is_served_in_its_place(tmp_path: Path) -> None:
    texts = {"index.html": "<script>1</script>", "assets/a.js": "2", "props": "3", "v1/models/a": "4", ".env": "5"}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with hosted(scripted, ServerOptions(static_path=str(tmp_path), api_key=("secret",))) as running:
        page = running.get("/")
        assert (page.text, page.headers["content-type"]) == (texts["index.html"], "text/html; charset=utf-8")
        # What its files need is not known.
        assert "content-security-policy" not in page.headers
        assert running.get("/assets/a.js").text == "2"
        for path in ("/props", "/v1/models/a", "/.env", "/page/app.js"):
            assert running.get(path).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert "default_generation_settings" in running.get("/props", headers=headers).json()
        assert {running.get(path, headers=headers).status_code for path in ("/.env", "/page/app.js")} == {404}


@pytest.mark.parametrize("name", ["none", "empty"])
def test_a_folder_without_a_page_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError) as refused:
        page_files(tmp_path / name)
    assert refused.value.field == "static_path"
