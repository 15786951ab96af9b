"""Small model files to read."""

from __future__ import annotations

import atexit
import json
import math
import shutil
import struct
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from paceline.models.embedded import embedded_draft


def finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Have a writer write all that it was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf(path: Path, architecture: str = "llama", **metadata: str | int | float | bool | list[int]) -> Path:
    """Write a GGUF file with 96 F16 weights, 8 F32 ones and a vocabulary of three; ``__`` in keys is a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c"])
    for key, value in metadata.items():
        name = key.replace("__", ".")
        match value:
            case bool():
                writer.add_bool(name, value)
            case str():
                writer.add_string(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case list():
                writer.add_array(name, value)
    writer.add_tensor("token_embd.weight", np.ones((3, 32), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    return finish(writer, path)


@cache
def _draft() -> gguf.GGUFReader:
    """Read the embedded draft once: what reads all of a vocabulary in Python takes a third of a second."""
    return gguf.GGUFReader(embedded_draft())


def _reader(path: Path) -> gguf.GGUFReader:
    return _draft() if path == embedded_draft() else gguf.GGUFReader(path)


def edited_gguf(destination: Path, edits: dict[str, Any], source: Path | None = None, **options: int) -> Path:
    """Write a GGUF file again with other metadata; ``None`` takes a key out."""
    reader = _reader(source or embedded_draft())
    writer = gguf.GGUFWriter(destination, edits.get("general.architecture", "llama"), **options)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture" or key in edits:
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    for key, value in edits.items():
        if value is not None and key != "general.architecture":
            kind = gguf.GGUFValueType.get_type(value)
            # Numbers of the metadata are unsigned, all of them.
            writer.add_key_value(key, value, gguf.GGUFValueType.UINT32 if kind == gguf.GGUFValueType.INT32 else kind)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    return finish(writer, destination)


@cache
def in_f32(source: Path) -> Path:
    """Return a model with its weights in F32, written once: their kernels lay nothing out anew, and round nothing."""
    from paceline.conversion.quantize import quantize_gguf

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    path = folder / f"{source.stem.partition('-')[0]}-f32.gguf"
    quantize_gguf(source, path, "F32")
    return path


def metadata(path: Path) -> dict[str, Any]:
    fields = _reader(path).fields
    return {key: field.contents() for key, field in fields.items() if not key.startswith("GGUF.")}


def with_last_tokens(destination: Path, texts: Sequence[str], **edits: Any) -> Path:
    """Write the embedded draft with other texts for its last tokens, which become control tokens."""
    content = metadata(embedded_draft())
    tokens, types = content["tokenizer.ggml.tokens"], content["tokenizer.ggml.token_type"]
    tokens[-len(texts) :] = texts
    types[-len(texts) :] = [gguf.TokenType.CONTROL] * len(texts)
    merges = [merge for merge in content["tokenizer.ggml.merges"] if merge.replace(" ", "") in tokens]
    vocabulary = {"tokens": tokens, "token_type": [int(kind) for kind in types], "merges": merges}
    return edited_gguf(destination, {f"tokenizer.ggml.{key}": value for key, value in {**vocabulary, **edits}.items()})


def split_gguf(source: Path, folder: Path, num_parts: int = 3) -> list[Path]:
    """Write a GGUF file again, split into parts named after it, as llama-gguf-split does; return them in order."""
    split = {"split_max_tensors": math.ceil(len(_reader(source).tensors) / num_parts)}
    edited_gguf(folder / source.name, {}, source, **split)
    parts = sorted(folder.glob(f"{source.stem}-*-of-*.gguf"))
    assert len(parts) == num_parts
    return parts


def write_folder(folder: Path, **config: object) -> Path:
    """Write a Hugging Face folder with 24 float32 weights and 4 bfloat16 ones, and a card."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [4, 6], "data_offsets": [0, 96]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [96, 104]},
        }
    ).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(104))
    (folder / "README.md").write_text(
        "---\nlicense: apache-2.0\n---\n\n# A title\n\nA model that does nothing.\n\nMore.\n"
    )
    return folder
