"""What a bench measures. Complete and checked when built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.errors import InputError
from paceline.lab.bench.workloads import PROMPT_TOKENS
from paceline.lab.replaying.recording import RECORDED_DEPTH
from paceline.lab.task import MIN_ANSWER


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What is to be measured.

    Attributes:
        workloads: names, in the order of the report.
        variants: names among :data:`~paceline.lab.variants.VARIANT_NAMES`.
        temperature: of all workloads but ``hard``.
        laps: times a workload is gone through: a pair of each variant, and in ``mixed`` one for each of its tasks.
        prompts: texts of each workload; more laps go through them again.
        num_static: static settings that run live.
        coarse: replay fewer settings.
        with_server: compare with another server too, where it can be: it cannot be made to follow a text.
        with_plain: run plain as a variant too, which shows how much of a ratio is noise.
        prompt_tokens: most tokens of a prompt that is the beginning of a text; passages have twice as many.
        depth: deepest drafts that are recorded, and so replayed.
        seed: of the order of texts, of edits and of sampling.
    """

    workloads: Sequence[str]
    variants: Sequence[str]
    drafters: Sequence[str]
    temperature: float = 0.0
    laps: int = 5
    tokens: int = 256
    prompts: int = 5
    num_static: int = 3
    coarse: bool = False
    with_server: bool = False
    with_plain: bool = True
    prompt_tokens: int = PROMPT_TOKENS
    depth: int = RECORDED_DEPTH
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("repeats", self.laps, 1),
            ("tokens", self.tokens, MIN_ANSWER),
            ("prompts", self.prompts, 1),
        ):
            if value < least:
                raise InputError(f"--{name} {value}: the least is {least}")
