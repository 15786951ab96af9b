"""The program that tries a build of llama.cpp, in a process of its own (:mod:`.building` starts it).

What it is given is where to write the logits. What it prints is the build, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys

import numpy as np

from paceline.engines.exactness import read_rows
from paceline.engines.libraries import describe_build
from paceline.engines.loading import open_engine
from paceline.engines.options import ModelOptions
from paceline.models.embedded import embedded_target, heldout

_WIDE = 32
"""Tokens of the wide pass: from some tens of rows on other kernels compute."""
_SINGLE = 8
"""Tokens of passes of one row."""


def main(path: str) -> None:
    """Compute rows of the embedded target over a text that it has not seen."""
    build = describe_build()
    engine = open_engine(ModelOptions(embedded_target(), context_length=128))
    token_ids = engine.vocabulary.tokenize(heldout("code")[0])
    wide = list(read_rows(engine, token_ids[:_WIDE], _WIDE))
    single = list(read_rows(engine, token_ids[_WIDE : _WIDE + _SINGLE], 1))
    np.save(path, np.stack([*wide, *single]))
    engine.close()
    print(json.dumps(dataclasses.asdict(build)))


if __name__ == "__main__":
    main(sys.argv[1])
