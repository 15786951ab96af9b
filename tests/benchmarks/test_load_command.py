"""What the load generator makes of servers that answer, refuse, break off and say nonsense."""

from __future__ import annotations

import json
import re
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from benchmarks.__main__ import app
from benchmarks.load.asking import APIS, Reply
from benchmarks.load.traffic import Prompts, least_read, sending_times
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paceline.core.errors import EngineError, PacelineError
from tests.timing import WAIT_S

SMALL = ("--prefix-words", "5", "--own-words", "2")


def sse(*events: Any) -> bytes:
    return b"".join(
        b"data: " + (each if isinstance(each, bytes) else json.dumps(each).encode()) + b"\n\n" for each in events
    )


def usage(prompt: int, cached: int, said: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": said, "prompt_tokens_details": {"cached_tokens": cached}}
    return {"choices": [], "usage": counts}


def words(*texts: str) -> list[dict[str, Any]]:
    return [{"choices": [{"text": text}]} for text in texts]


WHOLE = sse(*words("a", " data: b", "c"), usage(10, 4, 5), b"[DONE]")
"""Three arrivals at most, five tokens, and six that were read."""

Answer = Callable[[int, dict[str, Any]], tuple[int, bytes]]
"""What a stub says to its request of a number."""


class Stub(ThreadingHTTPServer):
    """A server that says what a test has it say. Its tokens are letters.

    Attributes:
        asked: bodies of requests for answers.
        keys: that came with them.
        most: answers that were under way at once.
    """

    daemon_threads = True

    def __init__(self, answer: Answer, models: Sequence[str] = ("mine",), *, tokenizes: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.models, self.tokenizes = answer, models, tokenizes
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.now = self.most = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def say(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": name} for name in self.models]}).encode()
        if path == "/apply-template" and self.tokenizes:
            return 200, json.dumps({"prompt": f"<{body['messages'][0]['content']}"}).encode()
        if path == "/tokenize" and self.tokenizes:
            return 200, json.dumps({"tokens": list(map(ord, body["content"]))}).encode()
        if path not in ("/v1/completions", "/v1/chat/completions", "/completion"):
            return 404, b"not here"
        with self.lock:
            number = len(self.asked)
            self.asked.append(body)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            return self.answer(number, body)
        finally:
            with self.lock:
                self.now -= 1


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: dict[str, Any]) -> None:
        self.server.keys.add(self.headers["Authorization"])
        status, said = self.server.say(self.path, body)
        if status == 0:
            return
        self.send_response(status)
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- its name there
        pass


@contextmanager
def stub(answer: Answer = lambda *_: (200, WHOLE), **options: Any) -> Iterator[Stub]:
    with Stub(answer, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(WAIT_S)


def run(*arguments: object) -> tuple[dict[str, Any], str, PacelineError | None]:
    """Return the figures, what is printed, and the error."""
    result = CliRunner().invoke(app, ["load", *map(str, arguments)])
    error = result.exception
    assert error is None or isinstance(error, PacelineError), result.output
    *shown, line = result.output.splitlines()
    return json.loads(line)["load"], "\n".join(shown), error


def refused(*arguments: object) -> str:
    """Return the error where nothing was measured."""
    result = CliRunner().invoke(app, ["load", *map(str, arguments)])
    assert isinstance(result.exception, PacelineError), result.output
    assert not result.output
    return str(result.exception)


def test_several_servers_are_asked_in_turn_and_what_they_read_is_set_beside_the_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "first, second")
    file = tmp_path / "load.json"
    with stub() as one, stub() as other:
        found, shown, error = run(
            one.url, f"{other.url}/v1/", *SMALL, "--requests", 7, "--prefixes", 3, "-n", 9, "--temp", 0, "--json", file
        )

    assert error is None
    assert [of["requests"] for of in found["by_url"].values()] == [4, 3] == [len(one.asked), len(other.asked)]
    assert list(found["by_url"]) == [one.url, other.url]
    assert one.keys == other.keys == {"Bearer first"}
    prompts = Prompts(7, 3, 5, 2).texts()
    assert [body["prompt"] for body in sorted(one.asked + other.asked, key=lambda body: body["seed"])] == prompts
    for body in one.asked + other.asked:
        assert body["model"] == "mine"
        assert (body["max_tokens"], body["temperature"], body["stream"]) == (9, 0.0, True)
        assert body["stream_options"] == {"include_usage": True}
        assert "ignore_eos" not in body
    everything = found["all"]
    assert (everything["lost"], everything["tokens"], everything["prompt_tokens_read"]) == (0, 35, 42)
    assert everything["tokens_per_second"] == pytest.approx(35 / everything["wall_s"])
    beginnings = {prompt[:length] for prompt in prompts for length in range(1, len(prompt) + 1)}
    assert everything["prompt_tokens_least"] == len(beginnings)
    assert set(everything["first_token_s"]) == {"p50", "p95", "p99"}
    assert "7 requests to mine, 8 at once" in shown
    assert f"prompt tokens read: {42 / len(beginnings):.2f} of the least possible" in shown
    assert re.search(rf"\n {re.escape(one.url)} +4 +0 ", shown)
    assert re.search(r"\n all +7 +0 ", shown)
    assert json.loads(file.read_text())["load"] == found


LOST = {
    "status 503: the server is full": (503, b'{"error": {"message": "the server is full"}}'),
    "status 502: Bad Gateway": (502, b"Bad Gateway"),
    "the worker died": (200, sse(*words("a"), {"error": {"message": "the worker died"}})),
    "one; two": (200, sse({"error": "one"}, {"error": "two"}, b"[DONE]")),
    'the stream stopped before its end: data: {"choices": [{"text": "a"}]}': (200, sse(*words("a"))),
    "the stream stopped before its end: nothing was said": (200, b""),
    "RemoteProtocolError: Server disconnected without sending a response.": (0, b""),
}


def test_what_is_lost_is_counted_with_its_reasons_and_fails() -> None:
    answers = [*LOST.values(), LOST["the worker died"], (200, sse(b"{]")), (200, WHOLE), (200, WHOLE)]
    with stub(lambda number, _: answers[number]) as server:
        found, shown, error = run(server.url, *SMALL, "--requests", len(answers), "--prefixes", 2, "--concurrency", 1)

    assert isinstance(error, EngineError)
    assert str(error) == "9 of 11 requests were lost"
    everything = found["all"]
    reasons = everything["reasons"]
    (nonsense,) = set(reasons) - set(LOST)
    assert nonsense.startswith("no event of a stream of /v1/completions (JSONDecodeError")
    assert reasons == {**dict.fromkeys(LOST, 1), "the worker died": 2, nonsense: 1}
    assert "2 lost: the worker died\n" in shown
    # Others are measured all the same.
    assert (everything["tokens"], everything["prompt_tokens_read"]) == (10, 12)
    # Two ended in an error of the server's, one was cut, and one was nonsense.
    assert everything["lost_after_their_first_token"] == 4


def test_of_a_chat_it_is_text_that_counts() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "so"}, {"content": "a"}, {"content": "b"}, {}]
    events = [{"choices": [{"delta": delta}]} for delta in deltas]
    with stub(lambda *_: (200, sse(*events, b"[DONE]"))) as server:
        found, shown, error = run(server.url, "--api", "chat", *SMALL, "--requests", 2, "--prefixes", 1)

    assert error is None
    prompts = Prompts(2, 1, 5, 2).texts()
    assert sorted(body["messages"][0]["content"] for body in server.asked) == sorted(prompts)
    # This one counts no tokens, and does not say what it had cached.
    assert found["all"]["tokens"] == 6
    assert found["all"]["prompt_tokens_read"] is None
    assert found["all"]["prompt_tokens_least"] == least_read([list(map(ord, f"<{prompt}")) for prompt in prompts])
    assert "of the least possible" not in shown


