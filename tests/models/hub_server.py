"""A small hub on loopback that speaks as much of the Hugging Face hub's protocol as ``huggingface_hub`` uses.

It lists a repository's files with sizes and digests, gives each by ``resolve/COMMIT/FILE`` in whole or from a byte on,
and refuses as the hub does. What was asked of it is kept, in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 1 << 20
"""Least size of files that are stored by their SHA-256, as the hub stores large ones."""


@dataclass
class Repo:
    """A repository.

    Attributes:
        files: contents by path.
        commit: its revision; a test that changes files changes this, too.
        gated: whether files are given to nobody.
        private: whether it is there for those alone who have the hub's token.
        sizes: other sizes than the files have, by path.
    """

    files: dict[str, bytes]
    commit: str = "a" * 40
    gated: bool = False
    private: bool = False
    sizes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A request that was made."""

    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class Hub:
    """What the server has, and what was asked of it.

    Attributes:
        repos: by ``user/repo``.
        token: the one that is accepted.
        asked: requests, in order.
        breaks_after: bytes of a body after which the connection breaks, for each coming body; empty for none.
        status: answered to everything, where it is not 0.
        ignores_ranges: give whole files to those who ask for the rest.
        damages: give other bytes than there are.
        cdn: address of another server that large files are to be had from; they are redirected there.
        xet: advertise that large files are to be had by the hub's other protocol, too.
        moved_to: address of another server that has everything; all is redirected there.
        names_commits: say with each file of which revision it is.
        answers_head: answer HEAD requests.
        folder: path of the hub on its server.
        endpoint: address of the server.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    token: str = "hf_right"
    asked: list[Asked] = field(default_factory=list)
    breaks_after: list[int] = field(default_factory=list)
    status: int = 0
    ignores_ranges: bool = False
    damages: bool = False
    cdn: str = ""
    xet: bool = False
    moved_to: str = ""
    names_commits: bool = True
    answers_head: bool = True
    folder: str = ""
    endpoint: str = ""

    def looks(self) -> list[Asked]:
        """Return the requests for what repositories have."""
        return [asked for asked in self.asked if asked.path.startswith("/api/models/")]

    def bodies(self) -> list[Asked]:
        """Return the requests for contents of files."""
        return [asked for asked in self.asked if asked.method == "GET" and "/resolve/" in asked.path]


def digest_of(content: bytes) -> str:
    """Return a file's digest as the hub has it."""
    if len(content) >= LARGE_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub(**repos: Repo) -> Iterator[Hub]:
    """Yield a hub with these repositories of ``user``, which serves while the block runs."""
    hub = Hub({f"user/{name}": repo for name, repo in repos.items()})

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # of a client that has left
            super().handle()

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Say nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).removeprefix(self.hub.folder)
        authorization = self.headers.get("Authorization")
        self.hub.asked.append(Asked(self.command, path, self.headers.get("Range"), authorization))
        if self.hub.status:
            self._refuse(self.hub.status, "", "Something is wrong with the hub")
            return
        if self.hub.moved_to:
            self._send(308, b"", {"Location": f"{self.hub.moved_to}{self.path}"})
            return
        if self.command == "HEAD" and not self.hub.answers_head:
            self._refuse(405, "", "Method not allowed")
            return
        if authorization is not None and authorization != f"Bearer {self.hub.token}":
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return
        is_api = path.startswith("/api/models/")
        name = "/".join(path.removeprefix("/api/models").split("/")[1:3])
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and authorization is None):
            # So the hub answers those whom it does not know, that they learn nothing of what is private.
            if authorization is None:
                self._refuse(401, "RepoNotFound", "Repository not found")
            else:
                self._refuse(404, "RepoNotFound", "Repository not found")
        elif is_api:
            self._list(name, repo)
        elif repo.gated:
            self._refuse(403, "GatedRepo", f"Access to model {name} is restricted")
        else:
            self._give(repo, path.split("/", 5)[5])

    def _list(self, name: str, repo: Repo) -> None:
        siblings = []
        for path, content in repo.files.items():
            size, digest = repo.sizes.get(path, len(content)), digest_of(content)
            entry: dict[str, object] = {"rfilename": path, "size": size, "blobId": digest[:40]}
            if len(digest) == 64:
                entry["lfs"] = {"sha256": digest, "size": size, "pointerSize": 134}
            siblings.append(entry)
        facts = {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "private": False, "tags": []}
        self._send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def _give(self, repo: Repo, path: str) -> None:
        content = repo.files.get(path)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"ETag": f'"{digest_of(content)}"', "Accept-Ranges": "bytes"}
        if self.hub.names_commits:
            headers["X-Repo-Commit"] = repo.commit
        if len(content) >= LARGE_BYTES:
            headers |= {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{digest_of(content)}"'}
            if self.hub.xet:
                refresh = f"{self.hub.endpoint}/api/models/user/x/xet-read-token/{repo.commit}"
                headers |= {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": refresh}
            if self.hub.cdn:
                self._send(302, b"", {**headers, "Location": f"{self.hub.cdn}{self.path}"})
                return
        if self.hub.damages:
            content = bytes(len(content))
        start = 0
        if "Range" in self.headers and not self.hub.ignores_ranges:
            start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._send(206 if start else 200, content[start:], headers)

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message, "Content-Type": "application/json"}
        if code:
            headers["X-Error-Code"] = code
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if "/resolve/" in self.path and status < 300 and self.hub.breaks_after:
            self.wfile.write(body[: self.hub.breaks_after.pop(0)])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return
        self.wfile.write(body)
