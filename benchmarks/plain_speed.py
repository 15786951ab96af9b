"""Plain decoding through paceline against llama.cpp's own counters for the same passes, on a 1B-shaped model.

The weights are random: speed does not depend on them, and nothing has to be downloaded. What limits the figure is the
Python time around each pass; llama.cpp's counter sees only the pass.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paceline.conversion.llama import LlamaShape
from paceline.core.params import SamplingParams, StopRules
from paceline.engines.llama_cpp import LlamaCppEngine
from paceline.engines.options import ModelOptions
from paceline.planning.policies.fixed import NO_SPECULATION
from paceline.runtime.loop import DecodingLoop

SHAPE = LlamaShape(16, 2048, 8192, heads=32, kv_heads=8, head_size=64, vocab_size=32_000, tied=True)
REPEATS = 5
ANSWER_TOKENS = 96


def measure() -> dict[str, Any]:
    """Return paceline's decode speed over llama.cpp's, with the spread of the runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random-1b-q4_0.gguf"
        write_random_llama(path)
        with closing(LlamaCppEngine(ModelOptions(path, context_length=512))) as engine:
            # The loop itself, as the counters are set back between two of its rounds.
            loop = DecodingLoop(engine, [], NO_SPECULATION)
            ratios, speeds = [], []
            for repeat in range(REPEATS + 1):
                request = loop.add([5, 6, 7], SamplingParams(0.0), StopRules(ANSWER_TOKENS, ignore_end=True))
                loop.step()  # the prompt's pass is not decoding
                engine.reset_decode_counters()
                while loop.active:
                    loop.step()
                passes, seconds = engine.decode_counters()
                assert passes == request.stats.rounds
                if repeat:  # the first brings the weights into memory
                    ratios.append((passes / request.stats.decode_s) / (passes / seconds))
                    speeds.append(passes / seconds)
    print(
        f"1B shape, Q4_0, --no-speculation: {statistics.median(ratios):.4f} of llama.cpp's counters "
        f"({min(ratios):.4f} to {max(ratios):.4f}), which give {statistics.median(speeds):.2f} t/s"
    )
    return {"ratio": statistics.median(ratios), "ratios": ratios, "llama_cpp_per_second": speeds}


def write_random_llama(path: Path) -> None:
    """Write a GGUF of the Llama 3.2 1B shape with a 32k vocabulary and random Q4_0 blocks."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    SHAPE.add_to_gguf(writer)
    writer.add_context_length(2048)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*(f"t{i}" for i in range(SHAPE.vocab_size - 1)), "<|endoftext|>"])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * (SHAPE.vocab_size - 1) + [int(gguf.TokenType.CONTROL)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(SHAPE.vocab_size - 1)
    for name, dimensions in SHAPE.tensors().items():
        if len(dimensions) == 1:
            writer.add_tensor(name, np.ones(dimensions, np.float32))
        else:
            rows, columns = dimensions
            blocks = rng.integers(0, 256, (rows, columns // 32, 18), dtype=np.uint8)
            blocks[:, :, :2] = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)  # each block's scale
            data = blocks.reshape(rows, columns // 32 * 18)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