def test_only_text_is_an_arrival() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "so"}, {"content": "a"}, {"content": "b"}, {}]
    said = sse(*({"choices": [{"delta": delta}]} for delta in deltas), usage(10, 4, 3), b"[DONE]")
    # The role comes at once, and the end with the last letter.
    reply = Reply(sent_s=1.0, status=200, arrivals=[(2.0, 1), (3.0, 2), (5.0, 3), (6.0, 1)])
    APIS["chat"].read(reply, said)
    assert (reply.text, reply.tokens, reply.errors) == ("soab", 3, [])
    assert reply.arrivals == [(3.0, 2), (5.0, 1)]
    assert (reply.first_s, reply.gaps_s) == (2.0, [2.0])


def test_llama_servers_own_streams_are_read() -> None:
    last = {"content": "", "stop": True, "tokens_predicted": 3, "timings": {"prompt_n": 6, "cache_n": 4}}
    said = sse(*({"content": text, "stop": False} for text in ("a", "", "b")), last)
    with stub(lambda *_: (200, said), tokenizes=False) as server:
        found, _, error = run(
            server.url, "--api", "llama", *SMALL, "--requests", 2, "--prefixes", 1, "-n", 3, "--ignore-eos"
        )

    assert error is None
    assert [(body["n_predict"], body["ignore_eos"]) for body in server.asked] == [(3, True)] * 2
    assert (found["all"]["tokens"], found["all"]["prompt_tokens"], found["all"]["prompt_tokens_read"]) == (6, 20, 12)
    assert found["all"]["prompt_tokens_least"] is None


