"""What is done in a box: reads one job, writes a line a result.

::

    {"task": "passes", ...}      see passing.py
    {"task": "answers", ...}     see answering.py
    {"task": "soak", ...}        see soaking.py

Every job names its ``model``, and the control ``groups`` that it is done in; ``None`` without a box.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.streamed import answering, passing, soaking
from paceline.cli import exits
from paceline.core.errors import InputError, PacelineError


def results(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Do a job; yield its results."""
    tasks = {
        "passes": passing.measure,
        "answers": answering.answer,
        "soak": soaking.soak,
    }
    yield from tasks[job["task"]](job)


def main() -> None:
    """Read the job from standard input."""
    try:
        for result in results(json.load(sys.stdin)):
            print(json.dumps(result), flush=True)
    except PacelineError as error:
        print(error, file=sys.stderr)
        sys.exit(exits.BAD_INPUT if isinstance(error, InputError) else exits.FAILURE)


if __name__ == "__main__":
    main()
