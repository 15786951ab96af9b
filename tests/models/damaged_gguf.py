"""GGUF files with a damaged header, by seed: any key, tensor or count with any value, and all of it cut short.

Most are one or two steps from a file that works, as what is wrong everywhere is refused at the first look.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gguf.constants import Keys

_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64, _FLOAT64 = 4, 5, 6, 7, 8, 9, 10, 12
_WHOLE: Final = (0, 1, 2, 3, 4, 5, 10, 11)

_NUMBERS: Final[Sequence[int]] = (
    *(0, 1, 2, 3, 5, 7, 8, 13, 31, 32, 33, 64, 100, 255, 256, 257, 511, 512, 513, 1000, 4096, 65535, 65536, 1 << 20),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -7, -(2**31), -(2**63)),
)
_FLOATS: Final[Sequence[float]] = (
    *(0.0, -0.0, 1.0, -1.0, -1e-5, 1e-5, 1e-45, 1e-30, 0.5, 2.0, 1e4, 1e9, 1e30, 3e38, -3e38),
    *(float("nan"), float("inf"), float("-inf")),
)
_TEXTS: Final[Sequence[bytes]] = (
    *(b"", b" ", b"\0", b"a\0b", b"\xff\xfe", b"\xe2\x96", b"x", b"none", b"no_vocab", b"default", b"linear", b"yarn"),
    *(b"longrope", b"nonsense", b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"plamo2", b"gemma4", b"hybriddna"),
    *(b"llama-bpe", b"qwen2", b"smollm", b"gpt-4o", b"chatglm-bpe", b"deepseek-llm", b"superbpe", b"tekken"),
    *(b"qwen3", b"qwen3moe", b"gemma3", b"mamba", b"lfm2", b"qwen35", b"deepseek2", b"gemma4", b"phi3", b"falcon"),
    *(b"clip", b"silu", b"gelu", b"tanh", b"None", b"rank", b"-1", b"NaN", b"{{", b"{% for x in range(10**9) %}"),
    *(b"x" * 300, b"y" * 100_000, "\u2581".encode(), "\U0001f600".encode() * 40),
)


def _keys(group: type = Keys) -> Iterator[str]:
    """Yield the keys that llama.cpp's own package knows."""
    for value in vars(group).values():
        if isinstance(value, type):
            yield from _keys(value)
        elif isinstance(value, str) and "." in value and " " not in value:
            yield value


_MORE: Final = ("{arch}.attention.recurrent_layers", "{arch}.rope.scale_linear", "tokenizer.ggml.cls_token_id")
"""Keys that llama.cpp reads and the package does not name."""
_KNOWN: Final = sorted({*_keys(), *_MORE})
_OF_ARCHITECTURE: Final[Sequence[str]] = [
    key.removeprefix("{arch}.") for key in _KNOWN if key.startswith("{arch}.") and key.count("{") == 1
]
"""Keys that begin with the name of the architecture; most files have a dozen of them."""
_OF_TOKENIZER: Final[Sequence[str]] = [
    key.removeprefix("tokenizer.ggml.") for key in _KNOWN if key.startswith("tokenizer.ggml.")
]
_OF_ALL: Final[Sequence[str]] = (
    "general.alignment",
    "general.architecture",
    "general.file_type",
    "general.name",
    "general.quantization_version",
    "general.sampling.temp",
    "general.sampling.top_k",
    "general.type",
    "split.count",
    "split.no",
    "split.tensors.count",
    "tokenizer.chat_template",
)
_TENSOR_NAMES: Final[Sequence[bytes]] = (
    *(b"output.weight", b"token_embd.weight", b"output_norm.weight", b"rope_freqs.weight", b"rope_factors_long.weight"),
    *(b"blk.0.attn_q.bias", b"blk.0.attn_qkv.weight", b"blk.0.ffn_gate_inp.weight", b"blk.1.attn_norm.weight"),
    *(b"blk.0.nextn.eh_proj.weight", b"blk.9.attn_q.weight", b"", b"x" * 63, b"x" * 64, b"y" * 400, b"a\0b", b"\xff"),
)


