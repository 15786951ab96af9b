"""A lap of load: what clients ask at once of a server, and what they read, with the measures that tables are made of.

Times are a reader's: from when bytes could be read, whatever the server says of itself.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import EngineError
from paceline.core.stats import percentile


@dataclass(frozen=True, slots=True)
class Reply:
    """What a client read.

    Attributes:
        sent_s: when the request was sent; all times are of one clock.
        arrivals: when tokens came, and how many of them at once.
        text: the answer.
        last: the last event.
    """

    sent_s: float
    arrivals: list[tuple[float, int]]
    text: str
    last: dict[str, Any]

    @property
    def tokens(self) -> int:
        """Tokens of the answer, as the server counts them."""
        return int(self.last["tokens_predicted"])

    @property
    def first_s(self) -> float:
        """Seconds until the first token."""
        return self.arrivals[0][0] - self.sent_s

    @property
    def stream_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between arrivals: what comes at once has no gap inside."""
        times = [at for at, _ in self.arrivals]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


@dataclass(frozen=True, slots=True)
class Load:
    """What all clients read.

    Attributes:
        replies: of each client, in turn.
        wall_s: seconds from the first request to the last token.
        cpu_s: seconds that the clients kept a core busy for meanwhile.
    """

    replies: list[list[Reply]]
    wall_s: float
    cpu_s: float

    @property
    def all_replies(self) -> list[Reply]:
        """Those of all clients."""
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
        """The answers."""
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
        """Return the measures, for JSON."""
        return {
            "decode_per_second": self.decode_per_second,
            "whole_per_second": self.whole_per_second,
            "wall_s": self.wall_s,
            "clients_cpu_share": self.cpu_s / self.wall_s,
            "first_token_s": percentiles([reply.first_s for reply in self.all_replies]),
            "gap_s": percentiles([gap for reply in self.all_replies for gap in reply.gaps_s]),
            "off_shares": self.off_shares,
        }


PERCENTILES: Final = (0.5, 0.95, 0.99)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return the middle of values and what few of them exceed, by names such as ``p95``."""
    return {f"p{100 * share:.0f}": percentile(values, share) for share in PERCENTILES}


def load(port: int, clients: Sequence[Sequence[dict[str, Any]]], run_in: dict[str, Any]) -> Load:
    """Have clients ask a server on this machine for completions.

    Args:
        port: of the server.
        clients: bodies of the requests of each, which it sends in this order, each after the answer to the one before.
        run_in: a request that is answered before, and not counted.

    Raises:
        EngineError: the server refused a request, or ended an answer by an error.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load_clients"],
        input=json.dumps({"port": port, "clients": clients, "run_in": run_in}).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    found = json.loads(done.stdout)
    if "error" in found:
        raise EngineError(found["error"])
    replies = [[Reply(**reply) for reply in of_client] for of_client in found["replies"]]
    return Load(replies, found["wall_s"], found["cpu_s"])
