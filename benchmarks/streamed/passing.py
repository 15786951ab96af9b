"""Passes of several widths, one after the other, in a box: reads one job, writes a line a result.

A job is an object of JSON::

    {"model": ..., "groups": null without a box, "variant": ..., "memory_bytes": ..., "rows": [...], "repeats": ...,
     "threads": ...}
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.streamed.box import Groups, anonymous_bytes
from paceline.cli import exits
from paceline.core.errors import InputError, PacelineError
from paceline.engines.base import COMMITTED_END, ForwardOutput, Step
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.llama_cpp.streaming import LayerStream
from paceline.engines.options import ModelOptions

MMAP, STREAMED = "mmap", "streamed"
VARIANTS: Final = (MMAP, STREAMED)
CONTEXT: Final = 512
"""Tokens. The cache takes memory from the layers, and no pass here looks far back."""


def measure(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what was loaded, then every pass, then what is held."""
    path, rows_of = Path(job["model"]), job["rows"]
    group = None if job["groups"] is None else Groups.from_json(job["groups"])
    streams = job["variant"] == STREAMED
    started_s = time.perf_counter()
    engine = LlamaCppEngine(
        ModelOptions(
            path,
            context_length=CONTEXT,
            branches=0,
            threads=job["threads"],
            flash_attention=False,
            memory=job["memory_bytes"] if streams else None,
            stream=None if streams else False,
            # Weights that are laid out anew are memory which the system cannot give back: the process would be ended.
            repack=streams,
        )
    )
    try:
        stream = engine._stream
        plan = engine.memory_plan
        yield {
            "loaded": engine.description,
            "load_s": time.perf_counter() - started_s,
            "plan": None if plan is None else dataclasses.asdict(plan),
        }
        sequence = engine.open()
        for rows in rows_of:
            digest = hashlib.sha256()
            output = _pass(engine, sequence, rows)
            for row in range(rows):
                digest.update(output.logits(0, row).tobytes())
            yield {"rows": rows, "logits": digest.hexdigest()}
            for counted in range(-1, job["repeats"]):
                engine.commit(sequence, [])
                before = _counted(group, stream)
                started_s = time.perf_counter()
                _pass(engine, sequence, rows)
                took_s = time.perf_counter() - started_s
                after = _counted(group, stream)
                # The first finds more of its layers read than others do, as the disk had time since the pass before.
                if counted >= 0:
                    yield {"rows": rows, "seconds": took_s, **{name: after[name] - before[name] for name in before}}
            engine.commit(sequence, [])
        yield {"anonymous_bytes": anonymous_bytes()}
    finally:
        engine.close()


def _pass(engine: LlamaCppEngine, sequence: int, rows: int) -> ForwardOutput:
    """Make a pass that verifies so many rows; all of their logits are wanted."""
    token_ids = [1 + row % 100 for row in range(rows)]
    parents = range(COMMITTED_END, COMMITTED_END + rows)
    output = engine.forward([Step(sequence, token_ids, parents, range(rows))])
    output.wait()
    return output


def _counted(group: Groups | None, stream: LayerStream | None) -> dict[str, float]:
    return {
        "bytes_of_group": 0 if group is None else group.bytes_read,
        "bytes_of_engine": 0 if stream is None else stream.bytes_read,
        "waited_s": 0.0 if stream is None else stream.waited_s,
    }


def main() -> None:
    try:
        for result in measure(json.load(sys.stdin)):
            print(json.dumps(result), flush=True)
    except PacelineError as error:
        print(error, file=sys.stderr)
        sys.exit(exits.BAD_INPUT if isinstance(error, InputError) else exits.FAILURE)


if __name__ == "__main__":
    main()
