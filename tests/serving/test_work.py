"""Work in threads: kinds apart, keys in turn, and nothing for clients that have left. Held by events, not by time."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from benchmarks.server_soak.wire import Answer, Connection, ask, request_bytes

from paceline.constraints import Source, compiler, llguidance_grammars
from paceline.core.vocabulary import Vocabulary
from paceline.serving.json_bodies import read_json
from paceline.serving.response_formats.base import list_probabilities
from paceline.serving.security import ApiKeys, SecuritySettings, set_namespace
from paceline.serving.work import Kind, Share, Work, choose_reading_kind
from tests.serving.live import Live, live
from tests.timing import WAIT_S

MANY = 30


def share_of(work: Work, key: str) -> Share:
    scope: dict[str, Any] = {"type": "http"}
    set_namespace(scope, key)
    return work.share_for(scope)


class Held:
    """Work that is held until it is let go.

    Attributes:
        begun: names of what began, in order.
    """

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._let_go = threading.Semaphore(0)

    def __call__(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.begun.append(name)
            assert self._let_go.acquire(timeout=WAIT_S)
            return name

        return work

    def let_go(self, count: int = 1) -> None:
        self._let_go.release(count)

    async def until_begun(self, count: int) -> None:
        while len(self.begun) < count:
            await asyncio.sleep(0)
        # What else may begin has had its chance.
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(self.begun) == count


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind.value[1] > 1])
async def test_a_key_with_much_to_do_leaves_a_thread_to_others(kind: Kind) -> None:
    work, held = Work(), Held()
    slow = [asyncio.create_task(share_of(work, "a").offload(kind, held("a"))) for _ in range(MANY)]
    await held.until_begun(kind.value[1] - 1)
    assert await share_of(work, "b").offload(kind, lambda: "done") == "done"
    held.let_go(MANY)
    assert await asyncio.gather(*slow) == ["a"] * MANY
    work.close()


async def test_keys_have_a_piece_of_work_each_in_turn() -> None:
    work, held = Work(), Held()
    tasks = []
    for name in ("x", "y", "a1", "a2", "a3", "b1", "b2", "c1"):
        tasks.append(asyncio.create_task(share_of(work, name[0]).offload(Kind.COMPILING, held(name))))
        await asyncio.sleep(0)
    for count in range(2, len(tasks) + 1):
        await held.until_begun(count)
        held.let_go()
    held.let_go()
    await asyncio.gather(*tasks)
    assert held.begun == ["x", "y", "a1", "b1", "c1", "a2", "b2", "a3"]
    work.close()


async def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    work, held = Work(), Held()
    share = share_of(work, "a")
    first, *others = [asyncio.create_task(share.offload(Kind.COMPILING, held(name))) for name in "123"]
    await held.until_begun(1)
    others[0].cancel()
    await asyncio.gather(others[0], return_exceptions=True)
    # What was begun keeps its thread to its end though nobody waits for it.
    others.append(asyncio.create_task(share.offload(Kind.COMPILING, held("5"))))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await held.until_begun(1)
    held.let_go(3)
    assert await asyncio.gather(*others[1:]) == ["3", "5"]
    assert held.begun == ["1", "3", "5"]
    work.close()


@pytest.mark.parametrize("kind", Kind)
async def test_however_many_wait_none_is_refused(kind: Kind) -> None:
    """How many requests a key has under way is bounded before, and an answer that is written is there already."""

    work, held = Work(), Held()
    tasks = [asyncio.create_task(share_of(work, "a").offload(kind, held("a"))) for _ in range(1000)]
    held.let_go(1000)
    assert await asyncio.gather(*tasks) == ["a"] * 1000
    work.close()


async def test_an_error_is_that_of_the_work_and_frees_its_thread() -> None:
    work = Work()
    for _ in range(5):
        with pytest.raises(ZeroDivisionError):
            await share_of(work, "a").offload(Kind.COMPILING, lambda: 1 / 0)
    work.close()


async def test_few_items_take_no_thread() -> None:
    work, here = Work(), threading.get_ident()
    for num_items, elsewhere in ((500, False), (501, True), (None, True)):
        thread = await share_of(work, "a").offload(Kind.WRITING, threading.get_ident, num_items=num_items)
        assert (thread != here) == elsewhere
    work.close()


def test_long_texts_and_many_messages_are_read_apart_from_short_ones() -> None:
    assert choose_reading_kind(1 << 15, 64) is Kind.SHORT
    assert choose_reading_kind((1 << 15) + 1) is Kind.LONG
    assert choose_reading_kind(100, 65) is Kind.LONG


# Over HTTP


def keyed(path: str, body: dict[str, Any], key: str) -> bytes:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return request_bytes("POST", path, json.dumps(body).encode(), headers=headers)


async def plain(server: Live, key: str) -> Answer:
    return await ask(server.port, keyed("/completion", {"prompt": "abc", "n_predict": 2}, key))


TWO_KEYS = SecuritySettings(keys=ApiKeys(["a", "b"]))
SCHEMA = {"prompt": "abc", "n_predict": 2, "json_schema": {"type": "object"}}
LONG_TEXT = {"content": "a" * (1 << 16)}
LONG_ANSWER = {"prompt": "ABC", "n_predict": 400, "ignore_eos": True}


@pytest.mark.parametrize(("path", "body"), [("/completion", SCHEMA), ("/tokenize", LONG_TEXT)])
async def test_what_one_key_has_waiting_keeps_nobody_elses_completion(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither grammars that are compiled nor texts that are tokenized."""
    held = Held()

    async with live(security=TWO_KEYS) as server:
        vocabulary = server.model.target.vocabulary
        tokenize = vocabulary.tokenize

        def slow(text: str, **options: Any) -> list[int]:
            return tokenize(held("text")() and "a" if len(text) > 1000 else text, **options)

        def compile_slowly(source: object, **whose: str) -> None:
            held("grammar")()

        monkeypatch.setattr(vocabulary, "tokenize", slow)
        monkeypatch.setattr(server.model, "compile", compile_slowly)
        waiting = [await Connection.open(server.port) for _ in range(MANY)]
        for connection in waiting:
            await connection.send(keyed(path, body, "a"))
        while not held.begun:
            await asyncio.sleep(0)
        # Those that came are in the server before what is asked after them.
        for key in ("b", "a"):
            assert (await plain(server, key)).status == 200
        assert len(held.begun) < MANY
        held.let_go(MANY)
        for connection in waiting:
            assert (await connection.answer()).status == 200
            connection.close()
        assert len(held.begun) == MANY


