"""Simulated log files: real ones carry the names and addresses of real people and come without a licence.

Each file is a small simulation with a cast that recurs (hosts, users, request ids, modules), because recurring
lines are what makes logs easy to predict: web access logs, service logs in Python's usual format, syslog, structured
JSON lines, and the output of builds and test runs.
"""

import json
import random
import string
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

from training.sources import Document

NOUNS = """order invoice session account cart shipment token report image job batch index backup profile message queue
payment ticket device sensor cluster volume snapshot route lease policy""".split()
VERBS = "create update delete fetch list validate publish retry archive restore sync expire".split()
PEOPLE = "alice bob carol dave erin frank grace heidi ivan judy mallory niaj olivia peggy rupert sybil".split()
PLACES = "eu-west eu-north us-east us-west ap-south sa-east".split()
AGENTS = [
    "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0",
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 (KHTML, like Gecko) Version/17.4 "
    "Safari/605.1.15",
    "curl/8.5.0",
    "python-requests/2.32.3",
    "kube-probe/1.29",
]


class World:
    """The cast of one file, and its clock."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = datetime(2024, 1, 1) + timedelta(seconds=rng.randrange(70_000_000), milliseconds=rng.randrange(1000))
        self.pace_s = 10 ** rng.uniform(-2, 1)
        self.nouns = rng.sample(NOUNS, 4)
        self.users = rng.sample(PEOPLE, 3)
        self.addresses = [f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(1, 255)}" for _ in range(4)]
        self.host = f"{rng.choice(['web', 'api', 'db', 'worker', 'edge'])}-{rng.randrange(1, 40):02d}"
        self.place = rng.choice(PLACES)
        self.identities = ["".join(rng.choices("0123456789abcdef", k=8)) for _ in range(5)]

    def tick(self) -> datetime:
        self.now += timedelta(seconds=self.rng.expovariate(1 / self.pace_s))
        return self.now

    def milliseconds(self) -> int:
        return int(self.rng.lognormvariate(3, 1)) + 1

    def pick(self, values: list[str]) -> str:
        """Early values come more often, so that lines recur."""
        return values[min(int(self.rng.expovariate(1.2)), len(values) - 1)]


def access_log(world: World) -> Iterator[str]:
    rng = world.rng
    paths = [f"/api/v{rng.randrange(1, 4)}/{noun}s" for noun in world.nouns] + ["/healthz", "/static/app.js", "/"]
    rng.shuffle(paths)
    while True:
        path = world.pick(paths)
        if path.startswith("/api") and rng.random() < 0.5:
            path += f"/{rng.randrange(1, 400)}"
        method = rng.choice(["GET", "GET", "GET", "POST", "PUT"])
        status = rng.choices([200, 201, 304, 404, 500], [80, 6, 8, 4, 2])[0]
        when = world.tick().strftime("%d/%b/%Y:%H:%M:%S +0000")
        size = 0 if status == 304 else rng.choice([17, 512, 1043, rng.randrange(200, 40_000)])
        agent = world.pick(AGENTS)
        yield f'{world.pick(world.addresses)} - - [{when}] "{method} {path} HTTP/1.1" {status} {size} "-" "{agent}"'


def service_log(world: World) -> Iterator[str]:
    rng = world.rng
    loggers = [f"{rng.choice(['app', 'core', 'service'])}.{noun}" for noun in world.nouns]
    while True:
        logger, noun = rng.choice(list(zip(loggers, world.nouns, strict=True)))
        when = world.tick().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        verb, user, identity = rng.choice(VERBS), world.pick(world.users), world.pick(world.identities)
        number = rng.randrange(1000, 1400)
        level, message = rng.choices(
            [
                ("INFO", f"{verb} {noun} {number} for user {user} took {world.milliseconds()} ms"),
                ("INFO", f"request {identity} started: {verb} {noun}"),
                ("INFO", f"request {identity} finished: status=ok duration={world.milliseconds()}ms"),
                ("DEBUG", f"cache {rng.choice(['hit', 'miss'])} for key {noun}:{number}"),
                ("WARNING", f"{verb} {noun} {number} is slow: {1000 + world.milliseconds()} ms, limit 1000 ms"),
                (
                    "ERROR",
                    f"could not {verb} {noun} {number}: connection to {world.pick(world.addresses)}:5432 refused",
                ),
            ],
            [4, 3, 3, 4, 1, 0.6],
        )[0]
        yield f"{when} {level:<8} [{logger}] {message}"
        if level == "ERROR":
            line = rng.randrange(20, 400)
            yield "Traceback (most recent call last):"
            yield f'  File "/srv/app/{noun}.py", line {line}, in {verb}_{noun}'
            yield f"    return self.connection.execute(query, ({noun}_id,))"
            yield "ConnectionRefusedError: [Errno 111] Connection refused"


def syslog(world: World) -> Iterator[str]:
    rng = world.rng
    while True:
        user, address = world.pick(world.users), world.pick(world.addresses)
        process, message = rng.choice(
            [
                ("sshd", f"Accepted publickey for {user} from {address} port {rng.randrange(32768, 61000)} ssh2"),
                ("sshd", f"pam_unix(sshd:session): session opened for user {user} by (uid=0)"),
                ("sshd", f"Disconnected from user {user} {address} port {rng.randrange(32768, 61000)}"),
                ("CRON", f"({user}) CMD (/usr/local/bin/{rng.choice(VERBS)}-{world.pick(world.nouns)} --quiet)"),
                ("systemd", f"Started {world.pick(world.nouns)}.service - {world.pick(world.nouns).title()} service."),
                ("systemd", f"{world.pick(world.nouns)}.service: Deactivated successfully."),
                (
                    "kernel",
                    f"[{rng.uniform(1, 1e6):12.6f}] eth0: link up, {rng.choice([1000, 10000])} Mbps, full duplex",
                ),
                ("dhclient", f"DHCPREQUEST for {address} on eth0 to 255.255.255.255 port 67"),
            ]
        )
        number = "" if process == "kernel" else f"[{rng.choice([812, 1033, rng.randrange(400, 30_000)])}]"
        yield f"{world.tick().strftime('%b %d %H:%M:%S')} {world.host} {process}{number}: {message}"


def json_lines(world: World) -> Iterator[str]:
    rng = world.rng
    while True:
        noun = world.pick(world.nouns)
        event: dict[str, object] = {
            "timestamp": world.tick().strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "level": rng.choices(["info", "debug", "warning", "error"], [8, 4, 1, 0.5])[0],
            "service": f"{noun}-service",
            "host": world.host,
            "region": world.place,
            "event": f"{noun}.{rng.choice(VERBS)}",
            "request_id": world.pick(world.identities),
            "duration_ms": world.milliseconds(),
        }
        if rng.random() < 0.5:
            event["user"] = {"id": rng.randrange(1, 50), "name": world.pick(world.users)}
        yield json.dumps(event)


def build_log(world: World) -> Iterator[str]:
    rng = world.rng
    while True:
        name, total = world.pick(world.nouns), rng.randrange(12, 60)
        yield f"==> Building {name} {rng.randrange(5)}.{rng.randrange(20)}.{rng.randrange(9)}"
        for number in range(1, total + 1):
            source = f"{rng.choice(VERBS)}_{world.pick(world.nouns)}.c"
            yield f"[{number:>3}/{total}] Building C object src/CMakeFiles/{name}.dir/{source}.o"
            if rng.random() < 0.05:
                variable = "".join(rng.choices(string.ascii_lowercase, k=4))
                place = f"src/{source}:{rng.randrange(10, 900)}:{rng.randrange(4, 40)}"
                yield f"{place}: warning: unused variable '{variable}'"
        yield f"[{total}/{total}] Linking C executable bin/{name}"
        for test in rng.sample(VERBS, 6):
            outcome = rng.choices(["PASSED", "FAILED"], [15, 1])[0]
            yield f"tests/test_{name}.py::test_{test}_{name} {outcome} [{rng.randrange(1, 20) * 5:>3}%]"
        yield f"============ {rng.randrange(5, 7)} passed in {rng.uniform(0.1, 9):.2f}s ============"


KINDS: dict[str, Callable[[World], Iterator[str]]] = {
    "access": access_log,
    "service": service_log,
    "syslog": syslog,
    "jsonl": json_lines,
    "build": build_log,
}


def documents(seed: int, total_bytes: float) -> Iterator[Document]:
    """Whole files of 2 to 8 kB, the kinds in turn, until `total_bytes` are there."""
    number = 0
    while total_bytes > 0:
        kind = list(KINDS)[number % len(KINDS)]
        rng = random.Random(f"{seed}/{kind}/{number}")
        size, lines = rng.randrange(2_000, 8_000), []
        for line in KINDS[kind](World(rng)):
            lines.append(line)
            size -= len(line) + 1
            if size <= 0:
                break
        text = "\n".join(lines) + "\n"
        total_bytes -= len(text)
        yield Document("logs", "simulated", f"simulated/{kind}-{number:05d}.log", text)
        number += 1
