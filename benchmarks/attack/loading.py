"""A process that loads what may be damaged, one after the other: what ends it has ended a user's process.

Lines of JSON go in, what is to be loaded, and come out: what it says, that it was refused, or a traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.attack.tries import AttackError

PROMPT: Final = "def add(a, b):\n    return"
_LIMIT_BYTES: Final = 3 << 30
"""More memory than any of these small models can need."""

_LOOK_S: Final = 0.1


class Loader:
    """The process, as a campaign sees it; one that ended is followed by another."""

    def __init__(self, log: Path, variables: Mapping[str, str] | None = None) -> None:
        self._log = log
        self._variables = variables or {}
        self._process: asyncio.subprocess.Process | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, log: Path, variables: Mapping[str, str] | None = None) -> AsyncIterator[Loader]:
        loader = cls(log, variables)
        try:
            yield loader
        finally:
            await loader.end()

    async def load(self, path: Path, *, task: str = "answer", within_s: float) -> str | None:
        """Return what a model says, or ``None`` where it was refused as it should be.

        Args:
            path: of the model.
            task: ``answer``, ``plan`` to answer with what is kept, or ``convert``.
            within_s: longest that it may take.
        """
        if self._process is None:
            with self._log.open("wb") as log:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "benchmarks.attack.loading",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                    env={**os.environ, **self._variables}, limit=1 << 24,
                )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        process.stdin.write(json.dumps({"path": str(path), "task": task}).encode() + b"\n")
        answer = asyncio.create_task(process.stdout.readline())
        ends_s = time.monotonic() + within_s
        try:
            while not answer.done():
                await asyncio.wait([answer], timeout=_LOOK_S)
                if time.monotonic() > ends_s:
                    raise AttackError(f"nothing after {within_s:g} s")
                with contextlib.suppress(psutil.NoSuchProcess):
                    taken = psutil.Process(process.pid).memory_info().rss
                    if taken > _LIMIT_BYTES:
                        raise AttackError(f"it took {taken >> 20} MiB")
        except BaseException:
            answer.cancel()
            await self.end()
            raise
        line = answer.result()
        if not line:
            status = await process.wait()
            self._process = None
            how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
            said = self._log.read_text(errors="replace").strip().splitlines()[-3:]
            raise AttackError(f"the process ended by {how}: {' / '.join(said)[-600:]}")
        found: dict[str, Any] = json.loads(line)
        if "traceback" in found:
            raise AttackError(found["traceback"])
        text: str | None = found["text"]
        return text

    async def end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()


def _answer(path: str, task: str) -> str:
    import paceline
    from paceline.conversion.convert import folder_to_gguf, gguf_to_folder
    from paceline.planning.policies.fixed import NO_SPECULATION

    if task == "convert":
        with tempfile.TemporaryDirectory(dir=Path(path).parent) as made:
            if Path(path).is_dir():
                folder_to_gguf(Path(path), Path(made) / "made.gguf")
            else:
                gguf_to_folder(Path(path), Path(made) / "made")
        return ""
    policy = None if task == "plan" else NO_SPECULATION
    with paceline.load(path, context_length=256, policy=policy) as model:
        tokens = 96 if task == "plan" else 3
        return model.generate(PROMPT, max_tokens=tokens, temperature=0.0).text


def _main() -> None:
    from paceline.core.errors import PacelineError

    # What libraries print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            found: dict[str, Any] = {"text": _answer(**json.loads(line))}
        except PacelineError as error:
            found = {"text": None} if "\n" not in str(error) else {"traceback": f"an error of several lines: {error}"}
        except Exception:
            found = {"traceback": traceback.format_exc()[-1500:]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    _main()