async def test_who_left_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held()

    async with live(security=TWO_KEYS) as server:
        monkeypatch.setattr(server.model, "compile", lambda source, **whose: held("grammar")() and None)
        waiting = [await Connection.open(server.port) for _ in range(4)]
        for connection in waiting:
            await connection.send(keyed("/completion", SCHEMA, "a"))
        queue = server.server.work._queues[Kind.COMPILING]
        await server.until(lambda: sum(map(len, queue._waiting.values())) == 3)
        for connection in waiting[1:]:
            connection.close()
        await server.until(lambda: b'status="499"} 3.0' in server.server.metrics.render()[0])  # type: ignore[union-attr]
        held.let_go(4)
        assert (await waiting[0].answer()).status == 200
        waiting[0].close()
        assert (await plain(server, "a")).status == 200
        assert held.begun == ["grammar"]


async def test_what_one_key_compiled_no_other_key_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time of an answer would tell which schema somebody else sent."""
    compiled: list[str] = []
    build_grammar = llguidance_grammars.build_grammar

    def counted(source: Source, vocabulary: Vocabulary) -> str:
        compiled.append(source.text)
        return build_grammar(source, vocabulary)

    async with live(security=TWO_KEYS) as server:
        monkeypatch.setattr(compiler, "build_grammar", counted)
        for body in (SCHEMA, {**SCHEMA, "cache_salt": "s"}):
            for key in ("a", "b"):
                for _ in range(2):
                    assert (await ask(server.port, keyed("/completion", body, key))).status == 200
        assert len(compiled) == 4


@pytest.mark.parametrize(("size", "elsewhere"), [(100, False), (1 << 17, True)])
async def test_a_long_body_is_read_in_a_thread(size: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by: list[int] = []

    def noted(body: bytes) -> dict[str, Any]:
        read_by.append(threading.get_ident())
        return read_json(body)

    monkeypatch.setattr("paceline.serving.schema.read_json", noted)

    async with live() as server:
        answer = await server.post("/tokenize", {"content": "a" * size})
        assert len(answer.json()["tokens"]) == size
    assert [thread != threading.get_ident() for thread in read_by] == [elsewhere]


@pytest.mark.parametrize(("n_probs", "elsewhere"), [(3, False), (260, True)])
@pytest.mark.parametrize("stream", [False, True])
async def test_many_probabilities_are_written_in_a_thread(
    n_probs: int, elsewhere: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written_by: set[int] = set()
    for module in ("work", "server"):
        monkeypatch.setattr(f"paceline.serving.{module}.MAX_AT_ONCE", 200)

    def noted(*args: Any, **options: Any) -> list[dict[str, Any]]:
        written_by.add(threading.get_ident())
        return list_probabilities(*args, **options)

    monkeypatch.setattr("paceline.serving.response_formats.base.list_probabilities", noted)

    async with live() as server:
        body = {"prompt": "ABC", "n_predict": 3, "n_probs": n_probs, "temperature": 0, "stream": stream}
        answer = await server.post("/completion", body)
        assert answer.status == 200
        assert answer.body.count(b'"top_logprobs"') == 3
    assert written_by
    assert all((thread != threading.get_ident()) == elsewhere for thread in written_by)


async def test_all_answers_of_a_request_are_taken_in_one_round() -> None:
    async with live(max_sequences=8) as server:
        first = await server.send("/completion", {**LONG_ANSWER, "stream": True})
        await first.head()
        server.gate.close()
        await server.gate.arrived()
        second = await server.send("/completion", {**LONG_ANSWER, "stream": True, "n": 6})
        await server.until(lambda: len(server.server.board.answers) == 2)
        # By the time that another request is answered, all are asked for.
        await server.get("/health")
        server.gate.let_through()
        assert (await second.head()).status == 200
        server.gate.open()
        for connection in (first, second):
            connection.close()
