"""A lap of load: what clients ask at once of a server, and what they read, with the measures that tables are made of.

Clients are a process of their own, ``python -m benchmarks.load``, which is to take little of the cores that the server
computes on: while anything is read nothing is parsed. They note when bytes came, and how many events began in them;
what events say is read once all answers are there. Times are a reader's, whatever the server says of itself.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import httpx

from benchmarks.server import HOST
from paceline.core.errors import EngineError
from paceline.core.stats import percentile

PERCENTILES: Final = (0.5, 0.95, 0.99)
_EVENT: Final = b"\ndata: "
"""Begins an event. Inside of JSON there is no line's end."""
_LONGEST_SHOWN: Final = 500
_SILENT_S: Final = 600.0


@dataclass(slots=True)
class Reply:
    """What a client read.

    Attributes:
        sent_s: when the request was sent; all times are of one clock.
        arrivals: when tokens came, and how many of them at once.
        text: the answer.
        last: the last event.
    """

    sent_s: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    text: str = ""
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of the answer, as the server counts them."""
        return int(self.last["tokens_predicted"])

    @property
    def first_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s

    @property
    def stream_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between arrivals: what comes at once has no gap inside."""
        return [later - earlier for (earlier, _), (later, _) in itertools.pairwise(self.arrivals)]


@dataclass(frozen=True, slots=True)
class Load:
    """What all clients read: replies of each client, in turn.

    ``wall_s`` is from the first request to the last token; ``cpu_s`` is how long clients kept a core busy meanwhile.
    """

    replies: list[list[Reply]]
    wall_s: float
    cpu_s: float

    @property
    def all_replies(self) -> list[Reply]:
        return [reply for of_client in self.replies for reply in of_client]

    @property
    def decode_per_second(self) -> float:
        """Tokens a second that all streams together gain while they are written, the first of each not counted."""
        replies = self.all_replies
        tokens, seconds = sum(reply.tokens - 1 for reply in replies), sum(reply.stream_s for reply in replies)
        return len(self.replies) * tokens / seconds

    @property
    def whole_per_second(self) -> float:
        """Tokens of answers a second, with the time that prompts took, and the end in which fewer clients are left."""
        return sum(reply.tokens for reply in self.all_replies) / self.wall_s

    @property
    def texts(self) -> list[str]:
        return [reply.text for reply in self.all_replies]

    @property
    def off_shares(self) -> dict[str, float]:
        """Shares of the rounds of all answers that verified no draft of the answer, by the server's reasons."""
        rounds, off = 0, Counter[str]()
        for reply in self.all_replies:
            speculative = reply.last.get("speculative", {})
            rounds += speculative.get("rounds", 0)
            off.update(speculative.get("off_rounds", {}))
        return {reason: count / rounds for reason, count in off.most_common()}

    def figures(self) -> dict[str, Any]:
        return {
            "decode_per_second": self.decode_per_second,
            "whole_per_second": self.whole_per_second,
            "wall_s": self.wall_s,
            "clients_cpu_share": self.cpu_s / self.wall_s,
            "first_token_s": percentiles([reply.first_s for reply in self.all_replies]),
            "gap_s": percentiles([gap for reply in self.all_replies for gap in reply.gaps_s]),
            "off_shares": self.off_shares,
        }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the middle of values and what few of them exceed, by names such as ``p95``."""
    return {f"p{100 * share:.0f}": percentile(values, share) for share in PERCENTILES}


def load(port: int, clients: Sequence[Sequence[dict[str, Any]]], run_in: dict[str, Any]) -> Load:
    """Have clients ask a server on this machine for completions.

    Args:
        port: of the server.
        clients: bodies of the requests of each, which it sends in this order, each after the answer to the one before.
        run_in: a request that is answered before, and not counted.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load"],
        input=json.dumps({"port": port, "clients": clients, "run_in": run_in}).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    if "error" in found:
        raise EngineError(found["error"])
    replies = [[Reply(**reply) for reply in of_client] for of_client in found["replies"]]
    return Load(replies, found["wall_s"], found["cpu_s"])


async def _ask_all(web: httpx.AsyncClient, plans: Sequence[Sequence[dict[str, Any]]]) -> Load:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    raw = await asyncio.gather(*(_ask_in_turn(web, bodies) for bodies in plans))
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return Load([[_read(*each) for each in of_client] for of_client in raw], wall_s, cpu_s)


async def _ask_in_turn(web: httpx.AsyncClient, bodies: Sequence[dict[str, Any]]) -> list[tuple[Reply, bytes]]:
    """Return when the events of each answer came, and all that was said."""
    found = []
    for body in bodies:
        reply, said, tail = Reply(time.perf_counter()), list[bytes](), b"\n"
        async with web.stream("POST", "/completion", json=body) as response:
            async for data in response.aiter_raw():
                now_s = time.perf_counter()
                said.append(data)
                seen = tail + data
                if count := seen.count(_EVENT):
                    reply.arrivals.append((now_s, count))
                tail = seen[1 - len(_EVENT) :]
        if not response.is_success:
            raise ValueError(b"".join(said).decode("utf-8", "replace")[-_LONGEST_SHOWN:])
        found.append((reply, b"".join(said)))
    return found


def _read(reply: Reply, said: bytes) -> Reply:
    """Return a reply with what its events say, now that there is time."""
    events = [json.loads(line.removeprefix(b"data: ")) for line in said.split(b"\n") if line.startswith(b"data: ")]
    if not events or not events[-1].get("stop"):
        raise ValueError(said.decode("utf-8", "replace")[-_LONGEST_SHOWN:])
    # The last event brings no token.
    at_s, count = reply.arrivals.pop()
    if count > 1:
        reply.arrivals.append((at_s, count - 1))
    reply.text, reply.last = "".join(event["content"] for event in events), events[-1]
    return reply


async def _main(plan: dict[str, Any]) -> dict[str, Any]:
    gc.disable()
    # llama-server closes a connection after a stream, so each request has one of its own on either side.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    url = f"http://{HOST}:{plan['port']}"
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=_SILENT_S, trust_env=False) as web:
        try:
            # What this process did to start is over for the server, too, once it has answered.
            await _ask_all(web, [[plan["run_in"]]])
            return asdict(await _ask_all(web, plan["clients"]))
        except (httpx.HTTPError, ValueError) as error:
            return {"error": f"the server did not answer a request: {error or type(error).__name__}"}


if __name__ == "__main__":
    json.dump(asyncio.run(_main(json.load(sys.stdin))), sys.stdout)
