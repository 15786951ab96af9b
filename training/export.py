"""Export through paceline's own converter (checkpoint, Hugging Face folder, GGUF, quantised), and the model card."""

import json
import platform
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from paceline.conversion.convert import folder_to_gguf
from paceline.conversion.quantize import quantize_gguf
from training import corpus, paths, sources, tokenizer
from training.copying import GUIDED_SHARE, MATCHED
from training.shapes import CONTEXT, HEAD_SIZE, NORM_EPSILON, ROPE_THETA, SHAPES
from training.train import LENGTH, LONG_LENGTH, load_trained
from training.unlikelihood import REPEATED, WAY

FILE_TYPES = ("f32", "f16", "q8_0")
SHIPPED = "q8_0"
LICENSE = "Apache-2.0"
# What each model was trained in, one run after the other.
RUNS = {"target": ("base", "copying", "varied"), "draft": ("draft",)}
DESCRIPTION = "Small model of Python source, technical prose, JSON and logs, for trying and measuring paceline"


def write_folder(name: str) -> Path:
    """Write the latest checkpoint of `name` as a folder that transformers loads."""
    folder = paths.hugging_face(name)
    load_trained(name).cpu().save_pretrained(folder)
    trained: Tokenizer = tokenizer.load()
    PreTrainedTokenizerFast(
        tokenizer_object=trained,
        bos_token=tokenizer.END_OF_TEXT,
        eos_token=tokenizer.END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder


def write_gguf(name: str, file_type: str) -> Path:
    """Export the latest checkpoint of `name`; the file appears whole or not at all."""
    path = paths.gguf(name, file_type)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=paths.BUILD) as temporary:
        exact = Path(temporary) / "exact.gguf"
        folder_to_gguf(
            write_folder(name),
            exact,
            dtype="F32",
            name=f"paceline embedded {name}",
            description=DESCRIPTION,
            license=LICENSE,
        )
        quantize_gguf(exact, path, file_type.upper())
    return path


def _model_rows(runs: dict[str, dict[str, Any]]) -> str:
    """Return the table of the card, one row per property and one column per model."""
    columns = [(SHAPES[name], [runs[run] for run in names]) for name, names in RUNS.items()]

    def of_runs(value: Callable[[dict[str, Any]], str]) -> list[str]:
        return [" + ".join(value(run) for run in its_runs) for _, its_runs in columns]

    properties = {
        "parameters": [f"{its_runs[0]['parameters'] / 1e6:.2f} M" for _, its_runs in columns],
        "layers": [str(shape.num_layers) for shape, _ in columns],
        "hidden size": [str(shape.hidden) for shape, _ in columns],
        f"heads / KV heads, of {HEAD_SIZE}": [f"{shape.num_heads} / {shape.num_kv_heads}" for shape, _ in columns],
        "feed-forward size": [str(shape.feed_forward) for shape, _ in columns],
        "embedding and output": ["one matrix" if shape.tied else "two matrices" for shape, _ in columns],
        "file": [f"{paths.gguf(shape.name, SHIPPED).stat().st_size / 1e6:.2f} MB" for shape, _ in columns],
        "million tokens trained on": of_runs(lambda run: f"{run['tokens'] / 1e6:.2f}"),
        "minutes": of_runs(lambda run: f"{run['minutes']:.0f} ({run['device']})"),
        "peak learning rate": of_runs(lambda run: str(run["config"]["peak_lr"])),
    }
    return "\n".join(f"| {label} | {' | '.join(values)} |" for label, values in properties.items())


def _source_rows(summary: dict[str, Any]) -> str:
    """Return the table of the sources: version, licence, and the share of the training text by kind."""
    total = sum(summary["bytes"].values())
    versions = {package.name: (package.version, package.license) for package in sources.packages()}
    versions["python"] = (platform.python_version(), "PSF-2.0")
    versions["simulated"] = ("training/simulated_logs.py", "Apache-2.0")
    shares: dict[str, Counter[str]] = {name: Counter() for name in versions}
    for key, size in summary["bytes"].items():
        kind, source = key.split("/")
        shares[source][kind] = size
    rows = []
    for source, by_kind in sorted(shares.items(), key=lambda item: -item[1].total()):
        version, license_name = versions[source]
        cells = [f"{by_kind[kind] / total:.1%}" if by_kind[kind] else "" for kind in corpus.KINDS]
        rows.append(f"| {source} {version} | {license_name} | {' | '.join(cells)} | {by_kind.total() / total:.1%} |")
    return "\n".join(rows)


def write_model_card() -> None:
    """Fill in the card's template from the records of the corpus, the runs and the evaluation."""
    names = [name for of_model in RUNS.values() for name in of_model]
    runs = {name: json.loads(paths.record(name).read_text(encoding="utf-8")) for name in names}
    summary = json.loads(paths.CORPUS_SUMMARY.read_text(encoding="utf-8"))
    train_tokens = len(np.load(paths.TRAIN_TOKENS, mmap_mode="r"))
    samples = np.load(paths.SAMPLED_TOKENS, mmap_mode="r").shape
    card = paths.CARD_TEMPLATE.read_text(encoding="utf-8").format(
        model_rows=_model_rows(runs),
        source_rows=_source_rows(summary),
        evaluation=paths.EVALUATION.read_text(encoding="utf-8").strip(),
        rope_theta=ROPE_THETA,
        norm_epsilon=NORM_EPSILON,
        context=CONTEXT,
        length=LENGTH,
        long_length=LONG_LENGTH,
        long_share=runs["base"]["config"]["long_share"],
        base_tokens=runs["base"]["tokens"] / 1e6,
        repeats_after=runs["base"]["config"]["repeats_after_tokens"] / 1e6,
        base_repeat_share=runs["base"]["config"]["repeat_share"],
        copying_tokens=runs["copying"]["tokens"] / 1e6,
        copying_repeat_share=runs["copying"]["config"]["repeat_share"],
        varied_tokens=runs["varied"]["tokens"] / 1e6,
        draft_repeat_share=runs["draft"]["config"]["repeat_share"],
        guided_share=GUIDED_SHARE,
        matched=MATCHED,
        repeated=REPEATED,
        way=WAY,
        batch_tokens=runs["base"]["config"]["batch_tokens"],
        seed=runs["base"]["config"]["seed"],
        vocab_size=tokenizer.VOCAB_SIZE,
        end_of_text=tokenizer.END_OF_TEXT,
        train_megabytes=sum(summary["bytes"].values()) / 1e6,
        train_tokens=train_tokens / 1e6,
        epochs=(runs["base"]["tokens"] + runs["copying"]["tokens"]) / train_tokens,
        copies_dropped=summary["copies_dropped"],
        near_repeats=summary["near_repeats"],
        heldout_below=corpus.HELDOUT_BELOW,
        heldout_share=corpus.HELDOUT_BELOW / 256,
        heldout_files=", ".join(f"{count} of {kind}" for kind, count in summary["heldout_files"].items()),
        max_shared=corpus.MAX_SHARED,
        telling_line=corpus.TELLING_LINE,
        num_samples=samples[0],
        sample_tokens=samples[0] * samples[1] / 1e6,
    )
    paths.replace_atomically(paths.MODEL_CARD, lambda path: path.write_text(card, encoding="utf-8"))