def test_clients_wait_for_answers_and_a_rate_does_not() -> None:
    def held(count: int) -> Answer:
        """Answer none before so many are there."""
        all_there = threading.Barrier(count)

        def answer(*_: object) -> tuple[int, bytes]:
            all_there.wait(WAIT_S)
            return 200, WHOLE

        return answer

    some = (*SMALL, "--requests", 12, "--prefixes", 1)
    with stub(held(3)) as server:
        found, _, error = run(server.url, *some, "--concurrency", 3)
        assert error is None
        assert server.most == 3
        assert found["late_s"] is None
    with stub(held(12)) as server:
        found, shown, error = run(server.url, *some, "--rate", 100, "--burstiness", 0.5)
        assert error is None
        assert server.most == 12
        assert found["late_s"]["p99"] >= 0
        assert "12 requests to mine, 100 a second" in shown


def test_what_cannot_be_asked_is_one_line() -> None:
    with stub() as server, stub(models=("one", "two")) as two, stub(models=()) as none:
        for arguments, said in {
            ("localhost:8080",): "localhost:8080 is no address of a server: give one such as http://127.0.0.1:8080",
            (server.url, "--rate", "1", "--concurrency", "2"): "--concurrency and --rate exclude each other: give "
            "clients at once, or requests a second",
            (server.url, "--burstiness", "1"): "--burstiness is of --rate: give one, or leave it out",
            (server.url, "--rate", "0"): "--rate 0: give a number above 0",
            (server.url, "--rate", "1", "--burstiness", "nan"): "--burstiness nan: give a number above 0",
            (server.url, "--api", "soap"): "--api soap: choose from completions, chat, llama",
            (server.url, "--text", "verse"): "--text verse: choose from code, prose, json, logs",
            (server.url, "--prefixes", "65"): "--prefixes 65: 64 requests have at most as many; ask for more by "
            "--requests",
            (two.url,): f"{two.url}/v1/models lists one, two: choose one by --model",
            (none.url,): f"{none.url}/v1/models lists no model (status 200): name one by --model",
        }.items():
            assert refused(*arguments) == said
        assert not server.asked + two.asked + none.asked
    assert re.fullmatch(
        rf"{server.url}/v1/models does not answer \(ConnectError: .*\): start a server there, or give another address",
        refused(server.url),
    )


def test_a_tokenizer_elsewhere_counts_the_least_or_is_an_error() -> None:
    some = (*SMALL, "--requests", 2, "--prefixes", 1)
    with stub(tokenizes=False) as gateway, stub() as replica:
        found, _, error = run(gateway.url, *some, "--tokenizer", replica.url)
        assert error is None
        assert not replica.asked
        assert found["all"]["prompt_tokens_least"] == least_read(
            [list(map(ord, prompt)) for prompt in Prompts(2, 1, 5, 2).texts()]
        )
        before = len(gateway.asked)
        said = refused(gateway.url, *some, "--tokenizer", gateway.url)
        assert len(gateway.asked) == before
        assert said == f"--tokenizer {gateway.url}: no token comes from {gateway.url}/tokenize"


def test_prompts_share_as_many_beginnings_as_are_asked_for() -> None:
    prompts = Prompts(20, 4, 50, 5, "prose", seed=3)
    texts = prompts.texts()
    assert texts == prompts.texts()
    assert len(set(texts)) == 20
    shared = Counter(text.rpartition("\n\n# ")[0] for text in texts)
    assert list(shared.values()) == [5] * 4
    # In no fixed order, or the servers of a list would have prefixes of their own.
    assert len({text.partition("\n")[0] for text in texts[::4]}) > 1
    others = Prompts(20, 4, 50, 5, "prose", seed=4).texts()
    assert not {text.partition("\n")[0] for text in texts} & {text.partition("\n")[0] for text in others}


def test_requests_come_at_the_rate_and_as_bursty_as_was_said() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        times = sending_times(4000, 5.0, burstiness, seed=1)
        assert times == sending_times(4000, 5.0, burstiness, seed=1) != sending_times(4000, 5.0, burstiness, seed=2)
        gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
        assert min(gaps) >= 0
        assert statistics.fmean(gaps) == pytest.approx(1 / 5, rel=0.1)
        # Of a Poisson process the spread of gaps is as long as they are.
        assert statistics.stdev(gaps) * 5 == pytest.approx(burstiness**-0.5, rel=0.1)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=8, unique_by=tuple))
def test_the_least_is_every_beginning_once(prompts: list[list[int]]) -> None:
    beginnings = {tuple(prompt[:length]) for prompt in prompts for length in range(1, len(prompt) + 1)}
    assert least_read(prompts) == len(beginnings)
    # An answer begins with what the last token of its prompt says, so that is read every time.
    assert least_read([*prompts, *prompts]) == len(beginnings) + len(prompts)
