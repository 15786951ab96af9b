"""The files of the page, and the headers that keep a browser from doing more with them than they need.

``web`` is what a browser gets: one page, its modules, its style, and in ``vendor`` the libraries, unmodified. There is
no build step. Everything is read once, so that a request touches no file and can name none but these; Starlette's
``StaticFiles`` looks on the disk each time, and its ETags are of times.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

_WEB: Final = Path(__file__).parent / "web"
"""Folder of the page's files."""
_INDEX: Final = "index.html"
"""File that the page's own address gives."""
_FOLDER: Final = "page"
"""Path under which the page asks for its other files, relative to itself, so that ``--api-prefix`` needs no word."""

_TYPES: Final[Mapping[str, str]] = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}

CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Text becomes markup in one place, which goes through DOMPurify.
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
"""What a browser may do for the page: run its files and ask its server. Inline scripts and styles have no effect, and
what a model writes can load nothing."""

_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    # A browser asks each time whether the file is still the same, as a server of another version may have the address.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of the page: its bytes, and the headers ``Content-Type`` and ``ETag``."""

    content: bytes
    media_type: str
    etag: str


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files by path, relative to the server's root: the page itself is the empty one."""
    found: dict[str, PageFile] = {}
    for path in sorted(_WEB.rglob("*")):
        if path.suffix not in _TYPES:
            # A folder, or something that is not meant for browsers.
            continue
        name = path.relative_to(_WEB).as_posix()
        content = path.read_bytes()
        # A weak one, as it is the same for compressed bytes.
        etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
        found["" if name == _INDEX else f"{_FOLDER}/{name}"] = PageFile(content, _TYPES[path.suffix], etag)
    return found


def page_handlers() -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
    """Return what sends each file, by its path: the page at ``/``, the same for everybody.

    The files tell nothing of the model, and a browser sends no key with what a page refers to.
    """
    return {f"/{name}": _handler_of(file) for name, file in page_files().items()}


def _handler_of(file: PageFile) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "ETag": file.etag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return send
