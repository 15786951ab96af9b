"""Which GGUF models give their states, and which files have heads that draft from them.

llama.cpp ends its process over layers that an architecture does not give, and over heads that it cannot run: so both
are known by their names, and all else is refused before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from paceline.core.errors import CapabilityError, ModelFileError
from paceline.engines.llama_cpp import native
from paceline.engines.options import OUTPUT_STATE
from paceline.models.description import describe
from paceline.models.gguf_checks import is_mtp_file
from paceline.models.gguf_header import GgufHeader, Value, read_gguf_header
from paceline.models.registry import MTP_FILES

HeadKind: TypeAlias = Literal["mtp", "eagle3", "gemma4-assistant"]

MTP_ARCHITECTURES: Final = frozenset(("qwen35", "qwen35moe"))
"""Architectures whose MTP layer, and the states that it reads, were tried."""
_OF_ASSISTANTS: Final = "gemma4"
"""Architecture of the targets of assistants, whose own name goes on from it."""
_WITH_OUTPUT_STATES: Final = MTP_ARCHITECTURES | {_OF_ASSISTANTS}
"""Architectures of which the states that the output layer reads were tried."""
_WITH_LAYER_INPUTS: Final = frozenset(("llama", "qwen3", "qwen3moe"))
"""Architectures of which the inputs of layers were tried, but of the output layer, which these do not give."""

_NAMES: Final = {MTP_FILES: _WITH_OUTPUT_STATES, "eagle3-": _WITH_LAYER_INPUTS}
"""Parts of names of files of heads that can be run here, the best kind first, and what they draft for.

Assistants of Gemma 4 are called ``mtp-``, too.
"""

_Shape: TypeAlias = tuple[bool, int, int, int]

_EAGLE_LAYERS: Final = 3
"""States of so many layers are what llama.cpp's graph of EAGLE-3 reads."""


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A head in a file.

    Attributes:
        kind: how it drafts.
        layers: whose states it reads, as ``ModelOptions.hold_states`` has them.
        target_width: numbers of one of these states; ``None`` where the file does not say it.
        borrows: it has no embedding or no output layer of its own, and takes those of its target.
    """

    kind: HeadKind
    layers: tuple[int, ...]
    target_width: int | None = None
    borrows: bool = False

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
        layers = said.get("gemma4-assistant.block_count")
        if not isinstance(layers, int) or said.get("gemma4-assistant.nextn_predict_layers") != layers:
            raise ModelFileError(
                f"{path} has {layers} layers, and {said.get('gemma4-assistant.nextn_predict_layers')} of them draft "
                "(gemma4-assistant.nextn_predict_layers): convert it anew"
            )
        return HeadFile("gemma4-assistant", (OUTPUT_STATE,), borrows=True)
    if is_mtp_file(header):
        head = _mtp_layer(header)
        if head is None:
            raise CapabilityError(
                f"{path} is no head that can be run here: one MTP layer for {', '.join(sorted(MTP_ARCHITECTURES))} can"
            )
        return head
    if said.get("general.architecture") != "eagle3":
        raise CapabilityError(
            f"{path} is a head of the kind {said.get('general.architecture')}, and MTP, EAGLE-3 and "
            "assistants of Gemma 4 can be run here: name another draft model"
        )
    layers, width = said.get("eagle3.target_layers"), said.get("eagle3.target_hidden_size")
    if not isinstance(layers, list) or len(layers) != _EAGLE_LAYERS or not all(type(each) is int for each in layers):
        raise ModelFileError(
            f"{path} names no {_EAGLE_LAYERS} layers of its target (eagle3.target_layers): convert it anew"
        )
    if said.get("eagle3.block_count") != 1:
        raise CapabilityError(f"{path} has {said.get('eagle3.block_count')} layers, and EAGLE-3 is run here with one")
    borrows = not {"token_embd.weight", "output.weight"} <= set(header.tensors)
    return HeadFile("eagle3", tuple(map(int, layers)), width if isinstance(width, int) else None, borrows)


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
            f"{path} is no head of {target.name}: the keys and values that it reads are not those of the last two "
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
