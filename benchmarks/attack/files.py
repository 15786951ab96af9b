"""Files that are damaged: headers of GGUF files, Hugging Face folders, and what is kept on disk."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.models import damaged_folder, damaged_gguf

from benchmarks.attack.bodies import NUMBERS, TEXTS
from benchmarks.attack.loading import Loader
from benchmarks.attack.tries import AttackError, Attempt
from paceline.conversion.convert import gguf_to_folder
from paceline.models.embedded import embedded_draft
from paceline.models.registry import CACHE_VARIABLE

LOAD_S: Final = 30.0
"""Longest that a damaged model may take to be refused."""

FIRST_S: Final = 120.0
"""Longest that a sound one may take first, with all that is imported for it."""


@asynccontextmanager
async def headers(model: Path, folder: Path) -> AsyncIterator[Attempt]:
    """Damage the header of a GGUF file, and load it."""
    sound = damaged_gguf.read(embedded_draft())
    async with Loader.running(folder / "loader.log") as loader:

        async def attempt(rng: Random) -> None:
            header, what = damaged_gguf.damage(sound, rng.getrandbits(32))
            with _told(what):
                await loader.load(header.write(folder / "damaged.gguf"), within_s=LOAD_S)

        yield attempt


@asynccontextmanager
async def folders(model: Path, folder: Path) -> AsyncIterator[Attempt]:
    """Damage a Hugging Face folder, and load or convert it."""
    sound, damaged = folder / "sound", folder / "damaged"
    gguf_to_folder(embedded_draft(), sound)
    async with Loader.running(folder / "loader.log") as loader:
        if await loader.load(sound, within_s=FIRST_S) is None:
            raise AttackError(f"{sound} is refused with nothing done to it")

        async def attempt(rng: Random) -> None:
            damaged_folder.copy(sound, damaged)
            what, task = damaged_folder.damage(damaged, rng.getrandbits(32)), rng.choice(("answer", "convert"))
            with _told(f"{what}, {task}"):
                await loader.load(damaged, task=task, within_s=LOAD_S)

        yield attempt


@asynccontextmanager
async def kept(model: Path, folder: Path) -> AsyncIterator[Attempt]:
    """Damage what is kept of a model; whatever it is, the text is the same."""
    cache, sound = folder / "cache", folder / "sound"
    async with Loader.running(folder / "loader.log", {CACHE_VARIABLE: str(cache / "models")}) as loader:
        for _ in range(2):
            expected = await loader.load(model, task="plan", within_s=FIRST_S)
        shutil.copytree(cache, sound)
        entries = sorted(path.relative_to(sound) for path in sound.rglob("*.json"))
        if not entries or expected is None:
            raise AttackError(f"nothing is kept of {model}")

        async def attempt(rng: Random) -> None:
            shutil.rmtree(cache)
            shutil.copytree(sound, cache)
            entry = rng.choice(entries)
            with _told(f"{entry.parent}: {_damage_file(cache / entry, rng)}"):
                text = await loader.load(model, task="plan", within_s=LOAD_S)
                if text != expected:
                    raise AttackError(f"the text is {text!r} in place of {expected!r}")

        yield attempt


@contextlib.contextmanager
def _told(what: str) -> Any:
    try:
        yield
    except AttackError as error:
        raise AttackError(f"{what}: {error}") from None


def _damage_file(path: Path, rng: Random) -> str:
    """Damage a file, most often one value of its JSON, and return what was done."""
    content = path.read_bytes()
    try:
        data = json.loads(content)
    except ValueError:
        data = None
    if data is None or rng.random() < 0.15:
        what, content = _damage_bytes(content, rng)
        path.write_bytes(content)
        return what
    what, data = damage_json(data, rng)
    path.write_text(json.dumps(data), encoding="utf-8")
    return what


def _damage_bytes(content: bytes, rng: Random) -> tuple[str, bytes]:
    place = rng.randrange(len(content) + 1)
    return rng.choice(
        (
            (f"cut at {place}", content[:place]),
            ("empty", b""),
            (f"a byte more at {place}", content[:place] + rng.randbytes(1) + content[place:]),
            (f"other bytes at {place}", content[:place] + rng.randbytes(8) + content[place + 8 :]),
            ("twice", content * 2),
            ("nested", b"[" * 100_000),
        )
    )


_ODD: Final[Sequence[Callable[[Any], Any]]] = (
    *(
        lambda old: None,
        lambda old: [],
        lambda old: {},
        lambda old: [old],
        lambda old: {"a": old},
        lambda old: str(old),
    ),
    *(lambda old: float("nan"), lambda old: float("inf"), lambda old: True, lambda old: "a" * 100_000),
)


def damage_json(data: Any, rng: Random) -> tuple[str, Any]:
    """Return JSON with another value somewhere, or without one, and what was done."""
    whole = {"": json.loads(json.dumps(data))}
    # Down to a place, at each step as likely to stay: large lists have most values, and say the least.
    inside: Any = whole
    key: Any = ""
    path: list[str] = []
    while isinstance(inside[key], dict | list) and inside[key] and (not path or rng.random() < 0.8):
        inside = inside[key]
        key = rng.choice(list(inside)) if isinstance(inside, dict) else rng.randrange(len(inside))
        path.append(str(key))
    place = "/".join(path)[:200]
    old = inside[key]
    if path and rng.random() < 0.2:
        del inside[key]
        return f"without {place}", whole[""]
    if isinstance(old, int | float) and not isinstance(old, bool) and rng.random() < 0.7:
        new = rng.choice((*NUMBERS, old + 1, old - 1, -old, old * 1000))
    elif isinstance(old, str) and rng.random() < 0.6:
        new = rng.choice(TEXTS)
    else:
        new = rng.choice(_ODD)(old)
    inside[key] = new
    return f"{place} is {str(new)[:60]!r}", whole[""]
