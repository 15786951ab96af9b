"""What a campaign of attacks tells: of a server that fails, of commands that leave something, and how to try again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.attack import command, undisturbed
from benchmarks.attack.bodies import ROUTES, Bodies
from benchmarks.attack.command import Row
from benchmarks.attack.commands import Done, Writing, check_again, check_ending, check_left, run
from benchmarks.attack.files import damage_json
from benchmarks.attack.requests import Target, smuggling
from benchmarks.attack.serving import PLACE_S, SILENT_S, Beside, noticed_problems
from benchmarks.attack.tries import AttackError, Failure, Tries
from benchmarks.attack.undisturbed import Noticed, Witness
from benchmarks.server_soak.wire import HOST

from paceline.core.errors import EngineError, InputError
from tests.serving.hosted import hosted, scripted
from tests.timing import WAIT_S

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
Answering = Callable[[str, asyncio.StreamWriter], Coroutine[Any, Any, None]]

HEALTHY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nfull"
BROKEN = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\n{}"
TEXT = ("one ", "two ", "three")


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await test()

    asyncio.run(bounded())


def stream(pieces: Sequence[str], *, ends: bool = True) -> bytes:
    events = [f"data: {json.dumps({'content': piece})}\n\n".encode() for piece in pieces]
    chunks = [b"%x\r\n%s\r\n" % (len(event), event) for event in events]
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + (b"0\r\n\r\n" if ends else b"")


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    """Yield the port of a server that serves each connection so; leaving ends what is still served."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await serve(reader, writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve_until_closed, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def serving(answer: Answering) -> AbstractAsyncContextManager[int]:
    """Return a server that lets ``answer`` write what it likes to each request but those for ``/health``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = [line.partition(": ") for line in head.split("\r\n")]
            await reader.readexactly(sum(int(value) for name, _, value in lines if name == "Content-Length"))
            if head.startswith("GET /health"):
                writer.write(HEALTHY)
            else:
                await answer(head, writer)

    return listening(serve)


# --- the undisturbed client -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "wrong", "refused"),
    [
        (stream(TEXT), "", ""),
        (stream(("one ", "2 ", "three")), "'one 2 three' in place of 'one two three'", ""),
        (stream(TEXT[:2]), "", "a text was cut off after 'one two '"),
        (stream(TEXT[:2], ends=False), "", "IncompleteReadError"),
        (BUSY, "", "status 429: b'full'"),
        (BROKEN, "", "status 500"),
    ],
    ids=["the same", "another text", "a part", "broken off", "refused", "500"],
)
def test_the_undisturbed_client_tells_what_it_was_told(
    said: bytes, wrong: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undisturbed, "ALONE_S", 0.0)

    async def test() -> None:
        answers, enough = 0, asyncio.Event()

        async def answer(head: str, writer: asyncio.StreamWriter) -> None:
            nonlocal answers
            assert "Authorization: Bearer key" in head
            answers += 1
            is_alone = not enough.is_set() and answers <= alone
            writer.write(stream(TEXT) if is_alone else said)
            if answers > alone + 1:
                enough.set()
            if not said.endswith((b"0\r\n\r\n", b"full", b"{}")) and not is_alone:
                writer.close()

        async with serving(answer) as port:
            client = Witness(port, "key", None)
            alone = 1 << 30
            await client.learn()
            assert not client.noticed.wrong
            assert not client.noticed.refused
            alone = answers
            await client.during(enough.wait())
            assert (client.noticed.wrong[:1] or [""])[0] == wrong
            assert refused in (client.noticed.refused or [""])[0]
            assert bool(client.noticed.refused) == bool(refused)

    in_loop(test)


def test_what_it_still_waits_for_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(undisturbed, "ALONE_S", 0.0)

    async def test() -> None:
        held, alone = asyncio.Event(), True

        async def answer(head: str, writer: asyncio.StreamWriter) -> None:
            if alone:
                writer.write(stream(TEXT))
            else:
                writer.write(stream(TEXT[:1], ends=False))
                held.set()

        async with serving(answer) as port:
            client = Witness(port, "key", None)
            await client.learn()
            alone = False
            waited_s = 0.0

            async def a_while() -> None:
                nonlocal waited_s
                await held.wait()
                while client.noticed.longest_first_s == 0.0:
                    await asyncio.sleep(0)
                began_s = time.monotonic()
                await asyncio.sleep(0.05)
                waited_s = time.monotonic() - began_s

            await client.during(a_while())
            assert client.noticed.answers == 0
            assert client.noticed.longest_gap_s >= waited_s

    in_loop(test)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("longest_gap_s", SILENT_S),
        ("longest_first_s", PLACE_S),
        ("slowest_health_s", SILENT_S),
        ("slowest_new_s", SILENT_S),
    ],
)
def test_long_waits_are_failures_and_shorter_ones_figures(name: str, most: float) -> None:
    noticed = Noticed()
    setattr(noticed, name, most)
    assert noticed_problems(noticed) == []
    setattr(noticed, name, most + 0.1)
    [problem] = noticed_problems(noticed)
    assert problem.startswith(f"the undisturbed client waited {most:g}.1 s for ")


# --- tries ------------------------------------------------------------------------------------------------------------


def test_a_try_can_be_made_again_alone() -> None:
    async def test() -> None:
        drawn: list[float] = []

        async def attempt(rng: random.Random) -> None:
            drawn.append(rng.random())
            raise AttackError("it fell over")

        found = Tries("bodies", 7)
        await found.run(attempt, at_once=1, until_s=time.monotonic() + WAIT_S, patience_s=WAIT_S, overrun_s=WAIT_S)
        # Enough is enough.
        assert 1 < found.count < 100
        assert found.failures[3] == Failure("bodies", 7, 3, "it fell over")
        assert found.failures[3].again == "python -m benchmarks attack --kind bodies --seed 7 --try 3"
        first = list(drawn)
        again = Tries("bodies", 7, only=3)
        await again.run(attempt, at_once=1, until_s=time.monotonic(), patience_s=WAIT_S, overrun_s=WAIT_S)
        assert drawn[len(first) :] == [first[3]]
        assert len(set(first)) == len(first)

    in_loop(test)


def test_tries_that_hang_are_given_up() -> None:
    async def test() -> None:
        ended: list[bool] = []

        async def attempt(rng: random.Random) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        cut = Tries("bodies", 0)
        await cut.run(attempt, at_once=3, until_s=time.monotonic(), patience_s=WAIT_S, overrun_s=0.0)
        assert (cut.count, len(ended)) == (0, 3)
        assert [failure.what for failure in cut.failures] == [
            "no try had come to its end 0 s after the time for all of them"
        ]
        slow = Tries("bodies", 0)
        await slow.run(attempt, at_once=1, until_s=time.monotonic(), patience_s=0.0, overrun_s=WAIT_S)
        assert [failure.what for failure in slow.failures] == ["no answer after 0 s"]

    in_loop(test)


@pytest.mark.parametrize(
    "said", [BROKEN, b'HTTP/1.1 200 OK\r\nContent-Length: 23\r\n\r\n{"type":"server_error"}'], ids=["500", "in words"]
)
def test_an_error_of_the_servers_own_fails_a_try(said: bytes) -> None:
    async def test() -> None:
        async def answer(head: str, writer: asyncio.StreamWriter) -> None:
            writer.write(said)

        async with serving(answer) as port:
            with pytest.raises(AttackError, match=r"server_error|500"):
                await Target(port, {}).post("/completion", {"prompt": "a"})

    in_loop(test)


def test_two_answers_to_one_request_of_two_ends_fail_a_try() -> None:
    async def test() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1 << 16)
            writer.write(HEALTHY * 2)

        async with listening(serve) as port:
            target = Target(port, {"Authorization": "Bearer key"})
            found = Tries("smuggling", 0)

            async def attempt(rng: random.Random) -> None:
                await smuggling(target, rng)

            await found.run(attempt, at_once=1, until_s=time.monotonic() + WAIT_S, patience_s=WAIT_S, overrun_s=WAIT_S)
            assert "was answered by [200, 200]" in found.failures[0].what
            # What is sound has two answers by right.
            assert found.count > len(found.failures)

    in_loop(test)


def test_a_third_of_the_bodies_are_answered() -> None:
    """What is refused at the first look tries nothing behind it."""
    rng, statuses = (
        random.Random(5),
        {kind: Counter[int]() for kind in ("completion", "chat", "responses", "anthropic")},
    )
    with hosted(scripted) as server, httpx.Client(base_url=server.url, timeout=WAIT_S) as client:
        while any(found.total() < 30 for found in statuses.values()):
            route, body = Bodies(rng).next()
            found = statuses.get(ROUTES[route])
            if found is not None and found.total() < 30 and not route.endswith(("tokens", "template")):
                found[client.post(route, content=body).status_code] += 1
    assert all(found[200] >= 10 for found in statuses.values()), statuses
    assert {*itertools.chain.from_iterable(statuses.values())} <= {200, 400, 413}


def test_bodies_follow_from_the_seed() -> None:
    assert [Bodies(random.Random(3)).next() for _ in range(2)] == [Bodies(random.Random(3)).next()] * 2


# --- files and commands -----------------------------------------------------------------------------------------------


def test_damage_is_small_and_follows_from_the_seed() -> None:
    sound = {"a": [1, 2, {"b": "text"}], "c": None, "d": {"e": 1.5}}
    found = {}
    for seed in range(1000):
        what, data = damage_json(sound, random.Random(seed))
        assert json.dumps(data) == json.dumps(damage_json(sound, random.Random(seed))[1])
        found[what.split(" is ")[0]] = data
    assert sound == {"a": [1, 2, {"b": "text"}], "c": None, "d": {"e": 1.5}}
    assert {"a/0", "a/2/b", "c", "d/e", "without a/1", "without d"} <= found.keys()
    assert found["without d"] == {"a": [1, 2, {"b": "text"}], "c": None}


WHOLE = Done(status=0, text="abc", said="", digest="d", written_bytes=10, seconds=1.0)


@pytest.mark.parametrize(
    ("done", "told"),
    [
        (Done(0, "abc", "a warning", "d", 10, 1.0), ""),
        (Done(1, "", "paceline: the disk is full", None, 5, 1.0), ""),
        (Done(1, "", "Traceback (most recent call last)", None, 5, 1.0), "ended by 1: Traceback"),
        (Done(-11, "", "", None, 5, 1.0), "ended by -11"),
        (Done(None, "", "", None, 5, 60.0), "had not ended"),
        (Done(0, "abd", "", "d", 10, 1.0), "with another result"),
        (Done(0, "abc", "", "e", 10, 1.0), "with another result"),
        (Done(1, "", "", None, 10, 1.0), "says nothing"),
    ],
    ids=["went on", "told", "traceback", "signal", "hang", "text", "file", "silence"],
)
def test_a_command_without_room_does_it_or_says_that_it_cannot(done: Done, told: str) -> None:
    if not told:
        check_ending("convert", done, WHOLE)
    else:
        with pytest.raises(AttackError, match=told):
            check_ending("convert", done, WHOLE)


def test_what_is_left_is_whole_or_not_there() -> None:
    check_left("convert", None, WHOLE)
    check_left("convert", "d", WHOLE)
    with pytest.raises(AttackError, match="not whole under its name"):
        check_left("convert", "half", WHOLE)
    check_again("convert", WHOLE, WHOLE)
    with pytest.raises(AttackError, match="another result"):
        check_again("convert", Done(0, "abc", "", None, 10, 1.0), WHOLE)
    with pytest.raises(AttackError, match="status 1, it is there"):
        check_again("convert", Done(1, "", "it is there", None, 10, 1.0), WHOLE)


class Script(Writing):
    """Python that writes, in the place of a command."""

    def command(self, out: Path, model: Path) -> list[str]:
        return [sys.executable, "-c", *(word.replace("OUT", str(out)) for word in self.words)]


def test_files_are_bounded_and_results_known(tmp_path: Path) -> None:
    writing = Script(("open('OUT/made', 'wb', buffering=0).write(b'a' * 3000); print('done')",), "made")
    done = run(writing, tmp_path, tmp_path, {})
    assert (done.status, done.written_bytes, done.said) == (0, 3000, "")
    again = run(writing, tmp_path, tmp_path, {})
    assert again.digest == done.digest is not None
    less = Script(("f = open('OUT/made', 'wb', buffering=0)\nwhile True: f.write(b'a' * 1000)",), "made")
    cut = run(less, tmp_path, tmp_path, {}, most_bytes=2000)
    assert (cut.status, cut.written_bytes) == (1, 2000)
    assert "File too large" in cut.said
    assert cut.digest not in (None, done.digest)


# --- the command ------------------------------------------------------------------------------------------------------


def test_failures_are_told_with_how_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [Failure("grammars", 4, number, f"status {number}") for number in range(10)]
    noticed = Noticed(answers=1, wrong=["x"], longest_gap_s=0.5)
    beside = Beside(Noticed(answers=3, longest_gap_s=0.02), noticed, 100 << 20, 110 << 20, 2 << 30, 77)
    rows = [Row("grammars", 30, 1.0, failures, beside), Row("kept", 5, 1.0)]

    async def campaign(kinds: Sequence[Tries], seconds: float, model: Path, *_: object) -> list[Row]:
        assert list(kinds) == [Tries("grammars", 4), Tries("kept", 4)]
        assert model.exists()
        return rows

    monkeypatch.setattr(command, "campaign", campaign)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    with pytest.raises(EngineError, match="10 failures in 35 tries"):
        command.attack("grammars, kept", seed=4, json_file=tmp_path / "figures.json")
    said = capsys.readouterr().out.splitlines()
    figures = "grammars 30 10 500 (20) 0 (0) other 0 (0) 0 (0) 100, 110, 2048 77"
    assert said[1].split() == figures.split(" ")
    assert said[2].split() == ["kept", "5", "0"]
    assert "python -m benchmarks attack --kind grammars --seed 4 --try 3: status 3" in said
    assert said[-1].startswith("... and 5 more of grammars")
    kept = json.loads((tmp_path / "figures.json").read_text())["attack"]
    assert kept["rows"][0]["failures"][9]["again"].endswith("--try 9")
    assert kept["rows"][0]["beside"]["noticed"]["wrong"] == ["x"]
    rows[:] = [Row("grammars", 30, 1.0, [], beside), Row("kept", 0, 0.0)]
    command.attack("grammars,kept", seed=4)
    assert capsys.readouterr().out.splitlines()[-1] == "no time was left for kept: give more (--seconds)"


@pytest.mark.parametrize(
    "options", [{"kinds": "grammar"}, {"kinds": ","}, {"seconds": 0.0}, {"only": 3}, {"kinds": "kept,queue", "only": 3}]
)
def test_what_cannot_be_done_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        command.attack(**options)
