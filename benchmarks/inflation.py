"""``python -m benchmarks inflation``: inflated models against their source for text, and against their size for speed.

Texts: greedy answers to held-out prompts, by the source quantised by llama.cpp and by the inflated model of the same
type. The weights are the same blocks, so answers can only differ by the rounding of norms, and not even by that in
shapes whose norms are exact.

Speed: llama.cpp's counters for passes of one token, against a model of the same shape and type with random weights.
What limits it is reading the weights from memory. The two take turns; the ratio is of the medians.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import typer
from rich.progress import track

from paceline.api import Model
from paceline.cli.display import error_console
from paceline.conversion.quantize import quantize_gguf
from paceline.core.arrays import FloatArray
from paceline.core.divergence import first_difference, judge_divergence
from paceline.core.errors import InputError
from paceline.core.params import SamplingParams, StopRules
from paceline.core.sampling import RowSampler
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.options import ModelOptions
from paceline.lab.comparison import measure_rounding
from paceline.lab.inflate import PRESETS, LlamaShape, find_file_type, fit_shape, inflate
from paceline.machine import machine
from paceline.models.embedded import HELDOUT_KINDS, heldout
from paceline.models.registry import resolve_model
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.loop import DecodingLoop
from paceline.runtime.worker import Worker
from paceline.streams import Generation

PROMPT_CHARACTERS = 300
CONTEXT_TOKENS = 1024

EPILOG = """[bold]Examples[/bold]

python -m benchmarks inflation

python -m benchmarks inflation --types Q4_0 --prompts 4 --tokens 32 --repeats 3

