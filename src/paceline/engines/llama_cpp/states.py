"""Which GGUF models give their states, and which files have heads that draft from them.

llama.cpp ends its process over layers that an architecture does not give, and over heads that it cannot run: so both
are known by their names, and all else is refused before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.core.errors import CapabilityError, ModelFileError
from paceline.engines.llama_cpp import native
from paceline.engines.options import OUTPUT_STATE
from paceline.models.description import describe
from paceline.models.gguf_checks import is_mtp_file
from paceline.models.gguf_header import GgufHeader, Value, read_gguf_header
from paceline.models.registry import MTP_FILES

HeadKind: TypeAlias = Literal["mtp", "eagle3", "gemma4-assistant", "dflash"]

MTP_ARCHITECTURES: Final = frozenset(("qwen35", "qwen35moe"))
"""Architectures whose MTP layer, and the states that it reads, were tried."""
_OF_ASSISTANTS: Final = "gemma4"
"""Architecture of the targets of assistants, whose own name goes on from it."""
_WITH_OUTPUT_STATES: Final = MTP_ARCHITECTURES | {_OF_ASSISTANTS}
"""Architectures of which the states that the output layer reads were tried."""
_WITH_LAYER_INPUTS: Final = frozenset(("llama", "qwen3", "qwen3moe")) | MTP_ARCHITECTURES
"""Architectures of which the inputs of layers were tried, but of the output layer, which these do not give."""

_NAMES: Final = {
    MTP_FILES: _WITH_OUTPUT_STATES,
    **dict.fromkeys(("dspark-", "dflash-", "eagle3-"), _WITH_LAYER_INPUTS),
}
"""Parts of names of files of heads that can be run here, the best kind first, and what they draft for.

Assistants of Gemma 4 are called ``mtp-``, too.
"""

_Shape: TypeAlias = tuple[bool, int, int, int]

_EAGLE_LAYERS: Final = 3
"""States of so many layers are what llama.cpp's graph of EAGLE-3 reads."""
_MOST_BLOCK_ROWS: Final = 128
"""Most rows of a block; heads of today have 16 or fewer."""


@dataclass(frozen=True, slots=True)
class BlockForm:
    """How a head is asked for a block of tokens: by the root and masks behind it.

    Attributes:
        rows: of a pass, as it was trained.
        first: the row that says the token after the root; those before it say nothing.
        mask_id: the token that stands for one that is to be said.
        causal: whether rows see those before them alone.
        follows: whether what a row says depends on the token before, by weights in the file (DSpark).
        says_confidence: whether it says of each row how likely that is right.
        window: tokens that a row sees, in some layers at least; 0 for all.
    """

    rows: int
    first: int
    mask_id: int
    causal: bool
    follows: bool
    says_confidence: bool
    window: int

    @property
    def size(self) -> int:
        return self.rows - self.first


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head in a file.

    Attributes:
        kind: how it drafts.
        layers: whose states it reads, as ``ModelOptions.hold_states`` has them.
        target_width: numbers of one of these states; ``None`` where the file does not say it.
        borrows: it has no embedding or no output layer of its own, and takes those of its target.
        block: how it is asked for a block; ``None`` for a head that says one token a pass.
    """

    kind: HeadKind
    layers: tuple[int, ...]
    target_width: int | None = None
    borrows: bool = False
    block: BlockForm | None = None

    @property
    def reads_cache(self) -> bool:
        """Whether it has no cache, and reads that of its target."""
        return self.kind == "gemma4-assistant"


def check_states(path: Path, layers: Sequence[int]) -> None:
    """Raise ``CapabilityError`` for states that a model does not give."""
    about = describe(path)
    inputs = [layer for layer in layers if layer != OUTPUT_STATE]
    known = _WITH_OUTPUT_STATES if len(inputs) < len(layers) else _WITH_LAYER_INPUTS
    if not native.GIVES_STATES or about.architecture not in known:
        raise CapabilityError(
            f"{path} gives no states for this head to draft from: models of {', '.join(sorted(known))} do; name "
            "another draft model"
        )
    for layer in inputs:
        if not 0 <= layer < (about.layers or 0):
            raise CapabilityError(
                f"{path} has layers 0 to {(about.layers or 0) - 1}, and its head reads what layer {layer} does: give "
                "the head that was made for this model"
            )


def head_names(target: Path | None = None) -> tuple[str, ...]:
    """Return parts of the names of heads that draft for a target, or for any, the best kind first."""
    architecture = None if target is None else describe(target).architecture
    return tuple(
        name for name, known in _NAMES.items() if native.GIVES_STATES and (not target or architecture in known)
    )


def own_head(path: Path) -> HeadFile | None:
    """Return the MTP layer in a model's own file; ``None`` where there is none that can be run here."""
    return _mtp_layer(native.check_model_file(path).header)


