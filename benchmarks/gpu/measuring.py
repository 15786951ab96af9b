"""The figures of one step, in a process of its own: ``python -m benchmarks.gpu.measuring JOB``.

A job is a JSON object with its task, and lines of JSON come out. All variants of a lap answer the same prompt with the
same seed, in another order each time; what is reported is the median over laps of speed over plain's in the same lap.
What limits plain decoding is reading the weights, and on a card that is fast, what the processor does between passes.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import paceline
from paceline.api import Model
from paceline.engines.options import ModelOptions
from paceline.models.embedded import heldout
from paceline.options import GenerateOptions
from paceline.streams import Generation

PLAIN, AGAIN, AUTO = "plain", "plain again", "auto"
LENGTHS: Final = (2, 3, 4, 6, 8)
"""Fixed draft lengths to compare with."""
TEMPERATURE: Final = 0.8
_MAX_LAPS: Final = 15
_PROMPT_CHARACTERS: Final = 400
_ROOM: Final = 320
"""Tokens of a prompt, and of drafts beyond an answer."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one variant did in one lap.

    Attributes:
        per_second: tokens of all requests.
        own_us: microseconds of a round that were neither in a model nor in a drafter.
        token_ids: of each request.
    """

    per_second: float
    own_us: float
    token_ids: Sequence[Sequence[int]]


def speed(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield how fast plain decoding is, and ``auto`` and fixed lengths beside it, for each number of requests."""
    began_s = time.monotonic()
    counts: list[int] = job["requests"]
    with _loaded(job, max(counts)) as model:
        device = model.target.description
        for number, count in enumerate(counts, start=1):
            until_s = began_s + job["seconds"] * number / len(counts)
            laps = list(_laps(model, count, job["tokens"], until_s))
            yield {"device": device, "requests": count, **speed_figures(laps)}


def speed_figures(laps: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """Return medians over laps: speeds, ratios to plain decoding of the same lap, and the processor's time a round."""
    ratios = {name: [lap[name].per_second / lap[PLAIN].per_second for lap in laps] for name in laps[0] if name != PLAIN}
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    fixed = [name for name in medians if name not in (AGAIN, AUTO)]
    best = max(fixed, key=medians.__getitem__)
    texts = [
        lap[name].token_ids[request] == ids
        for lap in laps
        for name in (AGAIN, AUTO, *fixed)
        for request, ids in enumerate(lap[PLAIN].token_ids)
    ]
    return {
        "laps": len(laps),
        "plain_per_second": statistics.median(lap[PLAIN].per_second for lap in laps),
        "plain_again": [min(ratios[AGAIN]), max(ratios[AGAIN])],
        "auto_of_plain": medians[AUTO],
        "fixed_of_plain": {name: medians[name] for name in fixed},
        "best_fixed": best,
        "best_fixed_of_plain": medians[best],
        "own_us": {name: statistics.median(lap[name].own_us for lap in laps) for name in (PLAIN, AUTO, best)},
        "texts": len(texts),
        "texts_equal": sum(texts),
    }


def _laps(model: Model, count: int, tokens: int, until_s: float) -> Iterator[dict[str, Run]]:
    variants: dict[str, GenerateOptions] = {PLAIN: {"speculate": False}, AGAIN: {"speculate": False}, AUTO: {}}
    for length in LENGTHS:
        variants[f"draft of {length}"] = {"policy": "fixed", "draft_max": length, "drafters": ["draft"]}
    prompts = [text[:_PROMPT_CHARACTERS] for text in heldout("code")]
    for lap in itertools.count():
        began_s = time.monotonic()
        names = list(variants)
        names = names[lap % len(names) :] + names[: lap % len(names)]
        chosen = [prompts[(lap * count + request) % len(prompts)] for request in range(count)]
        runs = {name: _run(model, chosen, tokens, lap, variants[name]) for name in names}
        is_last = _is_last(lap, began_s, until_s)
        if lap or is_last:
            yield {name: runs[name] for name in variants}
        if is_last:
            return


def _is_last(lap: int, began_s: float, until_s: float) -> bool:
    """Return whether there is no time for another lap.

    New shapes are recorded in the first, so that one is counted only where it is the last.
    """
    now_s = time.monotonic()
    return lap == _MAX_LAPS or now_s + (now_s - began_s) > until_s


def _run(model: Model, prompts: Sequence[str], tokens: int, lap: int, variant: GenerateOptions) -> Run:
    def answer(request: int) -> Generation:
        return model.generate(prompts[request], **_options(tokens, 1000 * lap + request, variant))

    began_s = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(answer, range(len(prompts))))
    took_s = time.perf_counter() - began_s
    stats = [each.stats for each in answers]
    if len(prompts) == 1:
        # Decoding alone, as others' benchmarks have it; several requests begin while others decode.
        per_second = (stats[0].predicted_tokens - 1) / stats[0].decode_s
    else:
        per_second = sum(each.predicted_tokens for each in stats) / took_s
    own_s = sum(each.phases.sampling_s + each.phases.rest_s for each in stats)
    rounds = sum(each.rounds for each in stats)
    return Run(per_second, 1e6 * own_s / rounds, [list(each.token_ids) for each in answers])


