"""Answers of a whole paceline in a box; see :mod:`benchmarks.streamed.answers`."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import paceline
from paceline.api import Model
from paceline.core.errors import InputError
from paceline.engines.options import DraftOptions, ModelOptions
from paceline.lab.bench.workloads import WORKLOADS, Sizes, Task
from paceline.models.registry import models_folder
from paceline.options import GenerateOptions

MMAP, PLAIN, AUTO, FIXED = "mmap", "plain", "auto", "fixed"


def answer(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what was loaded, then every answer.

    Args:
        job: ``variant``, ``draft``, ``memory``, ``temperature``, ``workloads``, ``prompts`` of each, ``tokens`` of
            an answer, ``few`` where that many do, ``context``, ``seed``, ``threads``.
    """
    variant = job["variant"]
    started_s = time.perf_counter()
    with _load(job) as model:
        yield {
            "loaded": model.target.description,
            "load_s": time.perf_counter() - started_s,
            "profile": _profile() if variant == AUTO else None,
        }
        sizes = Sizes(job["tokens"], job["context"], job["seed"])
        for name in job["workloads"]:
            for task in model.worker.call(functools.partial(_tasks, model, name, sizes, job["prompts"])):
                yield _answered(model, task, job)


def _load(job: Mapping[str, Any]) -> Model:
    variant = job["variant"]
    options = ModelOptions(
        job["model"],
        context_length=job["context"],
        threads=job["threads"],
        memory=None if variant == MMAP else job["memory"],
        stream=False if variant == MMAP else None,
        # Weights that are laid out anew are memory which the system cannot give back: of more than there is, an end.
        repack=variant != MMAP,
        # What is faster at one place would be another text than at another.
        flash_attention=False,
        model_defaults=False,
    )
    if variant in (MMAP, PLAIN):
        return paceline.load(options, policy=paceline.NO_SPECULATION, remember=False, prompt_cache_mib=0)
    draft = DraftOptions(job["draft"]).beside(options)
    policy = AUTO if variant == AUTO else paceline.FixedPolicy(int(variant.removeprefix(f"{FIXED}:")))
    return paceline.load(options, draft=draft, policy=policy, remember=False, prompt_cache_mib=0)


def _tasks(model: Model, name: str, sizes: Sizes, count: int) -> list[Task]:
    tasks = list(itertools.islice(WORKLOADS[name].make(model.target.vocabulary, sizes), count))
    if len(tasks) < count:
        raise InputError(f"{name} has {len(tasks)} prompts: ask for no more (--prompts)")
    return tasks


def _answered(model: Model, task: Task, job: Mapping[str, Any]) -> dict[str, Any]:
    options: GenerateOptions = task.options(job["temperature"])
    few = job["variant"] in (MMAP, PLAIN)
    options.update({"max_tokens": min(job["few"], task.max_tokens) if few else task.max_tokens})
    options.update({"ignore_end": True, "cache_prompt": False})
    generation = model.generate(task.prompt_ids, **options)
    stats = generation.stats
    return {
        "workload": task.workload,
        "text": task.name,
        "temperature": options.get("temperature"),
        "token_ids": list(generation.token_ids),
        "seconds": stats.arrivals_s[-1] - stats.arrivals_s[0],
        "rounds": stats.rounds,
        "prompt_tokens": len(task.prompt_ids),
        "prompt_s": stats.prompt_s,
        "num_drafted": stats.num_drafted,
        "num_accepted": stats.num_accepted,
        "draft_s": stats.phases.draft_s,
        "verify_s": stats.phases.verify_s,
        "gain": stats.gain,
    }


def _profile() -> dict[str, Any] | None:
    """Return how the costs were measured that were kept of this load, the only ones there are."""
    kept: Sequence[Path] = sorted(models_folder().with_name("profiles").glob("*"))
    if not kept:
        return None
    profile = json.loads(kept[-1].read_text(encoding="utf-8"))["data"]
    return {"took_s": profile["took_s"], "num_passes": profile["num_passes"], "profile": profile}
