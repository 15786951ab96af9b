"""Equal texts, plain against speculative, on the embedded pair: Q8_0 and F16 on llama.cpp, float32 on torch.

What limits the figure: rounding. A pass over several rows may differ from one over a single row in its last bits, and a
near-tie may then fall the other way; every divergence is judged from the two rows of logits that were seen there.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import track

from paceline.api import Model, load
from paceline.conversion.quantize import quantize_gguf
from paceline.core.errors import CapabilityError
from paceline.engines.options import ModelOptions
from paceline.lab.comparison import answer, explain
from paceline.models.embedded import embedded_draft, embedded_target, heldout
from paceline.options import GenerateOptions
from paceline.planning.policies.fixed import FixedPolicy

NUM_PROMPTS = 50
PROMPT_CHARACTERS = 600
ANSWER_TOKENS = 128


def measure() -> dict[str, Any]:
    """Return equal texts and verdicts for each engine, weight type and temperature."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        f16 = {}
        for path in (embedded_target(), embedded_draft()):
            f16[path] = Path(folder) / path.name.replace("q8_0", "f16")
            quantize_gguf(path, f16[path], "F16")
        # The targets have a second sequence, so that the effect of places in the cache can be measured.
        pairs = {
            "llama_cpp Q8_0": (ModelOptions(embedded_target(), max_sequences=2), ModelOptions(embedded_draft())),
            "llama_cpp F16": (
                ModelOptions(f16[embedded_target()], max_sequences=2),
                ModelOptions(f16[embedded_draft()]),
            ),
            "torch_hf float32": (
                ModelOptions(embedded_target(), engine="torch_hf", dtype="float32", max_sequences=2),
                ModelOptions(embedded_draft(), engine="torch_hf", dtype="float32"),
            ),
        }
        for name, (target, draft) in pairs.items():
            try:
                # Siblings and a second drafter, so that the trees really branch.
                model = load(target, draft=draft, drafters=["draft", "suffix"], policy=FixedPolicy(5, siblings=2))
            except CapabilityError as error:
                print(f"{name}: left out, {error}")
                continue
            with model:
                for temperature in (0.0, 0.8):
                    figures[f"{name}, temperature {temperature:g}"] = compare(model, name, temperature)
    return figures


def compare(model: Model, name: str, temperature: float) -> dict[str, Any]:
    """Return how many answers to held-out prompts are equal, and the verdicts on the others."""
    verdicts: Counter[str] = Counter()
    differences = []
    accepted = rounds = 0
    prompts = heldout("code")[:NUM_PROMPTS]
    for seed, text in enumerate(track(prompts, description=f"{name}, temperature {temperature:g}", transient=True)):
        options: GenerateOptions = {"max_tokens": ANSWER_TOKENS, "temperature": temperature, "seed": seed}
        prompt = text[:PROMPT_CHARACTERS]
        plain = answer(model, prompt, options, speculate=False)
        speculative = answer(model, prompt, options, speculate=True)
        accepted += speculative.stats.num_accepted
        rounds += speculative.stats.rounds
        divergence = explain(model, prompt, options, plain, speculative)
        verdicts["equal" if divergence is None else divergence.verdict] += 1
        if divergence is not None:
            differences.append(
                {"prompt": seed, "token": divergence.index, "margin": divergence.margin}
                | {"logit_difference": divergence.logit_difference, "rounding": divergence.rounding}
                | {"verdict": divergence.verdict}
            )
    print(
        f"{name}, temperature {temperature:g}: {verdicts['equal']} of {len(prompts)} texts of {ANSWER_TOKENS} tokens "
        f"equal, {verdicts['near-tie']} near-ties, {verdicts['unrepeatable']} unrepeatable, {verdicts['bug']} bugs; "
        f"{accepted / rounds:.2f} accepted a round"
    )
    return {"prompts": len(prompts), **verdicts, "divergences": differences, "accepted_per_round": accepted / rounds}
