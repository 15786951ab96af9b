"""Proxies in front of a server, by the blocks of docs/guides/deploy.md: an event passes before the next one is made."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import numpy as np
import pytest

from paceline.core.arrays import Float64Array
from paceline.server_options import ServerOptions
from tests.clients.guide import block
from tests.clients.servers import free_port, served
from tests.serving.hosted import hosted, scripted
from tests.serving.scripted import SIZE
from tests.timing import WAIT_S

NAME = "llm.example.org"
FIRST, REST = 3, 12


def nginx(program: str, settings: str, port: int, folder: Path) -> list[str]:
    settings, listens = re.subn(r"listen 443 ssl;", f"listen 127.0.0.1:{port};", settings)
    settings, certificates = re.subn(r"ssl_certificate.*;", "", settings)
    assert (listens, certificates) == (1, 2)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    file = folder / "nginx.conf"
    file.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temporary}{settings}}}\n"
    )
    return [program, "-p", str(folder), "-c", str(file)]


def caddy(program: str, settings: str, port: int, folder: Path) -> list[str]:
    # Without TLS, whose certificates come from elsewhere.
    settings = settings.replace(f"{NAME} {{", f"http://{NAME}:{port} {{\n    bind 127.0.0.1", 1)
    file = folder / "Caddyfile"
    file.write_text(f"{{\n    admin off\n    auto_https off\n}}\n{settings}")
    return [program, "run", "--config", str(file), "--adapter", "caddyfile"]


@pytest.mark.parametrize(("name", "language", "prepare"), [("nginx", "nginx", nginx), ("caddy", "text", caddy)])
def test_events_pass_a_proxy_when_they_are_made(
    name: str,
    language: str,
    prepare: Callable[[str, str, int, Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    for variable in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    came = threading.Event()

    def logits(tokens: Sequence[int]) -> Float64Array:
        if list(tokens[-FIRST:]) == [ord("a")] * FIRST:
            assert came.wait(WAIT_S)
        row: Float64Array = np.full(SIZE, -9.0)
        row[ord("a")] = 20.0
        return row

    options = ServerOptions(allowed_hosts=(NAME,))
    port = free_port()
    with hosted(lambda: scripted(target=logits, drafts=False), options) as server:
        settings = block("Behind a proxy", language, server.url, page="deploy.md")
        url = f"http://127.0.0.1:{port}"
        body = {"prompt": "b", "max_tokens": FIRST + REST, "stream": True, "temperature": 0}
        with served(prepare(program, settings, port, tmp_path), os.environ, url, "/health", tmp_path, NAME):
            headers = {"Host": NAME}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=WAIT_S) as answer:
                assert answer.status_code == 200
                events = (line for line in answer.iter_lines() if line.startswith("data: {"))
                assert '"a' in next(events)
                came.set()
                assert len(list(events)) >= REST
