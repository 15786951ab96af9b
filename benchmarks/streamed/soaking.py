"""Answers for hours in a box, some of them given up; see :mod:`benchmarks.streamed.soak`."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import paceline
from benchmarks.soak import Expected, alarms_interrupt, cancel, drop_in_a_cycle, leave_a_generator
from benchmarks.streamed.box import Groups, anonymous_bytes
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.models.embedded import HELDOUT_KINDS, heldout

CONTEXT: Final = 512
MAX_TOKENS: Final = 24
_PROMPT_CHARACTERS: Final = 200
_CHECKED_EVERY: Final = 8
"""Requests after which one that is asked again and again must be answered as ever."""

_INTERRUPTED_WITHIN: Final = 3
"""Plain rounds at most after which an interrupt comes, at any moment of them."""


def soak(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what was loaded, then a sample now and then, until the time is over and there were so many requests.

    Args:
        job: ``memory``, ``draft``, ``threads``, ``seconds`` in all, ``requests`` at least, ``every_s`` of a
            sample, ``seed``, ``prompt_cache_mib``.
    """
    group = None if job["groups"] is None else Groups.from_json(job["groups"])
    options = ModelOptions(job["model"], context_length=CONTEXT, threads=job["threads"], memory=job["memory"])
    draft = None if job["draft"] is None else DraftOptions(job["draft"]).beside(options)
    rng = random.Random(job["seed"])
    texts = [text for kinds in zip(*map(heldout, HELDOUT_KINDS), strict=False) for text in kinds]
    counts: Counter[str] = Counter()
    with (
        paceline.load(options, draft=draft, remember=False, prompt_cache_mib=job["prompt_cache_mib"]) as model,
        alarms_interrupt(),
    ):
        yield {"loaded": model.target.description}
        # Decoded plainly, as its passes are the same every time then, and so is their rounding.
        checked = _Checked(model, texts[0])
        began_s = sampled_s = time.perf_counter()
        while (now_s := time.perf_counter()) - began_s < job["seconds"] or counts.total() < job["requests"]:
            _ask(model, texts, rng, checked.round_s, counts)
            if counts.total() % _CHECKED_EVERY == 0:
                checked.ask(model)
                counts["checked"] += 1
            if now_s - sampled_s >= job["every_s"]:
                sampled_s = now_s
                gc.collect()
                yield {"after_s": now_s - began_s, "counts": dict(counts), **_sample(group)}
        gc.collect()
        yield {"after_s": time.perf_counter() - began_s, "counts": dict(counts), **_sample(group)}


class _Checked:
    """A request that is asked again and again."""

    def __init__(self, model: paceline.Model, text: str) -> None:
        self._prompt = text[:_PROMPT_CHARACTERS]
        answer = self._answer(model)
        self._expected = Expected(self._prompt, 5, MAX_TOKENS, answer.token_ids, answer.text)
        self.round_s = answer.stats.decode_s / max(answer.stats.rounds, 1)

    def ask(self, model: paceline.Model) -> None:
        """Ask it again.

        Raises:
            AssertionError: it is answered otherwise.
        """
        self._expected.check(self._answer(model))

    def _answer(self, model: paceline.Model) -> paceline.Generation:
        return model.generate(
            self._prompt, max_tokens=MAX_TOKENS, seed=5, speculate=False, cache_prompt=False, ignore_end=True
        )


def _ask(model: paceline.Model, texts: list[str], rng: random.Random, round_s: float, counts: Counter[str]) -> None:
    """Make a request with some prompt, and read its answer or give it up."""
    text = rng.choice(texts)
    start = rng.randrange(max(1, len(text) - _PROMPT_CHARACTERS))
    stream = model.stream(text[start : start + _PROMPT_CHARACTERS], max_tokens=MAX_TOKENS, seed=rng.randrange(1 << 30))
    kind = rng.choice(("read", "read", "cancel", "drop", "leave", "interrupt"))
    if kind == "read":
        stream.result()
    elif kind == "interrupt":
        with contextlib.suppress(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-3, _INTERRUPTED_WITHIN * round_s + 2e-3))
            try:
                stream.result()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    else:
        {"cancel": cancel, "drop": drop_in_a_cycle, "leave": leave_a_generator}[kind](stream, rng)
    counts[kind] += 1


def _sample(group: Groups | None) -> dict[str, int]:
    return {
        "anonymous_bytes": anonymous_bytes(),
        "threads": _count(Path("/proc/self/task")),
        "files": _count(Path("/proc/self/fd")),
        "group_bytes": 0 if group is None else group.usage_bytes,
    }


def _count(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())
