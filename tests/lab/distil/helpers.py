"""Answers, and a toy Llama to train."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np

from paceline.lab.distil.answers import KeptAnswer, Part
from paceline.lab.distil.rows import Rows, row_type
from paceline.lab.inflate import LlamaShape
from paceline.lab.task import Task
from tests.lab.llama_files import write_llama

VOCAB = 384
TOY = LlamaShape(2, 64, 64, heads=2, kv_heads=1, head_size=32, vocab_size=VOCAB, tied=True)


def answer(number: int, part: Part = "train", kind: str = "code", length: int = 24) -> KeptAnswer:
    """Return an answer that does not loop, of tokens below 256."""
    draw = random.Random(number)
    prompt = tuple(draw.randrange(256) for _ in range(4 + number % 3))
    token_ids = tuple(draw.randrange(256) for _ in range(length - number % 2))
    return KeptAnswer(part, Task(kind, f"{kind}:{number}", prompt, length, number), token_ids)


def rows_for(answers: list[KeptAnswer]) -> list[Rows]:
    """Return rows of a target that gives one token nearly everything, whatever it read."""
    found = []
    for each in answers:
        rows = np.zeros(len(each.token_ids), row_type(VOCAB))
        head = rows["ids"].shape[-1]
        rows["ids"] = np.arange(head)
        rows["logprobs"] = np.log(0.05 / (head - 1))
        rows["logprobs"][:, 7] = np.log(0.9)
        rows["tail"] = np.log(0.05)
        found.append(rows)
    return found


def write_toy_folder(folder: Path) -> Path:
    """Write a random Llama of two layers as transformers has it, with a tokenizer of bytes."""
    from paceline.conversion.convert import gguf_to_folder

    gguf_to_folder(write_llama(folder.with_suffix(".gguf"), TOY), folder, dtype="F32")
    return folder


def weights_of(folder: Path) -> dict[str, Any]:
    from safetensors.numpy import load_file

    return dict(load_file(folder / "model.safetensors"))


def write_cut_target(folder: Path) -> Path:
    """Write the embedded target without its two middle layers, as a folder."""
    from safetensors.numpy import save_file

    from paceline.conversion.convert import gguf_to_folder
    from paceline.models.embedded import embedded_target

    gguf_to_folder(embedded_target(), folder, dtype="F32")
    kept = {}
    for name, weights in weights_of(folder).items():
        parts = name.split(".")
        if parts[1] == "layers":
            if parts[2] in ("1", "2"):
                continue
            parts[2] = "0" if parts[2] == "0" else "1"
        kept[".".join(parts)] = weights
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder
