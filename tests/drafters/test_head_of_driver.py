"""Heads draft for two tiny models what llama.cpp's own driver once drafted with them.

The driver is ``examples/speculative-simple`` of llama.cpp 0c1e57098. The program that asks it, and compares any model's
rounds with its log, is ``benchmarks/beside_driver.py`` of the commit 68ae3d3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.arrays import FloatArray
from paceline.core.params import SamplingParams, StopRules
from paceline.core.request import Request
from paceline.drafters.base import Drafter
from paceline.drafters.head import HeadDrafter
from paceline.drafters.registry import build_drafters
from paceline.engines.loading import open_engine, open_head, states_read
from paceline.engines.options import ModelOptions
from paceline.planning.base import RoundRecord
from paceline.planning.policies.fixed import FixedPolicy
from paceline.runtime.loop import DecodingLoop
from tests.engines.tiny_models import write_block_head, write_eagle_head, write_model
from tests.helpers import drain

pytest.importorskip("llama_cpp")

PROMPT = "One prompt, read as bytes"
# Drafts of four tokens, from the answer's second token on.
DRAFTED = {
    "eagle3": [(213, 119, 119, 119), (28, 28, 235, 96), (119, 119, 119, 136), (33, 119, 119, 93)],
    "mtp": [(153, 20, 215, 217), (117, 213, 121, 9), (261, 68, 83, 251), (106, 125, 91, 39)],
    "dflash": [(292, 193, 292, 292), (197, 197, 292, 295), (292, 292, 264, 295), (292, 264, 295, 295)],
    "dspark": [(277, 277, 277, 277), (294, 277, 277, 277), (277, 277, 277, 277), (291, 294, 294, 294)],
}


class DriversMtp(HeadDrafter):
    """An MTP layer that reads the first token, too, with a state of zeros, as the driver has it do.

    Layers are trained without.
    """

    def _follow(self, request: Request) -> Any:
        follower = super()._follow(request)
        follower.start = 0
        return follower

    def _first_readable(self, follower: Any) -> int:
        return 0

    def _states(self, follower: Any, start: int, stop: int) -> FloatArray:
        if start:
            return super()._states(follower, start, stop)
        states = super()._states(follower, 1, stop)
        return np.concatenate((np.zeros((1, states.shape[1]), np.float32), states))


class Rounds:
    """An observer that notes what was drafted, by the number of the answer's tokens before it."""

    def __init__(self) -> None:
        self.drafted: dict[int, tuple[int, ...]] = {}

    def observe(self, record: RoundRecord) -> None:
        for request, tree, emitted in zip(record.requests, record.trees, record.emitted, strict=True):
            self.drafted[request.num_output - emitted] = tuple(tree.token_ids[1:])


@pytest.mark.parametrize("kind", DRAFTED)
def test_a_head_drafts_what_it_does_for_the_driver(tmp_path: Path, kind: str) -> None:
    name = "qwen35" if kind == "mtp" else "llama"
    path = write_model(tmp_path / "target.gguf", name, tokenizer="bytes", mtp=kind == "mtp", layers=4)
    file = tmp_path / "head.gguf"
    match kind:
        case "eagle3":
            write_eagle_head(file, 32)
        case "dflash":
            write_block_head(file, 32)
        case "dspark":
            write_block_head(file, 32, rank=6, metadata={"dflash.sample_from_anchor": False})
    head_file = None if kind == "mtp" else file
    options = ModelOptions(
        path,
        context_length=256,
        max_sequences=1,
        threads=1,
        flash_attention=False,
        cache_type_k="f32",
        cache_type_v="f32",
        hold_states=states_read(ModelOptions(path), head_file),
    )
    target, rounds = open_engine(options), Rounds()
    head = open_head(target, options, head_file)
    drafter: Drafter = (
        DriversMtp(head, target=target.vocabulary)
        if kind == "mtp"
        else build_drafters(["draft"], target=target, draft=head)[0]
    )
    loop = DecodingLoop(target, [drafter], FixedPolicy(4), observers=[rounds])
    loop.add(target.vocabulary.tokenize(PROMPT), SamplingParams(temperature=0.0), StopRules(12))
    drain(loop)
    drafter.close()
    target.close()
    assert [rounds.drafted[start] for start in range(1, 5)] == DRAFTED[kind]