def _options(tokens: int, seed: int, variant: GenerateOptions) -> GenerateOptions:
    options: GenerateOptions = {"max_tokens": tokens, "temperature": TEMPERATURE, "seed": seed}
    options["ignore_end"], options["cache_prompt"] = True, False
    options.update(variant)
    return options


def card_time(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what share of a round the card computes, by the profiler that torch has for all of a process."""
    import torch

    with _loaded(job, 1) as model:
        for name, variant in ((PLAIN, GenerateOptions(speculate=False)), (AUTO, GenerateOptions())):
            prompts = [heldout("code")[0][:_PROMPT_CHARACTERS]]
            for lap in range(3):
                _run(model, prompts, job["tokens"], lap, variant)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                began_s = time.perf_counter()
                answer = model.generate(prompts[0], **_options(job["tokens"], 3, variant))
                wall_s = time.perf_counter() - began_s
            spans = [
                (event.time_range.start, event.time_range.end)
                for event in profiler.events()
                if event.device_type == torch.autograd.DeviceType.CUDA
            ]
            if not spans:
                raise RuntimeError("the profiler saw no kernel of a card")
            busy_s = 1e-6 * covered(spans)
            rounds = answer.stats.rounds + 1
            yield {
                "device": model.target.description,
                "variant": name,
                "rounds": rounds,
                "round_us": 1e6 * wall_s / rounds,
                "card_us": 1e6 * busy_s / rounds,
                "outside_us": 1e6 * (wall_s - busy_s) / rounds,
            }


def covered(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length that spans cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def llama_bench(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what llama.cpp's own benchmark makes of a model."""
    command = [job["program"], "-m", job["target"], "-p", "0", "-n", str(job["tokens"]), "-r", "5", "-o", "json"]
    ended = subprocess.run([*command, *job["options"]], capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError((ended.stderr.strip().splitlines() or ["llama-bench says nothing"])[-1])
    (found,) = json.loads(ended.stdout)
    yield {"device": found.get("gpu_info") or found.get("cpu_info"), "per_second": found["avg_ts"]}


def generate(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the speed of transformers' ``generate``, alone and assisted by the draft model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    until_s = time.monotonic() + job["seconds"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(job["target"])
    target, draft = (
        AutoModelForCausalLM.from_pretrained(job[which], dtype=torch.bfloat16).to(device)
        for which in ("target", "draft")
    )
    sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 40, "top_p": 0.95, "min_p": 0.05}

    def seconds(prompt: Any, seed: int, length: int, **options: Any) -> float:
        torch.manual_seed(seed)
        began_s = time.perf_counter()
        # Ids come back from the device, so it is done then.
        target.generate(
            **prompt, **sampling, **options, min_new_tokens=length, max_new_tokens=length, pad_token_id=0
        ).tolist()
        return time.perf_counter() - began_s

    def per_second(prompt: Any, seed: int, **options: Any) -> float:
        # The first token comes with the prompt.
        decode_s = seconds(prompt, seed, job["tokens"], **options) - seconds(prompt, seed, 1, **options)
        return float((job["tokens"] - 1) / decode_s)

    plain, ratios = [], []
    for lap, text in enumerate(itertools.cycle(heldout("code"))):
        began_s = time.monotonic()
        prompt = tokenizer(text[:_PROMPT_CHARACTERS], return_tensors="pt").to(device)
        alone, assisted = per_second(prompt, lap), per_second(prompt, lap, assistant_model=draft)
        is_last = _is_last(lap, began_s, until_s)
        if lap or is_last:
            plain.append(alone)
            ratios.append(assisted / alone)
        if is_last:
            break
    yield {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "laps": len(ratios),
        "per_second": statistics.median(plain),
        "assisted_of_it": statistics.median(ratios),
    }


def _loaded(job: Mapping[str, Any], sequences: int) -> Model:
    tokens = job["tokens"] + _ROOM
    options = ModelOptions(Path(job["target"]), context_length=tokens, max_sequences=sequences, model_defaults=False)
    draft = ModelOptions(Path(job["draft"]), context_length=tokens, max_sequences=sequences)
    return paceline.load(options, draft=draft, remember=False)


TASKS: Final = {"speed": speed, "card_time": card_time, "llama_bench": llama_bench, "generate": generate}


def main(arguments: Sequence[str]) -> None:
    job = json.loads(arguments[0])
    for figures in TASKS[job["task"]](job):
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
