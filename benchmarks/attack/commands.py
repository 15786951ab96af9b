"""What paceline writes, command by command: ended anywhere, out of room anywhere, or with nowhere to say so.

Afterwards nothing half-written may be taken for whole: the same command, run again, has the very result that it has
where nothing happens. A program of its own runs a command on a small disk, for which it needs a name space of mounts
that is its own; where the system gives it none, files are bounded in size instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.models.hub_server import Hub, Repo, running_hub

from benchmarks.attack.tries import AttackError, Attempt
from paceline.conversion.convert import gguf_to_folder
from paceline.models.embedded import embedded_draft
from paceline.models.registry import CACHE_VARIABLE

_LONGEST_S: Final = 60.0
"""Longest that one of these commands may take."""

_OUT, _MODEL = "OUT", "MODEL"
_INFLATE: Final = ("inflate", "draft", "--width", "256", "--feed-forward", "512", "--heads", "4", "--layers", "6")
_RUN: Final = ("run", "-p", "def add(a, b):", "--temp", "0", "-c", "256")


@dataclass(frozen=True, slots=True)
class Writing:
    """A command that writes.

    Attributes:
        words: of the command line; ``OUT`` is the folder that it writes to, which also has the caches, and ``MODEL`` a
            model in F32, in which no wider pass turns a near-tie.
        makes: what of that folder is its result; the rest is kept for later, and may be different each time.
    """

    words: Sequence[str]
    makes: str | None = None

    def command(self, out: Path, model: Path) -> list[str]:
        words = [str(model) if word == _MODEL else word.replace(_OUT, str(out)) for word in self.words]
        return [sys.executable, "-m", "paceline", *words]


WRITING: Final[Mapping[str, Writing]] = {
    "convert": Writing(("convert", "target", "OUT/model", "--force"), "model"),
    "convert back": Writing(("convert", "OUT/../sound", "OUT/model.gguf", "--type", "Q8_0", "--force"), "model.gguf"),
    "inflate": Writing((*_INFLATE, "--type", "Q8_0", "-o", "OUT/big.gguf", "--force"), "big.gguf"),
    "prune": Writing(("prune", "target", "OUT/small.gguf", "--vocab", "1k", "--no-measure", "--force"), "small.gguf"),
    "-md self": Writing((*_RUN, "-n", "8", "-m", _MODEL, "-md", "self", "--draft-max", "3")),
    "download": Writing((*_RUN, "-n", "8", "-hf", "user/tiny", "--no-speculation")),
    "learned": Writing((*_RUN, "-n", "200", "-m", _MODEL)),
}
"""By what is written."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command did."""

    status: int | None
    text: str
    said: str
    digest: str | None
    written_bytes: int
    seconds: float


@dataclass(slots=True)
class Workplace:
    """Where commands run."""

    folder: Path
    model: Path
    variables: dict[str, str] = field(default_factory=dict)
    whole: dict[str, Done] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def clear(self) -> None:
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)

    async def undisturbed(self, name: str) -> Done:
        """Return what a command does where nothing happens."""
        if name not in self.whole:
            self.clear()
            done = await self.run(name)
            if done.status != 0:
                raise AttackError(f"{name} failed with nothing done to it: {done.said[-300:]}")
            self.whole[name] = done
        return self.whole[name]

    async def run(self, name: str, *, stderr: str | None = None) -> Done:
        return await asyncio.to_thread(run, WRITING[name], self.out, self.model, self.variables, stderr=stderr)


def check_again(name: str, again: Done, whole: Done) -> None:
    """Check what a command did after something happened to it."""
    if again.status != 0:
        raise AttackError(f"{name}: status {again.status}, {again.said[-500:]}")
    if (again.text, again.digest) != (whole.text, whole.digest):
        raise AttackError(f"{name} gave another result: {again.text[:100]!r} in place of {whole.text[:100]!r}")


def check_left(name: str, digest: str | None, whole: Done) -> None:
    """Check what a command that did not come to its end has left: nothing, or all."""
    if digest not in (None, whole.digest):
        raise AttackError(f"{name} left something that is not whole under its name")


@asynccontextmanager
async def workplace(model: Path, folder: Path) -> AsyncIterator[Workplace]:
    """Yield a place to run commands in, with a hub to download from."""
    gguf_to_folder(embedded_draft(), folder / "sound")
    hub: Hub
    with running_hub(tiny=Repo({"tiny.gguf": embedded_draft().read_bytes()})) as hub:
        out = folder / "out"
        variables = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(out / "hub"),
            "HF_HUB_DISABLE_XET": "1",
            CACHE_VARIABLE: str(out / "cache" / "models"),
        }
        yield Workplace(folder, model, variables)


Attack = Callable[[Workplace, str, Done, Random], Awaitable[None]]
"""What is done to a command, by its name and what it does where nothing happens."""


def on_a_command(attack: Attack) -> Callable[[Path, Path], AbstractAsyncContextManager[Attempt]]:
    """Return what makes tries of an attack, each on a command that is drawn."""

    @asynccontextmanager
    async def make(model: Path, folder: Path) -> AsyncIterator[Attempt]:
        async with workplace(model, folder) as place:

            async def attempt(rng: Random) -> None:
                name = rng.choice(list(WRITING))
                whole = await place.undisturbed(name)
                place.clear()
                await attack(place, name, whole, rng)

            yield attempt

    return make


