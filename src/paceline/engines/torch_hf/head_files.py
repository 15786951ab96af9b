"""Which heads Hugging Face folders hold, and which states of their target they read. No torch is needed to ask.

Those that publish EAGLE-3 heads agree on the weights, and not on what is said of them::

    SafeAILab          no layers: they are the usual ones
    SpecForge, NVIDIA  layers in `eagle_config`, mostly counted by what each of them puts out
    speculators        layers at the top, counted by what each of them reads; its shape in `transformer_layer_config`

A mistake of one layer changes no text and costs a fifth of what is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import CapabilityError, ModelFileError
from paceline.core.numbers import shown
from paceline.models.description import describe
from paceline.models.files import explain_damaged_entries, read_json
from paceline.models.weight_files import has_tensor, head_kind

MTP_ARCHITECTURES: Final = frozenset(("deepseek_v3", "glm4_moe", "mellum"))
"""Architectures whose MTP layer transformers has, and was tried here."""

_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
"""Names the layers of the target, whose states a head reads."""

_OTHER_FORMS: Final = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Entries of `eagle_config` that change what a head computes, with the values of EAGLE-3."""


@dataclass(frozen=True, slots=True)
class EagleFile:
    """An EAGLE-3 head in a folder.

    Attributes:
        path: the folder.
        shape: of its own layers, as transformers' configurations have it.
        layers: whose states it reads, as ``ModelOptions.hold_states`` has them.
        target_width: numbers of one of these states.
        norm_before_residual: what its first layer adds to is the state after its norm.
        norm_before_fc: all states are normed as one before they are fused.
        fc_norm: each of the states is normed by itself before they are fused.
        norm_output: what it feeds back for the next draft is its state after the last norm.
    """

    path: Path
    shape: Mapping[str, Any]
    layers: tuple[int, ...]
    target_width: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def has_mtp_layer(folder: Path) -> bool:
    """Return whether a model's folder has the one MTP layer that can be run here: some say so, and leave it out."""
    about = describe(folder)
    said = about.metadata
    return (
        about.architecture in MTP_ARCHITECTURES
        and said.get("num_nextn_predict_layers", said.get("num_mtp_layers")) == 1
        and any(has_tensor(folder, name) for name in (f"model.layers.{about.layers}.eh_proj.weight", "mtp.fc.weight"))
    )


def read_eagle(folder: Path, *, num_layers: int | None, width: int | None) -> EagleFile:
    """Return the EAGLE-3 head that a folder holds for a target of so many layers of that width."""
    kind = head_kind(folder)
    if kind != "eagle3":
        raise CapabilityError(
            f"{folder} is a head of the kind {kind}, and EAGLE-3 and assistants of Gemma 4 can be run here: name "
            "another draft model"
        )
    config = read_json(folder / "config.json")
    with explain_damaged_entries(folder):
        nested = config.get("eagle_config") or {}
        for name, value in _OTHER_FORMS.items():
            if nested.get(name, value) not in (value, None):
                raise CapabilityError(
                    f"{folder} is a head of another form ({name} is {shown(nested[name])}, and EAGLE-3 has {value}): "
                    "name another draft model"
                )
        shape = config.get("transformer_layer_config") or config
        norms = {
            name: bool(config.get(name, nested.get(name)))
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        }
        if num_layers is None or width is None:
            raise CapabilityError(
                f"{folder} drafts for a model that says how many layers it has, and of what width: this one does not"
            )
        said = config.get("target_hidden_size") or width
        if said != width:
            raise CapabilityError(
                f"{folder} is not a head for this target: its target's width is {shown(said)}, "
                f"not {width}; give the head "
                "that was made for this model, or leave it out"
            )
        return EagleFile(folder, shape, _layers_read(folder, config, num_layers), width, **norms)


def _layers_read(folder: Path, config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Return the layers of the target by what they read; the number of layers is what the output layer does.

    In ``eagle_config`` some count by what layers put out. Their first is the first layer, which nobody reads that
    counts the other way (github.com/sgl-project/sglang/pull/25454).
    """
    layers = config.get(_LAYERS)
    if layers is None:
        layers = (config.get("eagle_config") or {}).get(_LAYERS)
        if layers and layers[0] == 1:
            layers = [layer + 1 for layer in layers]
    # The default of SafeAILab's code, github.com/SafeAILab/EAGLE.
    found = tuple(layers or (2, num_layers // 2, num_layers - 3))
    if not all(type(layer) is int for layer in found):
        raise ModelFileError(f"{folder} names layers {shown(layers)} ({_LAYERS}), and layers have whole numbers")
    if list(found) != sorted(set(found)) or not 0 <= found[0] <= found[-1] <= num_layers:
        raise CapabilityError(
            f"{folder} reads what layers {', '.join(map(str, found))} of its target read, and this one has layers 0 to "
            f"{num_layers - 1}: give the head that was made for this model, or name the layers in ascending order in "
            f"its config.json ({_LAYERS})"
        )
    return found