python -m benchmarks inflation --preset 3b --types Q4_K_M --kind prose
"""


def inflation(
    source: Annotated[str, typer.Option("--source", help="A Llama model by path or name.")] = "target",
    preset: Annotated[str, typer.Option("--preset", help=f"Among {', '.join(PRESETS)}.")] = "1b",
    types: Annotated[str, typer.Option("--types", metavar="NAME[,...]")] = "F16,Q8_0,Q4_0,Q4_K_M",
    prompts: Annotated[int, typer.Option("--prompts", help="Held-out texts to answer; 0 leaves texts out.")] = 20,
    tokens: Annotated[int, typer.Option("--tokens", help="Length of an answer.")] = 64,
    kind: Annotated[str, typer.Option("--kind", help=f"Of text, among {', '.join(HELDOUT_KINDS)}.")] = "code",
    repeats: Annotated[int, typer.Option("--repeats", help="Runs of each model for speed; 0 leaves it out.")] = 7,
    threads: Annotated[int | None, typer.Option("--threads", help="CPU threads. \\[one a core]")] = None,
) -> None:
    """Compare inflated models with their source for text, and with random weights of their shape for speed."""
    if not 1 <= tokens <= CONTEXT_TOKENS // 2:
        raise InputError(f"--tokens {tokens} is out of range: give 1 to {CONTEXT_TOKENS // 2}")
    names = [find_file_type(name.strip()) for name in types.split(",")]
    path = resolve_model(source)
    shape = fit_shape(LlamaShape.from_gguf(path), preset)
    figures: dict[str, Any] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            large = Path(folder) / "large.gguf"
            inflate(path, large, shape, file_type=name)
            figures[name] = {"bytes": large.stat().st_size, "parameters": shape.num_parameters}
            if prompts:
                quantize_gguf(path, Path(folder) / "plain.gguf", name)
                with _model(Path(folder) / "plain.gguf", threads) as plain, _model(large, threads) as inflated:
                    texts = [text[:PROMPT_CHARACTERS] for text in heldout(kind)[:prompts]]
                    figures[name]["texts"] = compare_texts(plain, inflated, texts, tokens, f"{preset} {name}")
            if repeats:
                random = Path(folder) / "random.gguf"
                write_random_llama(Path(folder) / "f16.gguf", shape)
                quantize_gguf(Path(folder) / "f16.gguf", random, name)
                (Path(folder) / "f16.gguf").unlink()
                figures[name]["speed"] = compare_speed(large, random, tokens, repeats, threads, f"{preset} {name}")
    print(json.dumps({"machine": machine(), "inflation": {"preset": preset, "kind": kind, "types": figures}}))


def compare_texts(plain: Model, inflated: Model, texts: list[str], num_tokens: int, name: str) -> dict[str, Any]:
    """Return how many greedy answers are equal, how far logits after them are apart, and why any answer differs."""
    differences: list[float] = []
    divergences: list[dict[str, Any]] = []
    for number, text in enumerate(track(texts, description=f"{name}, texts", transient=True, console=error_console())):
        answers = [_answer(model, text, num_tokens) for model in (plain, inflated)]
        prompt = list(plain.target.vocabulary.tokenize(text))
        index = first_difference(answers[0].token_ids, answers[1].token_ids)
        history = [*prompt, *answers[0].token_ids[:index]]
        plain_row, inflated_row = (
            model.worker.call(functools.partial(_last_row, model, history)) for model in (plain, inflated)
        )
        differences.append(float(np.abs(plain_row - inflated_row).max()))
        if index is not None:
            # An idle sequence may hold the engine's last handle.
            plain.worker.call(plain.pool.make_room)
            divergence = judge_divergence(
                index,
                plain_row,
                inflated_row,
                RowSampler(SamplingParams(temperature=0.0), len(prompt)),
                history,
                rounding=plain.worker.call(functools.partial(measure_rounding, plain.target, history, len(prompt))),
                tolerance=plain.target.capabilities.logit_tolerance,
            )
            divergences.append(
                {"prompt": number, "token": index, "margin": divergence.margin}
                | {"rounding": divergence.rounding, "verdict": divergence.verdict}
            )
    equal = len(texts) - len(divergences)
    same_bits = sum(difference == 0 for difference in differences)
    print(
        f"{name}: {equal} of {len(texts)} answers of {num_tokens} tokens equal; logits after them the same bits in "
        f"{same_bits}, at most {max(differences):.2g} apart"
    )
    for entry in divergences:
        print(f"  prompt {entry['prompt']}, token {entry['token']}: {entry['verdict']}, margin {entry['margin']}")
    return {"prompts": len(texts), "equal": equal, "same_bits": same_bits, "divergences": divergences} | {
        "logit_differences": differences
    }


def compare_speed(
    inflated: Path, random: Path, num_tokens: int, repeats: int, threads: int | None, name: str
) -> dict[str, Any]:
    """Return tokens per second of both models, in turns, and the ratio of their medians."""
    speeds: dict[str, list[float]] = {"inflated": [], "random": []}
    with ExitStack() as stack:
        # The loop itself, as the counters are set back between two of its rounds.
        engines = {
            "inflated": stack.enter_context(closing(_engine(inflated, threads))),
            "random": stack.enter_context(closing(_engine(random, threads))),
        }
        for repeat in track(range(repeats + 1), description=f"{name}, speed", transient=True, console=error_console()):
            for which, engine in engines.items():
                loop = DecodingLoop(engine, [], NO_SPECULATION)
                loop.add([5, 6, 7], SamplingParams(0.0), StopRules(num_tokens, ignore_end=True))
                loop.step()  # the prompt's pass is not decoding
                engine.reset_decode_counters()
                while loop.active:
                    loop.step()
                passes, seconds = engine.decode_counters()
                if repeat:  # the first brings the weights into memory
                    speeds[which].append(passes / seconds)
    ratio = statistics.median(speeds["inflated"]) / statistics.median(speeds["random"])
    spread = {which: [float(q) for q in np.quantile(values, (0.25, 0.5, 0.75))] for which, values in speeds.items()}
    shown = ", ".join(f"{which} {q[1]:.2f} t/s ({q[0]:.2f} to {q[2]:.2f})" for which, q in spread.items())
    print(f"{name}: {shown}, medians with quartiles; ratio {ratio:.3f}")
    return {"ratio": ratio, "quartiles": spread, "tokens_per_second": speeds}


def write_random_llama(path: Path, shape: LlamaShape) -> None:
    """Write an F16 GGUF file of a shape, with the same million random weights over and over."""
    weights = (np.random.default_rng(0).standard_normal(1_000_003) * 0.02).astype(np.float16)
    writer = gguf.GGUFWriter(path, "llama")
    shape.add_to_gguf(writer)
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(f"t{i}" for i in range(shape.vocab_size - 1)), "<|endoftext|>"])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * (shape.vocab_size - 1) + [int(gguf.TokenType.CONTROL)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(shape.vocab_size - 1)
    tensors = shape.tensors()
    for name, dimensions in tensors.items():
        dtype = np.dtype(np.float32 if len(dimensions) == 1 else np.float16)
        writer.add_tensor_info(name, dimensions, dtype, int(np.prod(dimensions)) * dtype.itemsize)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for dimensions in tensors.values():
        vector = len(dimensions) == 1
        writer.write_tensor_data(np.ones(dimensions, np.float32) if vector else np.resize(weights, dimensions))
    writer.close()


def _model(path: Path, threads: int | None) -> Model:
    worker = Worker()
    return Model(worker.call(lambda: _engine(path, threads)), [], NO_SPECULATION, worker=worker)


def _engine(path: Path, threads: int | None) -> LlamaCppEngine:
    return LlamaCppEngine(ModelOptions(path, context_length=CONTEXT_TOKENS, threads=threads, max_sequences=2))


def _answer(model: Model, text: str, num_tokens: int) -> Generation:
    return model.generate(text, max_tokens=num_tokens, temperature=0.0, ignore_end=True)


def _last_row(model: Model, token_ids: list[int]) -> FloatArray:
    """Return the logits after a text, read in as few passes as possible."""
    engine = model.target
    sequence = engine.open()
    try:
        for start in range(0, len(token_ids), engine.capabilities.max_rows):
            part = token_ids[start : start + engine.capabilities.max_rows]
            parents = [COMMITTED_END, *range(len(part) - 1)]
            row = np.array(engine.forward([Step(sequence, part, parents, [len(part) - 1])]).logits(0, 0))
            engine.commit(sequence, range(len(part)))
    finally:
        engine.close_sequence(sequence)
    return row