def read_head(path: Path) -> HeadFile:
    """Return the head that a file holds.

    Raises:
        ModelFileError: the file is damaged.
        CapabilityError: it cannot be run here.
    """
    header = native.check_model_file(path, may_be_head=True).header
    said = header.metadata
    if said.get("general.architecture") == "gemma4-assistant":
        num_layers, drafting = (said.get(f"gemma4-assistant.{key}") for key in ("block_count", "nextn_predict_layers"))
        if not isinstance(num_layers, int) or drafting != num_layers:
            raise ModelFileError(
                f"{path} has {num_layers} layers, and {drafting} of them draft "
                "(gemma4-assistant.nextn_predict_layers): convert it anew"
            )
        return HeadFile("gemma4-assistant", (OUTPUT_STATE,), borrows=True)
    if is_mtp_file(header):
        head = _mtp_layer(header)
        if head is None:
            raise CapabilityError(
                f"{path} is not a head that can be run here: one MTP layer for "
                f"{', '.join(sorted(MTP_ARCHITECTURES))} can"
            )
        return head
    if said.get("general.architecture") == "dflash":
        return _read_dflash(path, header)
    if said.get("general.architecture") != "eagle3":
        raise CapabilityError(
            f"{path} is a head of the kind {said.get('general.architecture')}, and MTP, EAGLE-3, DFlash, DSpark and "
            "assistants of Gemma 4 can be run here: name another draft model"
        )
    layers = _target_layers(path, said, _EAGLE_LAYERS)
    width = said.get("eagle3.target_hidden_size")
    if said.get("eagle3.block_count") != 1:
        raise CapabilityError(f"{path} has {said.get('eagle3.block_count')} layers, and EAGLE-3 is run here with one")
    return HeadFile("eagle3", layers, width if isinstance(width, int) else None, _borrows(header))


def _read_dflash(path: Path, header: GgufHeader) -> HeadFile:
    """Return a head that says a block of tokens in one pass: DFlash, or DSpark where each depends on the one before."""
    said = header.metadata
    layers = _target_layers(path, said)
    if said.get("dflash.selector_top_k") or "selector_hidden.weight" in header.tensors:
        raise CapabilityError(f"{path} is a DFlash2 head, and DFlash and DSpark can be run here: name another draft")
    if said.get("dflash.hyper_connection_count"):
        raise CapabilityError(f"{path} is a DSpark head for DeepSeek V4, which is not run here: name another draft")
    follows = "markov_w1.weight" in header.tensors
    starts = follows and said.get("dflash.sample_from_anchor") is not False
    rows, mask_id = said.get("dflash.block_size"), said.get("tokenizer.ggml.mask_token_id")
    if not isinstance(rows, int) or not 2 - starts <= rows <= _MOST_BLOCK_ROWS:
        raise ModelFileError(
            f"{path} has blocks of {rows} rows (dflash.block_size), and {2 - starts} to {_MOST_BLOCK_ROWS} can be "
            "run: convert it anew"
        )
    if not isinstance(mask_id, int) or not 0 <= mask_id < header.array_lengths.get("tokenizer.ggml.tokens", 0):
        raise ModelFileError(
            f"{path} has no token to mask others with (tokenizer.ggml.mask_token_id {mask_id}): convert it anew"
        )
    width, window = said.get("dflash.embedding_length"), said.get("dflash.attention.sliding_window")
    block = BlockForm(
        rows,
        first=0 if starts else 1,
        mask_id=mask_id,
        causal=said.get("dflash.attention.causal") is True,
        follows=follows,
        says_confidence=follows and "conf_proj.weight" in header.tensors,
        window=window if isinstance(window, int) else 0,
    )
    # It reads states of its own width.
    return HeadFile("dflash", layers, width if isinstance(width, int) else None, _borrows(header), block)