@dataclass
class Key:
    """A key of the metadata.

    Attributes:
        name: of it.
        kind: GGUF's number for its type.
        value: a number, bytes of a text, or of an array a list of either.
        item_kind: of an array, the number for the type of its items.
    """

    name: bytes
    kind: int
    value: Any
    item_kind: int = 0


@dataclass
class Tensor:
    """What the header says of a tensor; the shape is as it stands in the file, the shortest stride first."""

    name: bytes
    shape: list[int]
    kind: int
    offset: int


@dataclass
class Header:
    """All that stands before the weights, and what the counts say where they lie."""

    keys: list[Key]
    tensors: list[Tensor]
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    weights: bytes = b""
    weights_bytes: int = 0
    """Of the file after the header; what ``weights`` does not have is zeros, which take no room on the disk."""
    cut: float | None = None
    """Share of the header that is left of the file."""
    flips: list[tuple[float, int]] = field(default_factory=list)
    """Share of the header at which a byte is changed, and what by."""

    def get(self, name: str) -> Key | None:
        return next((key for key in self.keys if key.name == name.encode()), None)

    @property
    def architecture(self) -> str:
        key = self.get("general.architecture")
        return key.value.decode("utf-8", "replace") if key and isinstance(key.value, bytes) else "llama"

    def write(self, path: Path) -> Path:
        """Write a file with this header."""
        content = b"".join(self._pieces())
        alignment = self.get("general.alignment")
        step = alignment.value if alignment and isinstance(alignment.value, int) else 32
        content += bytes(-len(content) % step if 0 < step <= 1 << 16 else 0)
        damaged = bytearray(content)
        for place, change in self.flips:
            damaged[int(place * (len(damaged) - 1))] ^= change
        with path.open("wb") as file:
            if self.cut is not None:
                file.write(damaged[: int(self.cut * len(damaged))])
            else:
                file.write(damaged)
                file.write(self.weights)
                file.truncate(len(damaged) + self.weights_bytes)
        return path

    def _pieces(self) -> list[bytes]:
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.keys) if self.num_keys is None else self.num_keys,
        )
        pieces = [self.magic, struct.pack("<IQQ", self.version, *(count % 2**64 for count in counts))]
        for key in self.keys:
            pieces += [_text(key.name), struct.pack("<I", key.kind)]
            if key.kind == _ARRAY:
                pieces.append(struct.pack("<IQ", key.item_kind, len(key.value)))
                pieces += [_packed(key.item_kind, item) for item in key.value]
            else:
                pieces.append(_packed(key.kind, key.value))
        for tensor in self.tensors:
            pieces += [_text(tensor.name), struct.pack("<I", len(tensor.shape))]
            pieces += [struct.pack("<Q", length % 2**64) for length in tensor.shape]
            pieces.append(struct.pack("<IQ", tensor.kind % 2**32, tensor.offset % 2**64))
        return pieces