async def killed(place: Workplace, name: str, whole: Done, rng: Random) -> None:
    """Kill a command at any moment, and run it again."""
    process = subprocess.Popen(
        WRITING[name].command(place.out, place.model), env={**os.environ, **place.variables},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        # Half of them while something is being written, which takes a small part of the time.
        if rng.random() < 0.5:
            await asyncio.sleep(whole.seconds * rng.uniform(0.3, 1.0))
        else:
            await _changed(place.out, rng.randint(1, 20), process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait()
    check_left(name, digest_of(WRITING[name], place.out), whole)
    check_again(f"{name} again", await place.run(name), whole)


async def _changed(folder: Path, times: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until what a folder has was seen to change so many times, or the process has ended."""
    seen = _listing(folder)
    ends_s = time.monotonic() + _LONGEST_S
    while times and process.poll() is None and time.monotonic() < ends_s:
        await asyncio.sleep(0.001)
        now = _listing(folder)
        times -= now != seen
        seen = now


def _listing(folder: Path) -> dict[str, int]:
    found = {}
    for at, names, files in os.walk(folder):
        for name in (*names, *files):
            with contextlib.suppress(OSError):
                found[f"{at}/{name}"] = os.lstat(f"{at}/{name}").st_size
    return found


async def full_disk(place: Workplace, name: str, whole: Done, rng: Random) -> None:
    """Let the disk be full somewhere within a command, and run it again once there is room."""
    room, is_own = max(4096, int(whole.written_bytes * rng.uniform(0.0, 1.0))), has_own_mounts()
    facts = {"name": name, "out": str(place.out), "model": str(place.model), "room": room, "mounts": is_own}
    words = [sys.executable, "-m", "benchmarks.attack.commands", json.dumps(facts)]
    process = await asyncio.create_subprocess_exec(
        *(("unshare", "-rm", *words) if is_own else words),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **place.variables}, start_new_session=True,
    )  # fmt: skip
    try:
        answer, said = await process.communicate()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, 9)
    if process.returncode:
        raise AttackError(f"{name} with {room} bytes: {said.decode()[-500:]}")
    first, again = (Done(**done) for done in json.loads(answer))
    try:
        check_ending(name, first, whole)
        check_left(name, first.digest, whole)
        check_again(f"{name} again", again, whole)
    except AttackError as error:
        how = "a disk of" if is_own else "files of at most"
        raise AttackError(f"{how} {room} bytes: {error}") from None


def check_ending(name: str, done: Done, whole: Done) -> None:
    """Check that a command that had no room has either done what it does, or said in a line that it cannot."""
    if done.status is None:
        raise AttackError(f"{name} had not ended after {_LONGEST_S:g} s")
    if "Traceback" in done.said or done.status < 0:
        raise AttackError(f"{name} ended by {done.status}: {done.said[-1000:]}")
    if done.status == 0 and (done.text, done.digest) != (whole.text, whole.digest):
        raise AttackError(f"{name} says that it went well, with another result: {done.said[-300:]}")
    if done.status and not done.said.strip():
        raise AttackError(f"{name} ended by {done.status}, and says nothing")


async def full_stderr(place: Workplace, name: str, whole: Done, rng: Random) -> None:
    """Run a command that can write nothing to its standard error."""
    check_again(f"{name} with a full standard error", await place.run(name, stderr="/dev/full"), whole)


def run(
    writing: Writing,
    out: Path,
    model: Path,
    variables: Mapping[str, str],
    *,
    most_bytes: int | None = None,
    stderr: str | None = None,
) -> Done:
    def bound() -> None:
        if most_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        to = subprocess.PIPE if stderr is None else stack.enter_context(open(stderr, "wb"))  # noqa: PTH123
        try:
            done = subprocess.run(
                writing.command(out, model), env={**os.environ, **variables}, timeout=_LONGEST_S, check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=to, preexec_fn=bound,
            )  # fmt: skip
            status, text, said = done.returncode, done.stdout, done.stderr or b""
        except subprocess.TimeoutExpired as late:
            status, text, said = None, late.stdout or b"", late.stderr or b""
    took_s = time.monotonic() - began_s
    written = sum(_listing(out).values())
    # Where something was written has its own name in each try.
    shown = "" if writing.makes is not None else text.decode(errors="replace")
    return Done(status, shown, said.decode(errors="replace"), digest_of(writing, out), written, took_s)


def digest_of(writing: Writing, out: Path) -> str | None:
    """Return a digest of what a command has made; ``None`` where it has made nothing, or makes nothing to look at."""
    made = None if writing.makes is None else out / writing.makes
    if made is None or not made.exists():
        return None
    digest = hashlib.sha256()
    for path in sorted(made.rglob("*")) if made.is_dir() else [made]:
        digest.update(f"{path.relative_to(made)}\0".encode())
        if path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def has_own_mounts() -> bool:
    """Return whether the system lets a process have mounts of its own."""
    if shutil.which("unshare") is None:
        return False
    words = ["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", "/mnt"]
    return subprocess.run(words, check=False, capture_output=True).returncode == 0


def _main(plan: Mapping[str, Any]) -> None:
    """Run a command without room, and again with room, and print what it did."""
    writing, out, model = WRITING[plan["name"]], Path(plan["out"]), Path(plan["model"])
    if plan["mounts"]:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={plan['room']}", "tmpfs", str(out)], check=True)
        first = run(writing, out, model, {})
        subprocess.run(["mount", "-o", "remount,size=2g", str(out)], check=True)
    else:
        first = run(writing, out, model, {}, most_bytes=plan["room"])
    print(json.dumps([asdict(first), asdict(run(writing, out, model, {}))]))


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
