"""Nothing that one client sends, or is sent, keeps the event loop from others: for 50 ms at most, 100 beside others."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import pytest
from benchmarks.server_soak.wire import Answer, ask, post_bytes, request_bytes

from paceline.serving.deployment import _SWITCH_S
from tests.serving.live import Live, live
from tests.tiers import some_long
from tests.timing import LoopWatch

MAX_BLOCKED_S: Final = 0.1
"""Other tests share cores and caches, which makes the same work take up to twice as long."""
_TRIES: Final = 6
_BYTES: Final = 6 << 20


@pytest.fixture(autouse=True)
def as_served() -> Iterator[None]:
    """Have threads take turns as they do in the command's process, and nobody collect what other tests left."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    sys.setswitchinterval(before)


async def answered(server: Live, name: str, request: bytes, status: int) -> Answer:
    """Return the answer to a request, in none of whose tries the event loop was let wait."""
    blocked = []
    for _ in range(_TRIES):
        with LoopWatch.of(asyncio.get_running_loop()) as watch:
            answer = await ask(server.port, request)
            # What came of it is freed, too.
            await asyncio.sleep(0.01)
        blocked.append(watch.blocked_s)
        if watch.blocked_s <= MAX_BLOCKED_S:
            assert answer.status == status, answer.body[:1000]
            return answer
    raise AssertionError(f"{name}: the event loop was kept waiting for {min(blocked):.3f} s")


def filled(begin: bytes, unit: bytes, end: bytes, most: int = sys.maxsize) -> bytes:
    return begin + unit * min(_BYTES // len(unit), most) + end


BODIES: Final[dict[str, tuple[str, int, bytes]]] = {
    "lists": ("/tokenize", 400, filled(b'{"content":[', b"[],", b"[]]}")),
    "lists in number": ("/tokenize", 200, filled(b'{"a":[', b"[],", b"[]]}", 269_000)),
    "objects": ("/tokenize", 400, filled(b'{"a":[', b'{"a":{}},', b"1]}")),
    "numbers": ("/tokenize", 400, filled(b'{"content":[', b"12,", b"1]}")),
    "numbers in number": ("/tokenize", 200, filled(b'{"content":[', b"12,", b"1]}", 900_000)),
    "texts": ("/tokenize", 400, filled(b'{"content":[', b'"",', b"1]}")),
    "names": ("/tokenize", 400, b"{" + b",".join(b'"%d":1' % number for number in range(450_000)) + b"}"),
    "levels": ("/tokenize", 400, filled(b'{"a":[', b"[" * 100 + b"]" * 100 + b",", b"1]}")),
    "too many levels": ("/tokenize", 400, filled(b'{"a":', b"[", b"")),
    "escapes": ("/tokenize", 200, filled(b'{"add":"', b"\\n", b'"}')),
    "quotes": ("/tokenize", 200, filled(b'{"add":"', b'\\"', b'"}')),
    "pairs": ("/tokenize", 200, filled(b'{"add":"', b"\\ud83d\\ude00", b'"}')),
    "blanks": ("/tokenize", 400, filled(b'{"a":', b" ", b"1}")),
    "digits": ("/tokenize", 400, filled(b'{"a":', b"1", b"}")),
    "no end": ("/tokenize", 400, filled(b'{"a":"', b"ab\\n", b"")),
    "no UTF-8": ("/tokenize", 400, filled(b'{"a":"', "a😀".encode(), b'\xff"}')),
    "messages": ("/v1/chat/completions", 400, filled(b'{"messages":[', b'{"role":"user"},', b"{}]}", 200_000)),
    "no messages": ("/v1/chat/completions", 400, filled(b'{"messages":[', b"1,", b"{}]}", 900_000)),
    "tools": (
        "/v1/chat/completions",
        400,
        filled(b'{"messages":[],"tools":[', b'{"type":"function","function":{"name":"f"}},', b"{}]}", 100_000),
    ),
    "settings": (
        "/v1/chat/completions",
        400,
        b'{"messages":[],"chat_template_kwargs":{' + b",".join(b'"%d":1' % i for i in range(400_000)) + b"}}",
    ),
    "biases": (
        "/completion",
        400,
        b'{"prompt":"a","logit_bias":[' + b",".join(b"[%d,1]" % (i + 1000) for i in range(260_000)) + b"]}",
    ),
}


FEW: Final = ("lists", "numbers in number", "names", "escapes", "no end", "messages", "settings", "biases")
"""One of each kind of work: the others are of a kind with these."""


@pytest.mark.parametrize("names", [FEW, pytest.param([*BODIES.keys() - {*FEW}], marks=pytest.mark.long)])
async def test_no_body_holds_up_others(names: Sequence[str]) -> None:
    async with live() as server:
        for name in names:
            path, status, body = BODIES[name]
            await answered(server, name, request_bytes("POST", path, body), status)


LISTED: Final[dict[str, tuple[str, dict[str, object]]]] = {
    "native": ("/completion", {"n_probs": 250}),
    "completions": ("/v1/completions", {"logprobs": 250}),
    "in a stream": ("/v1/completions", {"logprobs": 250, "stream": True}),
}


@pytest.mark.parametrize("name", some_long(LISTED, quick=["native", "in a stream"]))
async def test_no_answer_holds_up_others(name: str) -> None:
    path, fields = LISTED[name]
    body = {"prompt": "abc", "max_tokens": 400, "n": 2, "ignore_eos": True, "seed": 1, **fields}

    async with live() as server:
        answer = await answered(server, name, post_bytes(path, body), 200)
        assert answer.body.count(b'"id":') >= 2 * 400 * 250
