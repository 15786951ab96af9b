"""Checks the built site: ``python docs/check_site.py build/site``.

Every link inside it, with its anchor, has to lead somewhere, and no page may fetch anything from elsewhere: the site
works without a network.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}
"""What a browser fetches by itself, by the element and its attribute."""


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


def main(arguments: list[str]) -> int:
    """Print the faults of a built site; return the exit status."""
    if len(arguments) != 1:
        print("give the folder of the built site", file=sys.stderr)
        return 2
    found = faults(Path(arguments[0]))
    print(
        "\n".join(found) if found else "every link of the site leads somewhere, and nothing is fetched from elsewhere"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
