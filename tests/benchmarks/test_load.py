"""What clients make of a stream that arrives in awkward pieces, and of refusals."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from benchmarks.load.asking import Reply, percentiles
from benchmarks.load.laps import Load, load

from paceline.core.errors import EngineError
from tests.timing import WAIT_S

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = {"prompt": [1, 2], "n_predict": 3}
LAST = {"content": "", "stop": True, "tokens_predicted": 3, "speculative": {"rounds": 2, "off_rounds": {}}}


def event(content: str) -> bytes:
    """Return an event that brings a token."""
    return b"data: " + json.dumps({"content": content, "stop": False}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """Return a piece of a body as HTTP frames it."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


ENDING = b"data: " + json.dumps(LAST).encode() + b"\n\n"
STREAM = HEAD + chunk(event("a data: b")) + chunk(event("c") + event("d")) + chunk(ENDING) + b"0\r\n\r\n"


@contextmanager
def answering(pieces: Sequence[bytes], answers: int) -> Iterator[tuple[int, list[bytes]]]:
    """Answer so many requests by the pieces, each on a connection of its own; yield the port, and what was asked."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for _ in range(answers):
                connection, _ = listening.accept()
                with connection:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    asked.append(b"")
                    while not asked[-1].endswith(b"}"):
                        asked[-1] += connection.recv(1 << 16)
                    for piece in pieces:
                        connection.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1], asked
        finally:
            thread.join(WAIT_S)


def test_tokens_are_counted_however_the_stream_is_cut() -> None:
    for size in (len(STREAM), 1, 5):
        pieces = [STREAM[place : place + size] for place in range(0, len(STREAM), size)]
        with answering(pieces, 3) as (port, asked):
            found = load(port, [[BODY, BODY]], BODY)

        assert len(asked) == 3
        assert all(b"POST /completion " in request and b'"n_predict":3' in request for request in asked)
        (replies,) = found.replies
        assert [reply.text for reply in replies] == ["a data: bcd"] * 2
        for reply in replies:
            # The last event says what was said, and brings no token.
            assert sum(count for _, count in reply.arrivals) == reply.tokens == 3
            assert reply.sent_s <= reply.arrivals[0][0] <= reply.arrivals[-1][0]
        assert found.cpu_s > 0
        assert replies[1].arrivals[-1][0] - replies[0].sent_s <= found.wall_s


def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    refusal = b'HTTP/1.1 400 Bad Request\r\nContent-Length: 22\r\n\r\n{"error":"no such way"}'
    with answering([refusal], 1) as (port, _), pytest.raises(EngineError, match="no such way"):
        load(port, [[BODY]], BODY)


def test_speeds_are_of_all_clients_together() -> None:
    def reply(sent_s: float, *arrivals: tuple[float, int]) -> Reply:
        tokens = sum(count for _, count in arrivals)
        last: dict[str, Any] = {"speculative": {"rounds": 4, "off_rounds": {"prompts": 3}}}
        return Reply(sent_s, arrivals=list(arrivals), tokens=tokens, last=last)

    lap = Load([[reply(0.0, (1.0, 1), (2.0, 3))], [reply(0.0, (1.0, 1), (4.0, 2), (6.0, 2))]], wall_s=6.0, cpu_s=0.6)

    # Seven tokens in six seconds of streams, of which there are two.
    assert lap.decode_per_second == pytest.approx(2 * 7 / 6)
    assert lap.whole_per_second == pytest.approx(9 / 6)
    assert lap.off_shares == {"prompts": 0.75}
    figures = lap.figures()
    assert figures["gap_s"] == {"p50": 2.0, "p95": 3.0, "p99": 3.0}
    assert figures["first_token_s"]["p50"] == 1.0
    assert figures["clients_cpu_share"] == pytest.approx(0.1)
    assert percentiles([1.0, 2.0]) == {"p50": 1.0, "p95": 2.0, "p99": 2.0}
