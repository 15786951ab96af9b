"""Hugging Face folders with some damage, by seed: any entry of their JSON with any value, and files cut short or gone.

Most are one or two steps from a folder that works, as what is wrong everywhere is refused at the first look.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

JSON_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_VALUES: Final[Sequence[Any]] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 63, 65, 512, 513, 100_000, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 10**30),
    *(-(2**31), -(2**63), 0.0, -0.0, 0.5, 1.5, -1.0, 1e-9, 1e9, 1e38, 1e39, 1e300, -1e300),
    *(float("nan"), float("inf"), float("-inf")),
    *("", " ", "x", "\0", "null", "1", "default", "linear", "llama3", "yarn", "longrope", "dynamic", "float32", "int4"),
    *("\ud800", "../../x", "/", "{{", "{{ 1/0 }}", "x" * 5000, "<s>", "\u2581", "\u0120", "gelu", "swish", "mistral"),
    *([], [None], [0], [-1], ["x"], [[]], [1, 2, 3], ["a", "b"], [{}], [0] * 1000, {}, {"x": 1}, {"": None}),
    *({"rope_type": "linear"}, {"rope_type": "llama3", "factor": 0}, {"type": "yarn", "factor": "x"}, {"content": 1}),
)
_CONFIG_KEYS: Final[Sequence[str]] = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
    *("rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "sliding_window"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "gguf_metadata"),
    *("text_config", "quantization_config", "layer_types", "partial_rotary_factor", "pretraining_tp", "use_cache"),
    *("auto_map", "is_encoder_decoder", "attn_implementation", "transformers_version", "id2label", "num_labels"),
)
_TOKENIZER_CONFIG_KEYS: Final[Sequence[str]] = (
    *("tokenizer_class", "chat_template", "add_bos_token", "add_eos_token", "bos_token", "eos_token", "unk_token"),
    *("pad_token", "added_tokens_decoder", "model_max_length", "clean_up_tokenization_spaces", "legacy"),
    *("additional_special_tokens", "extra_special_tokens", "add_prefix_space", "padding_side", "auto_map"),
)
_GENERATION_KEYS: Final[Sequence[str]] = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("do_sample", "max_length", "min_length", "suppress_tokens", "transformers_version", "num_beams"),
)
_KEYS: Final = {
    "config.json": _CONFIG_KEYS,
    "tokenizer_config.json": _TOKENIZER_CONFIG_KEYS,
    "generation_config.json": _GENERATION_KEYS,
}


def copy(sound: Path, folder: Path) -> Path:
    """Copy a sound folder to be damaged, in place of what is there."""
    shutil.rmtree(folder, ignore_errors=True)
    return Path(shutil.copytree(sound, folder))


def damage(folder: Path, seed: int) -> str:
    """Damage a folder, most often in one place, and return how."""
    draw = random.Random(seed)
    done = []
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        done.append(draw.choices(_KINDS, _KIND_WEIGHTS)[0](folder, draw))
    return "; ".join(done)


# --- kinds of damage --------------------------------------------------------------------------------------------------


def _set_key(folder: Path, draw: random.Random) -> str:
    """Set a key that whoever reads the folder knows, most of which the folder has."""
    name = draw.choice(tuple(_KEYS))
    content = _read(folder / name)
    if not isinstance(content, dict):
        return f"{name} untouched"
    key = draw.choice(_KEYS[name])
    value = draw.choice(_VALUES)
    content[key] = value
    _write(folder / name, content)
    return f"{name} {key}={_shown(value)}"


def _change_entry(folder: Path, draw: random.Random) -> str:
    """Change, drop or double an entry anywhere within a file."""
    name = draw.choice(JSON_FILES)
    content = _read(folder / name)
    place = _change(content, draw)
    _write(folder / name, content)
    return f"{name} {place}"


def _change_weights(folder: Path, draw: random.Random) -> str:
    """Change what the header of the weights says."""
    path = folder / WEIGHTS
    if not path.is_file():
        return f"{WEIGHTS} untouched"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    place = _change(header, draw)
    text = _dumped(header)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return f"{WEIGHTS} {place}"


def _damage_file(folder: Path, draw: random.Random) -> str:
    """Damage a file as a whole."""
    path = folder / draw.choice((*JSON_FILES, WEIGHTS))
    if not path.is_file():
        return f"{path.name} untouched"
    what = draw.choice(("gone", "empty", "cut", "folder", "bytes", "binary", "deep", "other", "bom", "pointer"))
    data = path.read_bytes()
    match what:
        case "gone":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case "cut":
            path.write_bytes(data[: draw.randrange(len(data) + 1)])
        case "folder":
            path.unlink()
            path.mkdir()
        case "bytes":
            damaged = bytearray(data)
            for _ in range(draw.choice((1, 3, 30))):
                damaged[draw.randrange(min(len(damaged), 4096))] = draw.randrange(256)
            path.write_bytes(bytes(damaged))
        case "binary":
            path.write_bytes(draw.randbytes(200))
        case "deep":
            path.write_bytes(b'{"a":' + b"[" * 100_000)
        case "other":
            path.write_bytes(draw.choice((b"null", b"[]", b'"x"', b"1", b"NaN", b"{}", b'{"a": 1e999}', b"1" * 5000)))
        case "bom":
            path.write_bytes(b"\xef\xbb\xbf" + data)
        case "pointer":
            path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return f"{path.name} {what}"


def _add_index(folder: Path, draw: random.Random) -> str:
    """Put an index in front of the weights, damaged or not."""
    path = folder / WEIGHTS
    if not path.is_file():
        return f"{WEIGHTS} untouched"
    data = path.read_bytes()
    names = [name for name in json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]) if name != "__metadata__"]
    part = "model-00001-of-00001.safetensors"
    path.rename(folder / part)
    index: Any = {"metadata": {"total_size": len(data)}, "weight_map": dict.fromkeys(names, part)}
    place = _change(index, draw) if draw.random() < 0.8 else "sound"
    _write(folder / INDEX, index)
    return f"{INDEX} {place}"


_KINDS: Final[Sequence[Callable[[Path, random.Random], str]]] = (
    _set_key,
    _change_entry,
    _change_weights,
    _damage_file,
    _add_index,
)
_KIND_WEIGHTS: Final = (40, 25, 12, 15, 5)


def _change(content: Any, draw: random.Random) -> str:
    """Change an entry of a tree, in place, and return where and how."""
    places: list[str] = []
    parent: Any = None
    key: Any = None
    here = content
    while isinstance(here, (dict, list)) and here and (parent is None or draw.random() < 0.85):
        parent = here
        key = draw.choice(list(here)) if isinstance(here, dict) else draw.randrange(len(here))
        places.append(str(key)[:30])
        here = parent[key]
    place = "/".join(places)
    if parent is None:
        return "untouched"
    what = draw.choice(("value", "value", "value", "gone", "twice", "near"))
    if what == "gone":
        del parent[key]
    elif what == "twice" and isinstance(parent, list):
        parent.insert(key, here)
    elif what == "near" and isinstance(here, int):
        parent[key] = here + draw.choice((-1, 1, 1000))
    elif what == "near" and isinstance(parent, dict):
        parent[f"{key}x"] = parent.pop(key)
    else:
        value = draw.choice(_VALUES)
        parent[key] = value
        return f"{place}={_shown(value)}"
    return f"{place} {what}"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None


def _write(path: Path, content: Any) -> None:
    if (path.is_file() and content is not None) or not path.exists():
        path.write_bytes(_dumped(content))


def _dumped(content: Any) -> bytes:
    # Half a surrogate pair stays one: as an escape, which JSON has and UTF-8 has not.
    return json.dumps(content).encode()


def _shown(value: Any) -> str:
    return repr(value)[:60]
