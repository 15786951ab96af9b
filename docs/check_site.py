"""Checks the built site: ``python docs/check_site.py build/site``.

Every link inside it, with its anchor, has to lead somewhere, and no page may fetch anything from elsewhere: the site
works without a network. Its search has to find the names that people type, and no page that was not written for users.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Set
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}
"""What a browser fetches by itself, by the element and its attribute."""

NOT_SEARCHED = re.compile(r"(notes|decisions|parts)/.*|architecture|contributing|release|guides/(attacks|planner-gate)")
"""Pages that the search leaves out: dated notes, and what is for those who change paceline."""

SEARCHED_NAMES = {
    "aider": "guides/clients",
    "API key": "guides/security",
    "Caddy": "guides/deploy",
    "Claude": "guides/clients",
    "Cline": "guides/clients",
    "Codex": "guides/clients",
    "Continue": "guides/clients",
    "CUDA": "guides/install",
    "Cursor": "guides/clients",
    "DeepSeek": "which-draft",
    "Docker": "guides/deploy",
    "Gemma": "which-draft",
    "Grafana": "guides/deploy",
    "JetBrains": "guides/clients",
    "Jupyter": "guides/python",
    "KV cache": "guides/memory",
    "LangChain": "guides/clients",
    "LiteLLM": "guides/clients",
    "llama.vim": "guides/clients",
    "nginx": "guides/deploy",
    "Open WebUI": "guides/clients",
    "out of memory": "guides/memory",
    "Qwen3-8B": "which-draft",
    "RAM": "guides/memory",
    "systemd": "guides/deploy",
    "VRAM": "guides/memory",
    "VS Code": "guides/clients",
    "Zed": "guides/clients",
}
"""What people type into the search, and the page that it has to find."""


def is_searched(page: str) -> bool:
    """Whether the search finds a page, by its name without ending, such as ``guides/deploy``."""
    return NOT_SEARCHED.fullmatch(page) is None


class Page(HTMLParser):
    """The links, the anchors and the fetched addresses of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of what an element refers to."""
        given = dict(attrs)
        self.anchors.update(value for key in ("id", "name") if (value := given.get(key)))
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        address = given.get(FETCHED.get(tag, ""))
        if address and given.get("rel") != "canonical":
            self.fetched.append(address)


def faults(site: Path) -> list[str]:
    """Return what is wrong, a line each."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = [] if pages else [f"{site}: there are no pages"]
    for path, page in pages.items():
        where = path.relative_to(site.resolve())
        for address in page.links + page.fetched:
            split = urlsplit(address)
            if split.scheme or split.netloc:
                if address in page.fetched and split.scheme != "data":
                    found.append(f"{where}: fetches {address}")
                continue
            goal = (path.parent / unquote(split.path)).resolve() if split.path else path
            if goal.is_dir():
                goal /= "index.html"
            if not goal.exists():
                found.append(f"{where}: there is no {address}")
            elif split.fragment and goal in pages and unquote(split.fragment) not in pages[goal].anchors:
                found.append(f"{where}: there is no anchor {address}")
    for path in sorted(site.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        if "url(http" in text or "url(//" in text or "@import url" in text:
            found.append(f"{path.relative_to(site)}: fetches from elsewhere")
    return found


def search_faults(site: Path, names: Mapping[str, str] = SEARCHED_NAMES) -> list[str]:
    """Return what is wrong with the search of a site, a line each."""
    text = (site / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text[text.index("{") : text.rindex("}") + 1])
    pages = index["docnames"]
    words: dict[str, set[str]] = {page: set() for page in pages}
    for table in (index["terms"], index["titleterms"]):
        for word, numbers in table.items():
            for number in [numbers] if isinstance(numbers, int) else numbers:
                words[pages[number]].add(word)
    found = [f"the search finds {page}" for page in pages if words[page] and not is_searched(page)]
    for name, page in names.items():
        missing = [word for word in re.findall(r"\w+", name.lower()) if not _has_word(words.get(page, set()), word)]
        if missing:
            found.append(f"the search for {name} does not find {page}, which lacks {', '.join(missing)}")
    return found


def _has_word(words: Set[str], typed: str) -> bool:
    """Whether a word is among those of a page. Sphinx keeps their stems, without short and common words."""
    if typed in ("of", "out", "the"):
        return True
    stems = (word for word in words if len(typed) - 2 <= len(word) <= len(typed) and len(word) > 3)
    return typed in words or any(typed.startswith(stem[:-1]) for stem in stems)


def main(arguments: list[str]) -> int:
    """Print the faults of a built site; return the exit status."""
    if len(arguments) != 1:
        print("give the folder of the built site", file=sys.stderr)
        return 2
    site = Path(arguments[0])
    found = [*faults(site), *search_faults(site)]
    print(
        "\n".join(found) if found else "no link is dead, nothing is fetched from elsewhere, and the search finds names"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
