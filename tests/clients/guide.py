"""Settings of other programs, as the guides have them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

GUIDES: Final = Path(__file__).parents[2] / "docs" / "guides"

ADDRESS: Final = "http://127.0.0.1:8080"
"""Where the guides' server is."""


def block(heading: str, language: str, url: str, page: str = "clients.md") -> str:
    """Return the first block of code in a language below a heading of a guide, for a server at ``url``."""
    text = (GUIDES / page).read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    found = re.search(rf"^```{language}\n(.*?)^```", section[1], re.MULTILINE | re.DOTALL)
    assert found is not None, language
    address = ADDRESS.removeprefix("http://")
    assert address in found[1]
    return found[1].replace(address, url.removeprefix("http://"))
