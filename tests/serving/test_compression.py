"""What is compressed for clients that take it: the page and large answers; never what is small, or sent as it comes."""

from __future__ import annotations

import gzip
from typing import Any

import httpx
import pytest

from paceline.server_options import ServerOptions
from paceline.serving.page import page_files
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.scripted import Turnstile, writing_model

GZIP = {"Accept-Encoding": "gzip"}
PLAIN = {"Accept-Encoding": "identity"}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8, "temperature": 0}


def on_the_wire(server: Hosted, method: str, path: str, **request: Any) -> tuple[httpx.Headers, bytes]:
    """Return the headers and the bytes of an answer as they came."""
    with server.web.stream(method, server.url + path, **request) as response:
        assert response.status_code == 200
        return response.headers, b"".join(response.iter_raw())


def test_the_page_is_less_on_the_wire(server: Hosted) -> None:
    files = {name: file for name, file in page_files().items() if not name.endswith(".LICENSE")}
    sent = 0
    for name, file in files.items():
        headers, raw = on_the_wire(server, "GET", f"/{name}", headers=GZIP)
        is_compressed = headers.get("content-encoding") == "gzip"
        assert is_compressed == (len(file.content) >= 4096)
        assert (gzip.decompress(raw) if is_compressed else raw) == file.content
        assert int(headers["content-length"]) == len(raw)
        sent += len(raw)
        assert on_the_wire(server, "GET", f"/{name}", headers=PLAIN)[1] == file.content
    assert sent < sum(len(file.content) for file in files.values()) * 0.45


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}])
def test_a_small_answer_is_sent_as_it_is(server: Hosted, fields: dict[str, Any]) -> None:
    headers, raw = on_the_wire(server, "POST", "/v1/chat/completions", json={**CHAT, **fields}, headers=GZIP)
    assert "content-encoding" not in headers
    assert len(raw) < 4096
    assert raw.startswith(b'{"id":"chatcmpl-')


def test_a_large_answer_is_compressed_whether_it_is_written_at_once_or_in_pieces(server: Hosted) -> None:
    for path, body in (
        ("/tokenize", {"content": "abc " * 2000}),
        # More than 500 probabilities are written in pieces.
        ("/completion", {"prompt": "abc", "n_predict": 64, "ignore_eos": True, "n_probs": 20, "seed": 1}),
    ):
        headers, raw = on_the_wire(server, "POST", path, json=body, headers=GZIP)
        assert headers["content-encoding"] == "gzip"
        plain = httpx.Response(200, content=gzip.decompress(raw)).json()
        assert len(gzip.decompress(raw)) > 2 * len(raw)
        other = httpx.Response(200, content=on_the_wire(server, "POST", path, json=body, headers=PLAIN)[1]).json()
        for name in ("tokens", "content", "completion_probabilities"):
            assert plain.get(name) == other.get(name)
        assert plain.get("tokens") or plain.get("completion_probabilities")


@pytest.mark.parametrize("path", ["/completion", "/v1/completions", "/v1/chat/completions"])
def test_a_stream_of_events_passes_unchanged_and_at_once(path: str) -> None:
    gate = Turnstile(writing_model())
    body = {**CHAT, "prompt": "abc", "ignore_eos": True, "stream": True}
    with hosted(lambda: scripted(target=gate, drafts=False), ServerOptions()) as running:
        try:
            request = running.web.stream("POST", running.url + path, json=body, headers=GZIP)
            gate.let(5)
            with request as response:
                assert "content-encoding" not in response.headers
                assert response.headers["content-type"].startswith("text/event-stream")
                parts = response.iter_raw()
                # The first tokens are here before the model is let through to the last.
                assert next(parts).startswith(b"data: {")
                assert gate.waiting.wait(60)
                gate.open()
                rest = b"".join(parts)
            assert b"data: " in rest
        finally:
            gate.open()
