"""A lap of load: what clients ask at once of a server, and what they read, with the measures that tables are made of.

Clients are a process of their own, ``python -m benchmarks.load.laps``, which is to take little of the cores that the
server computes on: what events say is read once all answers are there. Times are a reader's, whatever the server says
of itself.
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
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from benchmarks.load.asking import LLAMA, Reply, ask, client, percentiles
from benchmarks.server import HOST
from paceline.core.errors import EngineError


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


def load(port: int, clients: Sequence[Sequence[dict[str, Any]]], run_in: dict[str, Any]) -> Load:
    """Have clients ask a server on this machine for completions.

    Args:
        port: of the server.
        clients: bodies of the requests of each, which it sends in this order, each after the answer to the one before.
        run_in: a request that is answered before, and not counted.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load.laps"],
        input=json.dumps({"port": port, "clients": clients, "run_in": run_in}).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    if "error" in found:
        raise EngineError(found["error"])
    replies = [[Reply(**reply) for reply in of_client] for of_client in found["replies"]]
    return Load(replies, found["wall_s"], found["cpu_s"])


async def _ask_all(web: httpx.AsyncClient, url: str, plans: Sequence[Sequence[dict[str, Any]]]) -> Load:
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    raw = await asyncio.gather(*(_ask_in_turn(web, url, bodies) for bodies in plans))
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    # Now that there is time.
    for reply, said in itertools.chain.from_iterable(raw):
        LLAMA.read(reply, said)
        if reply.errors:
            raise ValueError(reply.errors[0])
    return Load([[reply for reply, _ in of_client] for of_client in raw], wall_s, cpu_s)


async def _ask_in_turn(web: httpx.AsyncClient, url: str, bodies: Sequence[dict[str, Any]]) -> list[tuple[Reply, bytes]]:
    """Return when the events of each answer came, and all that was said."""
    found = []
    for body in bodies:
        reply = Reply()
        said = await ask(web, url, body, reply)
        if not reply.begun:
            LLAMA.read(reply, said)
            raise ValueError(reply.errors[0])
        found.append((reply, said))
    return found


async def _main(plan: dict[str, Any]) -> dict[str, Any]:
    gc.disable()
    url = f"http://{HOST}:{plan['port']}{LLAMA.path}"
    async with client() as web:
        try:
            # What this process did to start is over for the server, too, once it has answered.
            await _ask_all(web, url, [[plan["run_in"]]])
            return asdict(await _ask_all(web, url, plan["clients"]))
        except ValueError as error:
            return {"error": f"the server did not answer a request: {error}"}


if __name__ == "__main__":
    json.dump(asyncio.run(_main(json.load(sys.stdin))), sys.stdout)
