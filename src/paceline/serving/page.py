"""The files of a page, and the headers that keep a browser from doing more with paceline's own than they need.

``web`` is what a browser gets: one page, its modules, its style, and in ``vendor`` the libraries, unmodified. There is
no build step. Everything is read once, so that a request touches no file and can name none but these; Starlette's
``StaticFiles`` looks on the disk each time, and its ETags are of times.
"""

from __future__ import annotations

import functools
import hashlib
import mimetypes
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.core.errors import InputError

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
    "Referrer-Policy": "no-referrer",
    # A browser asks each time whether the file is still the same, as a server of another version may have the address.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file of a page: its bytes, and the headers ``Content-Type`` and ``ETag``."""

    content: bytes
    media_type: str
    etag: str


_MAX_BYTES: Final = 256 << 20
"""Bytes of all files of a page. A folder that has more is something else."""


@functools.cache
def page_files(folder: Path = _WEB) -> Mapping[str, PageFile]:
    """Return the files by path, relative to the server's root: the page itself is the empty one.

    Args:
        folder: of the page; what its names begin with a dot is left out.

    Raises:
        InputError: the folder holds no page, or cannot be read.
    """
    found: dict[str, PageFile] = {}
    size = 0
    try:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if not path.is_file() or any(part.startswith(".") for part in name.split("/")):
                continue
            if folder == _WEB and path.suffix not in _TYPES:
                # Something that is not meant for browsers.
                continue
            size += path.stat().st_size
            if size > _MAX_BYTES:
                break
            content = path.read_bytes()
            # A weak one, as it is the same for compressed bytes.
            etag = f'W/"{hashlib.sha256(content).hexdigest()[:32]}"'
            media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
            prefix = f"{_FOLDER}/" if folder == _WEB else ""
            found["" if name == _INDEX else prefix + name] = PageFile(content, media_type, etag)
    except OSError as error:
        raise InputError(
            f"`static_path` {folder} cannot be read: {error.strerror or error}", field="static_path"
        ) from None
    if size > _MAX_BYTES:
        raise InputError(
            f"`static_path` {folder} has more than {_MAX_BYTES >> 20} MiB of files: name the folder of a web page",
            field="static_path",
        )
    if "" not in found:
        raise InputError(f"`static_path` {folder} has no {_INDEX}: name the folder of a web page", field="static_path")
    return found


def page_handlers(folder: str | None = None) -> Mapping[str, Callable[[Request], Awaitable[Response]]]:
    """Return what sends each file, by its path: the page at ``/``, the same for everybody.

    The files tell nothing of the model, and a browser sends no key with what a page refers to. Of another page than
    paceline's own, in ``folder``, nobody knows what its files need.
    """
    own = {"Content-Security-Policy": CONTENT_SECURITY_POLICY}
    files = page_files() if folder is None else page_files(Path(folder))
    return {f"/{name}": _handler_of(file, own if folder is None else {}) for name, file in files.items()}


def _handler_of(file: PageFile, policy: Mapping[str, str]) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, **policy, "ETag": file.etag}

    async def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return send