def _target_layers(path: Path, said: Mapping[str, Value], number: int | None = None) -> tuple[int, ...]:
    """Return the layers of its target that a head reads; so many of them, where they have to be."""
    key = f"{said.get('general.architecture')}.target_layers"
    layers = said.get(key)
    if (
        not isinstance(layers, list)
        or not all(type(each) is int for each in layers)
        or len(set(layers)) < max(len(layers), 1)
        or (number is not None and len(layers) != number)
    ):
        some = "layers" if number is None else f"{number} layers"
        raise ModelFileError(f"{path} names no {some} of its target ({key}): convert it anew")
    return tuple(map(int, layers))


def _borrows(header: GgufHeader) -> bool:
    return not {"token_embd.weight", "output.weight"} <= set(header.tensors)


def check_token_ids(path: Path, num_tokens: int) -> None:
    """Raise ``ModelFileError`` where a head of fewer tokens than its target has ids that there are not, or one twice.

    llama.cpp would write what it says of them to other memory.
    """
    ids = read_token_ids(path)
    if ids is not None and (len(set(ids.tolist())) < len(ids) or ids.min() < 0 or ids.max() >= num_tokens):
        raise ModelFileError(
            f"{path} has {len(ids)} tokens of its own (d2t), and not each is another one of the {num_tokens} of its "
            "vocabulary: convert it anew"
        )


def read_token_ids(path: Path) -> npt.NDArray[np.int64] | None:
    """Return the tokens of its target that those of a head are; ``None`` where they are the same."""
    header = read_gguf_header(path)
    if "d2t" not in header.tensors:
        return None
    start, end = header.spans["d2t"]
    return np.fromfile(path, np.int64, (end - start) // 8, offset=start)


def check_reads_cache(path: Path, target: Path) -> None:
    """Raise ``CapabilityError`` for a head whose layers read other keys and values than a target has.

    llama.cpp would read past them, or those of another layer. Layers with sliding windows read the last but one of the
    target's, and those without the last.
    """
    own, its = read_gguf_header(path).metadata, read_gguf_header(target).metadata
    last = _last_layers(its, _OF_ASSISTANTS)
    layers = _layers(own, "gemma4-assistant")
    if last is None or not layers or any(shape not in last for shape in layers):
        raise CapabilityError(
            f"{path} is not a head for {target.name}: the keys and values that it reads are not those of the last two "
            "layers; give the head that was made for this model"
        )


def _last_layers(said: Mapping[str, Value], architecture: str) -> list[_Shape] | None:
    """Return the shapes of the last two layers; ``None`` unless only the first of them has a window."""
    last = _layers(said, architecture)[-2:]
    return last if [shape[0] for shape in last] == [True, False] else None


def _layers(said: Mapping[str, Value], architecture: str) -> list[_Shape]:
    """Return of each layer whether it has a sliding window, its heads of keys and values, and their sizes."""

    def value(key: str) -> Any:
        return said.get(f"{architecture}.attention.{key}")

    windows, heads, found = value("sliding_window_pattern"), value("head_count_kv"), []
    if not isinstance(windows, list) or len(windows) != said.get(f"{architecture}.block_count"):
        return []
    for layer, is_window in enumerate(windows):
        count = heads[layer] if isinstance(heads, list) and len(heads) == len(windows) else heads
        end = "_swa" if is_window else ""
        shape = bool(is_window), count, value(f"key_length{end}"), value(f"value_length{end}")
        if not all(isinstance(each, int) for each in shape):
            return []
        found.append(shape)
    return found


def _mtp_layer(header: GgufHeader) -> HeadFile | None:
    """Return the MTP layer that a header has: llama.cpp ends its process over more than one, and some files lack it."""
    architecture = header.metadata.get("general.architecture")
    layers = header.metadata.get(f"{architecture}.block_count")
    is_there = (
        native.GIVES_STATES
        and architecture in MTP_ARCHITECTURES
        and header.metadata.get(f"{architecture}.nextn_predict_layers") == 1
        and isinstance(layers, int)
        and f"blk.{layers - 1}.nextn.eh_proj.weight" in header.tensors
    )
    return HeadFile("mtp", (OUTPUT_STATE,)) if is_there else None
