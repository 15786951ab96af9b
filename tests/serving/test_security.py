"""The layers in their order, and the socket below them."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from paceline.cli.options import in_flags
from paceline.core.errors import InputError
from paceline.serving.connections import socket_options
from paceline.serving.middleware import with_security
from paceline.serving.security import ApiKeys, CorsPolicy, SecuritySettings, TlsFiles
from tests.serving.asking import Echo, Sent, Socket, answer, ask, body_part, call, feed, http_scope, run, serving
from tests.serving.certificates import CERTIFICATE, KEY, KEY_WITH_PASSPHRASE, OTHER_KEY
from tests.timing import WAIT_S, LoopTime

EVERYTHING = SecuritySettings(
    hosts=("127.0.0.1",), keys=ApiKeys(["k"]), allowed_hosts=("a.example",), cors=CorsPolicy(("*",))
)


def test_a_chunk_passes_before_the_next_is_made() -> None:
    chunks = [b"one", b"two", b"three"]
    arrived = {chunk: asyncio.Event() for chunk in chunks}
    order: list[str] = []

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for chunk in chunks:
            order.append(f"made {chunk.decode()}")
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await arrived[chunk].wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send(message: Message) -> None:
        if body := message.get("body"):
            order.append(f"arrived {body.decode()}")
            arrived[body].set()

    scope = http_scope(origin="https://a.example", x_api_key="k")
    run(lambda: with_security(routes, EVERYTHING)(scope, feed(body_part(b"{}", more=False)), send))
    assert order == [f"{what} {chunk.decode()}" for chunk in chunks for what in ("made", "arrived")]


@pytest.mark.parametrize(
    ("keys", "asking", "refused"),
    [
        # Of eight places, half of what the others leave.
        (["a", "b"], "aaaaabbb", [4, 7]),
        (["a", "b"], "bbaaaa", [5]),
        ([], "aaaabbbba", [8]),
    ],
)
def test_no_key_has_all_requests_under_way(keys: list[str], asking: str, refused: list[int]) -> None:
    async def statuses() -> list[int]:
        goes_on = asyncio.Event()

        async def routes(scope: Scope, receive: Receive, send: Send) -> None:
            await goes_on.wait()
            await answer(send, b"{}")

        app = with_security(routes, SecuritySettings(keys=ApiKeys(keys), max_connections=8))

        async def status(key: str) -> int:
            sent = Sent()
            await app(http_scope(authorization=f"Bearer {key}"), feed(body_part(b"{}", more=False)), sent)
            return sent.status

        tasks = [asyncio.create_task(status(key)) for key in asking]
        for _ in range(20):
            await asyncio.sleep(0)
        goes_on.set()
        found = [await task for task in tasks]
        # All of it is given back.
        assert await status(asking[-1]) == 200
        return found

    assert run(statuses) == [503 if place in refused else 200 for place in range(len(asking))]


@pytest.mark.parametrize(
    ("host", "key", "size", "status"),
    [
        ("evil.example", "wrong", 99, 403),
        ("a.example", "wrong", 99, 401),
        ("a.example", "k", 99, 413),
        ("a.example", "k", 9, 200),
    ],
)
def test_checks_come_in_their_order_and_pages_may_read_each_refusal(
    host: str, key: str, size: int, status: int
) -> None:
    settings = SecuritySettings(
        keys=ApiKeys(["k"]), allowed_hosts=("a.example",), cors=CorsPolicy(("https://p.example",)), max_body_bytes=10
    )
    headers = {"Host": host, "X-Api-Key": key, "Origin": "https://p.example", "X-Request-Id": "mine"}
    answer = ask(settings, headers=headers, content=b"x" * size)
    assert answer.status_code == status
    assert answer.headers["access-control-allow-origin"] == "https://p.example"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_nobody_without_a_key_gets_a_body_into_memory() -> None:
    sent = Sent()
    reads: list[int] = []

    async def receive() -> Message:
        reads.append(len(sent))
        return body_part(b"x", more=len(reads) < 3)

    scope = http_scope(content_length="3")
    run(lambda: with_security(Echo(), EVERYTHING)(scope, receive, sent))
    assert sent.status == 401
    # The answer was there before the first byte was read, and dropped.
    assert reads == [2, 2, 2]


def test_a_websocket_is_closed_and_reaches_no_route() -> None:
    routes = Echo()
    sent = call(with_security(routes, SecuritySettings()), {"type": "websocket", "headers": []})
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": "this server has no websockets"}]
    assert not routes.scopes


def test_start_and_stop_reach_the_routes() -> None:
    seen: list[Scope] = []

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    scope = {"type": "lifespan", "state": {}}
    call(with_security(routes, EVERYTHING), scope)
    assert seen == [scope]


# The socket


def test_headers_that_stop_halfway_end_the_connection() -> None:
    with serving(Echo(), SecuritySettings(header_timeout_s=0.1)) as port:
        with Socket(port) as silent:
            assert silent.rest() == ""
        with Socket(port) as halting:
            halting.send("GET / HTTP/1.1", "host: localhost")
            assert halting.rest() == ""


def test_headers_of_a_further_request_have_their_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_time, echo = LoopTime(monkeypatch), Echo()
    loops: list[asyncio.AbstractEventLoop] = []

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        loops.append(asyncio.get_running_loop())
        await echo(scope, receive, send)

    with serving(routes, SecuritySettings(header_timeout_s=3600.0)) as port, Socket(port) as client:
        client.send("GET / HTTP/1.1", "host: localhost", "")
        assert client.line() == "HTTP/1.1 200 OK"
        client.send("GET / HTTP/1.1", "host: local")
        with loop_time.flies(loops[0]):
            assert "HTTP/1.1" not in client.rest()
    assert len(echo.scopes) == 1


def test_a_client_that_does_not_read_is_one_that_left() -> None:
    heard: list[str] = []
    begun, left = threading.Event(), threading.Event()

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            while True:
                await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})

        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.to_thread(begun.wait, WAIT_S)
        writing = asyncio.create_task(write())
        heard.append((await receive())["type"])
        writing.cancel()
        left.set()

    with serving(routes, SecuritySettings(read_timeout_s=0.1)) as port, Socket(port) as client:
        client.send("GET / HTTP/1.1", "host: localhost", "")
        assert client.line() == "HTTP/1.1 200 OK"
        begun.set()
        assert left.wait(WAIT_S)
    assert heard == ["http.disconnect"]


def test_a_client_that_reads_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_time, has_read = LoopTime(monkeypatch), threading.Event()

    async def routes(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        # Headers have their time, and what comes after them has none.
        await loop_time.pass_by(7200.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(8):
            await send({"type": "http.response.body", "body": b"x" * (1 << 20), "more_body": True})
        await asyncio.to_thread(has_read.wait, WAIT_S)
        await loop_time.pass_by(7200.0)
        await send({"type": "http.response.body", "body": b"end"})

    content = b""
    with (
        serving(routes, SecuritySettings(header_timeout_s=3600.0, read_timeout_s=3600.0)) as port,
        httpx.stream("GET", f"http://127.0.0.1:{port}", timeout=WAIT_S) as answer,
    ):
        for part in answer.iter_raw():
            content += part
            if len(content) >= 8 << 20:
                has_read.set()
    assert content == b"x" * (8 << 20) + b"end"


def request_of(num_bytes: int) -> bytes:
    """Return a request whose first line and headers have so many bytes."""
    head = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: %b\r\n\r\n"
    return head % (b"y" * (num_bytes - len(head % b"")))


@pytest.mark.parametrize(
    ("num_bytes", "piece"),
    [
        *((num_bytes, 1) for num_bytes in (16_384, 16_385)),
        *((num_bytes, piece) for num_bytes in (16_384, 16_385, 17_000, 60_000) for piece in (100, 4096, 1 << 20)),
        *((num_bytes, piece) for num_bytes in (70_000, 400_000) for piece in (1000, 1 << 20)),
    ],
)
def test_large_headers_are_refused_however_they_arrive(num_bytes: int, piece: int) -> None:
    routes, most = Echo(), SecuritySettings().max_header_bytes
    with serving(routes, SecuritySettings()) as port, Socket(port) as client:
        # The second request of a connection is measured as the first.
        for number in (1, 2):
            client.send_pieces(request_of(most if number == 1 else num_bytes), piece)
            line = client.line()
            if number == 1 or num_bytes <= most:
                assert line == "HTTP/1.1 200 OK"
                client.skip_body()
                continue
            assert line == "HTTP/1.1 431 Request Header Fields Too Large"
            head, _, body = client.rest().partition("\r\n\r\n")
            assert "connection: close" in head
            error = json.loads(body)["error"]
            assert (error["code"], error["type"]) == (431, "invalid_request_error")
            assert f"more than {most} bytes" in error["message"]
    assert len(routes.scopes) == (1 if num_bytes > most else 2)


def test_headers_that_never_end_are_refused_where_they_are_too_large() -> None:
    routes = Echo()
    with serving(routes, SecuritySettings(max_header_bytes=1000)) as port, Socket(port) as client:
        client.send("GET / HTTP/1.1", "host: localhost", "x: " + "y" * 1000)
        assert client.line() == "HTTP/1.1 431 Request Header Fields Too Large"
        # The client may go on for a while, and reads the answer all the same.
        client.send("y" * 100_000)
        assert "send fewer" in client.rest()
    assert not routes.scopes


def test_what_is_no_http_is_told_so_in_words() -> None:
    with serving(Echo(), SecuritySettings()) as port, Socket(port) as client:
        client.send("\x00" * 9000, "", "nonsense " * 9000)
        assert client.line() == "HTTP/1.1 400 Bad Request"
        error = json.loads(client.rest().partition("\r\n\r\n")[2])["error"]
        assert (error["code"], error["message"]) == (400, "Invalid HTTP request received.")


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ("Content-Length: 5\r\nTransfer-Encoding: chunked", "more than once how long"),
        ("transfer-encoding: chunked\r\ncontent-length: 5", "more than once how long"),
        ("Content-Length: 0\r\nContent-Length: 0", "more than once how long"),
        ("Content-Length: 0\r\nContent-Length: 5", "more than once how long"),
        ("Content-Length: 5, 5", "more than once how long"),
        ("Content-Length: +5", "Invalid HTTP"),
        ("Content-Length: 0x5", "Invalid HTTP"),
        ("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked", "more than once how long"),
        ("Transfer-Encoding: chunked, identity", "Invalid HTTP"),
        ("Transfer-Encoding: identity", "Invalid HTTP"),
        ("Transfer-Encoding: xchunked", "Invalid HTTP"),
        ("Transfer-Encoding : chunked", "Invalid HTTP"),
        ("Transfer-Encoding: \vchunked", "Invalid HTTP"),
        ("Transfer-Encoding:\r\n chunked", "goes on in the next line"),
        ("X: a\r\n\tTransfer-Encoding: chunked", "goes on in the next line"),
        ("X: a\nTransfer-Encoding: chunked", "ends without \\r\\n"),
        ("X: a\rTransfer-Encoding: chunked", "Invalid HTTP"),
        ("X: a\0", "Invalid HTTP"),
        ("X\0: a", "Invalid HTTP"),
        ("Transfer-Encoding: chunked\r\nX: a\n", "ends without \\r\\n"),
    ],
)
def test_what_a_proxy_may_read_in_another_way_is_refused(headers: str, said: str) -> None:
    """Where the two disagree on a request's end, one client's bytes begin the request of another."""
    routes, hidden = Echo(), b"0\r\n\r\nGET /hidden HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with serving(routes, SecuritySettings()) as port, Socket(port) as client:
        client.send("POST / HTTP/1.1", "host: localhost", headers, "", body=hidden)
        assert client.line() == "HTTP/1.1 400 Bad Request"
        head, _, body = client.rest().partition("\r\n\r\n")
    assert "connection: close" in head
    assert said in json.loads(body)["error"]["message"]
    assert not routes.scopes


@pytest.mark.parametrize(
    "chunks",
    [
        b"0\r\n\nGET /hidden HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"0\r\nX: a\nY: b\r\n\r\n",
        b"0\r\nX: a\r\n b\r\n\r\n",
        b"0\r\nX: a\r\n\nGET /hidden HTTP/1.1\r\n\r\n",
        b"1;\rx\r\nx\r\n0\r\n\r\n",
        b"1;\nx\r\nx\r\n0\r\n\r\n",
        b"1\nx\r\n0\r\n\r\n",
        b"1\r\nx\n0\r\n\r\n",
    ],
)
def test_chunks_that_a_proxy_may_read_in_another_way_are_refused(chunks: bytes) -> None:
    routes, head = Echo(), ("POST / HTTP/1.1", "host: localhost", "transfer-encoding: chunked", "")
    with serving(routes, SecuritySettings()) as port:
        with Socket(port) as client:
            client.send(*head, body=chunks)
            assert client.line() == "HTTP/1.1 400 Bad Request"
            assert "HTTP/1.1" not in client.rest()
        assert not routes.scopes
        with Socket(port) as client:
            client.send(*head, body=b"1;x=y\r\nx\r\n0\r\nA: b\r\nC: d\r\n\r\n")
            assert client.line() == "HTTP/1.1 200 OK"
    assert routes.bodies == [b"x"]


def test_chunks_are_of_http_1_1() -> None:
    routes = Echo()
    with serving(routes, SecuritySettings()) as port:
        for version, status in (("1.0", "400 Bad Request"), ("1.1", "200 OK")):
            with Socket(port) as client:
                client.send(
                    f"POST / HTTP/{version}", "host: localhost", "Transfer-Encoding: CHUNKED", "", body=b"0\r\n\r\n"
                )
                assert client.line() == f"HTTP/1.1 {status}"
    assert len(routes.scopes) == 1


def test_headers_of_cors_keep_their_capitals_on_the_wire() -> None:
    with serving(Echo(), EVERYTHING) as port:
        answer = httpx.options(f"http://127.0.0.1:{port}", headers={"Origin": "https://p.example"}, timeout=WAIT_S)
    names = {name for name, _ in answer.headers.raw if name.lower().startswith(b"access-control-allow")}
    wanted = ("Origin", "Credentials", "Methods", "Headers")
    assert names == {f"Access-Control-Allow-{name}".encode() for name in wanted}
    assert "server" not in answer.headers, "it names no software"


def test_a_pair_is_taken(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    key.write_text(KEY)
    certificate.write_text(CERTIFICATE)
    files = TlsFiles.from_options(key, certificate)
    assert files == TlsFiles(key, certificate)
    options = socket_options(SecuritySettings(tls=files))
    assert (options["ssl_keyfile"], options["ssl_certfile"]) == (str(key), str(certificate))
    assert TlsFiles.from_options(None, None) is None
    assert "ssl_keyfile" not in socket_options(SecuritySettings())


@pytest.mark.parametrize(
    ("key", "certificate", "message"),
    [
        (KEY, None, "--ssl-key-file needs the certificate too: give --ssl-cert-file"),
        (None, CERTIFICATE, "--ssl-cert-file needs the private key too: give --ssl-key-file"),
        (OTHER_KEY, CERTIFICATE, "--ssl-key-file KEY is not the key of --ssl-cert-file CERT"),
        (KEY_WITH_PASSPHRASE, CERTIFICATE, "--ssl-key-file KEY has a passphrase: write the key to a file without one"),
        ("", CERTIFICATE, "--ssl-key-file KEY is not in PEM form: its text has to have a line '-----BEGIN ...-----'"),
        (KEY, "\0\1", "--ssl-cert-file CERT is not in PEM form: its text has to have a line '-----BEGIN ...-----'"),
        (CERTIFICATE, KEY, None),
        (KEY, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None),
        ("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n", CERTIFICATE, None),
    ],
)
def test_another_pair_is_one_line(
    key: str | None, certificate: str | None, message: str | None, tmp_path: Path
) -> None:
    paths: list[Path | None] = []
    for name, text in (("KEY", key), ("CERT", certificate)):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        paths.append(None if text is None else path)
    with pytest.raises(InputError) as refused:
        TlsFiles.from_options(paths[0], paths[1])
    said = in_flags(str(refused.value)).replace(f"{tmp_path}/", "")
    if message is None:
        assert said.startswith("cannot use --ssl-cert-file CERT with --ssl-key-file KEY (")
        assert said.endswith("): give a certificate and its private key, both in PEM form")
        assert "\n" not in said
    else:
        assert said == message


@pytest.mark.parametrize(("missing", "option"), [("key", "`ssl_key_file`"), ("cert", "`ssl_cert_file`")])
def test_a_file_that_cannot_be_read_is_one_line(missing: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "cert").write_text(CERTIFICATE)
    (tmp_path / missing).unlink()
    with pytest.raises(InputError, match=rf"^cannot read {option} .*{missing}: No such file or directory$"):
        TlsFiles.from_options(tmp_path / "key", tmp_path / "cert")
    (tmp_path / missing).mkdir()
    with pytest.raises(InputError, match=rf"^cannot read {option} .*{missing}: Is a directory$"):
        TlsFiles.from_options(tmp_path / "key", tmp_path / "cert")