def read(path: Path, *, with_weights: bool = True) -> Header:
    """Read a sound file; without its weights they are zeros, which take no room on the disk."""
    data = path.read_bytes()
    offset = 4

    def scalar(layout: str) -> Any:
        nonlocal offset
        (value,) = struct.unpack_from(layout, data, offset)
        offset += struct.calcsize(layout)
        return value

    def text() -> bytes:
        nonlocal offset
        length = scalar("<Q")
        offset += length
        return data[offset - length : offset]

    version, num_tensors, num_keys = scalar("<I"), scalar("<Q"), scalar("<Q")
    keys = []
    for _ in range(num_keys):
        name, kind, item_kind = text(), scalar("<I"), 0
        if kind == _ARRAY:
            item_kind, length = scalar("<I"), scalar("<Q")
            value: Any = [text() if item_kind == _STRING else scalar(_SCALARS[item_kind]) for _ in range(length)]
        else:
            value = text() if kind == _STRING else scalar(_SCALARS[kind])
        keys.append(Key(name, kind, value, item_kind))
    tensors = []
    for _ in range(num_tensors):
        name = text()
        shape = [scalar("<Q") for _ in range(scalar("<I"))]
        tensors.append(Tensor(name, shape, scalar("<I"), scalar("<Q")))
    header = Header(keys, tensors, version=version)
    alignment = header.get("general.alignment")
    step = alignment.value if alignment else 32
    start = -(-offset // step) * step
    header.weights_bytes = len(data) - start
    header.weights = data[start:] if with_weights else b""
    return header


def damage(sound: Header, seed: int) -> tuple[Header, str]:
    """Return a header with some damage, most often one piece, and what it is."""
    draw = random.Random(seed)
    header = copied(sound)
    done = [draw.choices(_KINDS, _WEIGHTS)[0](header, draw) for _ in range(draw.choice((1, 1, 1, 1, 2, 3)))]
    return header, "; ".join(done)


def copied(header: Header) -> Header:
    """Return a copy whose keys and tensors are its own; long lists are shared until they are replaced."""
    copied = copy.copy(header)
    copied.keys = [copy.copy(key) for key in header.keys]
    copied.tensors = [Tensor(tensor.name, list(tensor.shape), tensor.kind, tensor.offset) for tensor in header.tensors]
    copied.flips = list(header.flips)
    return copied


def set_key(header: Header, name: str, value: Any, kind: int | None = None) -> str:
    """Set a key to a value, in place of what it has; its type is guessed where it is not given."""
    encoded = value.encode() if isinstance(value, str) else value
    if isinstance(encoded, list):
        items = [item.encode() if isinstance(item, str) else item for item in encoded]
        key = Key(name.encode(), _ARRAY, items, (_INT32 if kind is None else kind) if items else _INT32)
        if kind is None and items:
            key.item_kind = _kind_of(items[0])
    else:
        key = Key(name.encode(), _kind_of(encoded) if kind is None else kind, encoded)
    header.keys = [key if each.name == key.name else each for each in header.keys]
    if key not in header.keys:
        header.keys.append(key)
    return f"{name}={_shown(encoded)} ({key.kind})"


# --- kinds of damage --------------------------------------------------------------------------------------------------


def _change_value(header: Header, draw: random.Random) -> str:
    """Give a key that is there another value of its type."""
    key = draw.choice(header.keys)
    if key.kind == _ARRAY:
        return _change_array(header, draw)
    key.value = _value(key.kind, draw, key.value)
    return f"{_name(key)}={_shown(key.value)}"


def _change_type(header: Header, draw: random.Random) -> str:
    key = draw.choice(header.keys)
    key.kind = draw.choice((*_SCALARS, _STRING, _ARRAY))
    if key.kind == _ARRAY:
        key.item_kind = draw.choice((*_SCALARS, _STRING))
        key.value = [_value(key.item_kind, draw, None) for _ in range(draw.choice((0, 1, 2, 3, 4, 30, 600)))]
    else:
        key.value = _value(key.kind, draw, None)
    return f"{_name(key)} of type {key.kind}/{key.item_kind}={_shown(key.value)}"


def _add_key(header: Header, draw: random.Random) -> str:
    """Set a key that llama.cpp knows, most of which no file of this architecture has."""
    name = draw.choice(
        (
            f"{header.architecture}.{draw.choice(_OF_ARCHITECTURE)}",
            f"{header.architecture}.{draw.choice(_OF_ARCHITECTURE)}",
            f"tokenizer.ggml.{draw.choice(_OF_TOKENIZER)}",
            draw.choice(_OF_ALL),
        )
    )
    there = header.get(name)
    if name.endswith(("type", "model", "pre", "template", "architecture", "general.name")):
        value: Any = draw.choice(_TEXTS)
        kind = _STRING
    elif there is not None and there.kind != _ARRAY and draw.random() < 0.7:
        kind, value = there.kind, _value(there.kind, draw, there.value)
    else:
        kind = draw.choice((_UINT32, _UINT32, _FLOAT32, _FLOAT32, _BOOL, _INT32, _UINT64, _STRING))
        value = _value(kind, draw, None)
        if draw.random() < 0.15:
            length = draw.choice((0, 1, 2, 3, 4, 6, 30, 512, 600))
            item_kind = draw.choice((_UINT32, _INT32, _FLOAT32, _BOOL))
            items = [_value(item_kind, draw, None) for _ in range(length)]
            return set_key(header, name, items, item_kind)
    return set_key(header, name, value, kind)


def _drop_key(header: Header, draw: random.Random) -> str:
    key = header.keys.pop(draw.randrange(len(header.keys)))
    return f"without {_name(key)}"


def _repeat_key(header: Header, draw: random.Random) -> str:
    key = copy.copy(draw.choice(header.keys))
    header.keys.append(key)
    return f"{_name(key)} twice"


def _change_array(header: Header, draw: random.Random) -> str:
    """Change a list of the vocabulary, or another: its length, one of its items or many."""
    arrays = [key for key in header.keys if key.kind == _ARRAY]
    if not arrays:
        return _add_key(header, draw)
    key = draw.choice(arrays)
    items = list(key.value)
    what = draw.randrange(9)
    place = draw.randrange(len(items)) if items else 0
    if not items or what == 0:
        items.append(_value(key.item_kind, draw, None))
    elif what == 1:
        del items[place]
    elif what == 2:
        items = items[: draw.randrange(len(items))]
    elif what == 3:
        items = []
    elif what == 4:
        items[place] = items[draw.randrange(len(items))]
    elif what == 5:
        for _ in range(draw.choice((1, 1, 5, 100))):
            items[draw.randrange(len(items))] = _value(key.item_kind, draw, None)
    elif what == 6:
        items = [items[place]] * len(items)
    elif what == 7:
        items = items * 2
    else:
        draw.shuffle(items)
    key.value = items
    labels = ("longer", "one less", "cut", "none", "twice", "other", "all one", "double", "mixed")
    return f"{_name(key)}: {labels[what]} at {place}"


def _add_array_of_layers(header: Header, draw: random.Random) -> str:
    """Give a number of all layers one for each layer, as many architectures have it, or too few."""
    layers = header.get(f"{header.architecture}.block_count")
    count = layers.value if layers and isinstance(layers.value, int) and 0 <= layers.value < 1000 else 2
    kind = draw.choice((_UINT32, _INT32, _BOOL, _FLOAT32))
    name = f"{header.architecture}.{draw.choice(_OF_ARCHITECTURE)}"
    length = max(0, count + draw.choice((0, 0, 0, -1, 1, 40)))
    return set_key(header, name, [_value(kind, draw, None) for _ in range(length)], kind)


def _change_tensor(header: Header, draw: random.Random) -> str:
    if not header.tensors:
        return _add_key(header, draw)
    tensor = draw.choice(header.tensors)
    name = tensor.name.decode("utf-8", "replace")[:40]
    what = draw.randrange(10)
    if what == 0:
        tensor.shape[draw.randrange(len(tensor.shape))] = draw.choice(_NUMBERS)
    elif what == 1:
        tensor.shape.append(draw.choice((0, 1, 1, 2)))
    elif what == 2:
        tensor.shape.reverse()
    elif what == 3:
        place = draw.randrange(len(tensor.shape))
        tensor.shape[place] += draw.choice((-1, 1, 32))
    elif what == 4:
        tensor.kind = draw.choice((*range(45), 99, 2**31, 2**32 - 1))
    elif what == 5:
        tensor.offset = draw.choice((*_NUMBERS, tensor.offset + 1, tensor.offset + 32, header.weights_bytes))
    elif what == 6:
        header.tensors.remove(tensor)
    elif what == 7:
        header.tensors.append(copy.deepcopy(tensor))
    elif what == 8:
        tensor.name = draw.choice(_TENSOR_NAMES)
    else:
        tensor.shape = tensor.shape[:-1]
    labels = ("length", "dimension", "turned", "near", "kind", "offset", "gone", "twice", "name", "flat")
    return f"{name} {labels[what]}: {tensor.name[:20]!r} {tensor.shape} {tensor.kind} {tensor.offset}"


def _drop_layer(header: Header, draw: random.Random) -> str:
    """Take all of a layer out, or all but the last, as files of MTP layers alone have it."""
    numbers = {int(each.name.split(b".")[1]) for each in header.tensors if each.name.startswith(b"blk.")}
    if not numbers:
        return _change_tensor(header, draw)
    last = max(numbers)
    gone = draw.choice(([0], [last], list(range(last)), list(numbers)))
    header.tensors = [
        each for each in header.tensors if not each.name.startswith(tuple(b"blk.%d." % number for number in gone))
    ]
    return f"without layers {gone}"


def _change_layout(header: Header, draw: random.Random) -> str:
    """Damage the file itself: its counts, its version, its length, or bytes of it."""
    what = draw.randrange(6)
    if what == 0:
        header.num_tensors = draw.choice((*_NUMBERS, len(header.tensors) + 1, len(header.tensors) - 1))
    elif what == 1:
        header.num_keys = draw.choice((*_NUMBERS, len(header.keys) + 1, len(header.keys) - 1))
    elif what == 2:
        header.version = draw.choice((0, 1, 2, 4, 0x03000000, 2**32 - 1))
    elif what == 3:
        header.cut = draw.random()
    elif what == 4:
        header.weights_bytes = draw.choice((0, header.weights_bytes // 2, header.weights_bytes - 1))
        header.weights = header.weights[: header.weights_bytes]
    else:
        header.flips += [(draw.random(), draw.randrange(1, 256)) for _ in range(draw.choice((1, 1, 3, 20)))]
    return ("tensors", "keys", "version", "cut", "weights", "flips")[what]


_KINDS: Final[Sequence[Callable[[Header, random.Random], str]]] = (
    _change_value,
    _change_type,
    _add_key,
    _drop_key,
    _repeat_key,
    _change_array,
    _add_array_of_layers,
    _change_tensor,
    _drop_layer,
    _change_layout,
)
_WEIGHTS: Final = (20, 8, 30, 5, 1, 12, 8, 12, 2, 6)


def _value(kind: int, draw: random.Random, now: Any) -> Any:
    if kind == _STRING:
        return draw.choice(_TEXTS)
    if kind == _BOOL:
        return draw.random() < 0.5
    if kind in (_FLOAT32, _FLOAT64):
        return draw.choice(_FLOATS)
    near = [] if not isinstance(now, int) else [now + 1, now - 1, now * 2, now // 2, now + 1, now - 1]
    return draw.choice((*_NUMBERS, *near))


def _kind_of(value: Any) -> int:
    match value:
        case bool():
            return _BOOL
        case int():
            return _INT32 if value < 0 else _UINT32 if value < 2**32 else _UINT64
        case float():
            return _FLOAT32
        case _:
            return _STRING


def _packed(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value if isinstance(value, bytes) else b"")
    if kind in _WHOLE:
        size = struct.calcsize(_SCALARS[kind])
        return int(int(value) % 2 ** (8 * size)).to_bytes(size, "little")
    packed: bytes = struct.pack(_SCALARS[kind], value) if kind in _SCALARS else b""
    return packed


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def _name(key: Key) -> str:
    return key.name.decode("utf-8", "replace")


def _shown(value: Any) -> str:
    text = f"[{len(value)}] {value[:4]!r}" if isinstance(value, list) else repr(value)
    return text[:60]
