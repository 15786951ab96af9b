"""Heads of Hugging Face models, which draft from the states of the model that they belong to, as modules and engines.

The layers are transformers' own, over the pool and the masks of every model here. EAGLE-3 is not among its models, so
what stands around its layers is here; an MTP layer it has whole::

    states of the target ──norm──fc──> state ──norm──┐
    token ──────────────────embedding────────norm────┴─> first layer ──> further ones ──> own state ──norm──> logits

Source: https://arxiv.org/abs/2503.01840, section 3; the norms before ``fc`` and of the own state,
https://arxiv.org/abs/2605.09992.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError, EngineError, InputError, ModelFileError
from paceline.engines.base import COMMITTED_END, Step
from paceline.engines.options import OUTPUT_STATE
from paceline.engines.state_track import states_for_rows
from paceline.engines.torch_hf.cells import SequenceCells
from paceline.engines.torch_hf.engine import TorchHFEngine
from paceline.engines.torch_hf.head_files import MTP_ARCHITECTURES, EagleFile, has_mtp_layer, read_eagle
from paceline.engines.torch_hf.loading import file_errors, longest_context, quiet
from paceline.engines.torch_hf.masks import FULL, SLIDING
from paceline.engines.warming import warm_up
from paceline.models.hub.local_cache import display_name
from paceline.models.weight_files import weight_files

_SHAPE: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
)
"""Entries of a configuration that say what a layer computes."""

_CACHE: Final = "cache" if "cache" in inspect.signature(LlamaAttention.forward).parameters else "past_key_values"
"""Name of the cache where layers take it: renamed in transformers 5.24."""

_PICKLED: Final = "pytorch_model.bin"
"""Weights of the first EAGLE-3 heads."""

_NOT_READ: Final = ("t2d", "verifier_norm.", "verifier_lm_head.", ".rotary_emb.")
"""Tensors beside a head's own: the other way of ``d2t``, and what is of its target."""


class EagleHead(nn.Module):  # type: ignore[misc]
    """An EAGLE-3 head: one layer, or some, that read an embedding beside a state."""

    def __init__(
        self,
        file: EagleFile,
        config: Any,
        *,
        with_head_norms: bool,
        draft_ids: torch.Tensor | None,
        vocab_size: int,
    ) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        of_target, num_states = file.target_width, len(file.layers)
        layer_class = Qwen3DecoderLayer if with_head_norms else LlamaDecoderLayer
        self.layers = nn.ModuleList(layer_class(config, index) for index in range(config.num_hidden_layers))
        first: Any = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            wide = nn.Linear(2 * width, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = LlamaRMSNorm(width, eps)
        self.embed_tokens = nn.Embedding(vocab_size, width)
        self.input_norm = LlamaRMSNorm(num_states * of_target, eps) if file.norm_before_fc else None
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(of_target, eps) for _ in range(num_states)) if file.fc_norm else None
        self.fc = nn.Linear(num_states * of_target, width, bias=False)
        self.norm = LlamaRMSNorm(width, eps)
        self.lm_head = nn.Linear(width, vocab_size if draft_ids is None else len(draft_ids), bias=False)
        self.config = config
        self.draft_ids = draft_ids
        self.vocab_size = vocab_size
        self._norm_before_residual = file.norm_before_residual
        self._norm_output = file.norm_output
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Return what states ``[rows, layers * width]`` of the target are to the head, ``[rows, own width]``."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            chunks = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        fused: torch.Tensor = self.fc(states)
        return fused

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        cache: Any,
        keep: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the rows to keep, by the target's ids, and the own state of every row.

        ``token_ids`` and ``positions`` are ``[1, rows]``, ``states`` ``[rows, own width]``.
        """
        first: Any = self.layers[0]
        hidden = states[None]
        normed = first.hidden_norm(hidden)
        rope = self.rotary_emb(hidden, positions)
        attended, _ = first.self_attn(
            torch.cat((first.input_layernorm(self.embed_tokens(token_ids)), normed), -1),
            position_embeddings=rope,
            attention_mask=_mask_of(mask, self.config, 0),
            **{_CACHE: cache},
        )
        hidden = (normed if self._norm_before_residual else hidden) + attended
        hidden = hidden + first.mlp(first.post_attention_layernorm(hidden))
        for index, layer in enumerate(self.layers[1:], 1):
            hidden = layer(
                hidden,
                attention_mask=_mask_of(mask, self.config, index),
                position_ids=positions,
                position_embeddings=rope,
                **{_CACHE: cache},
            )
        normed = self.norm(hidden)[0]
        logits = self.lm_head(normed[keep])
        if self.draft_ids is not None:
            known, logits = logits, logits.new_full((len(keep), self.vocab_size), float("-inf"))
            logits[:, self.draft_ids] = known
        return logits, normed if self._norm_output else hidden[0]


def _mask_of(mask: Any, config: Any, index: int) -> Any:
    return mask[config.layer_types[index]] if isinstance(mask, dict) else mask


def load_eagle(file: EagleFile, target: Any, vocab_size: int) -> EagleHead:
    """Load a head in the type of its target and where that is, whose embedding and output layer it may borrow."""
    with quiet(), file_errors(file.path):
        weights = _read_weights(file.path)
        head_norms = "layers.0.self_attn.q_norm.weight" in weights
        config = _layer_config(file.shape, target.config.get_text_config()._attn_implementation, head_norms)
    draft_ids = _draft_ids(file.path, weights, vocab_size, config)
    if "embed_tokens.weight" not in weights:
        # Not what the module makes of it: that of Gemma scales the vectors, and heads read them as they are.
        weights["embed_tokens.weight"] = target.get_input_embeddings().weight
    if "lm_head.weight" not in weights:
        rows = target.get_output_embeddings().weight
        weights["lm_head.weight"] = rows if draft_ids is None else rows[draft_ids.to(rows.device)]
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"][:vocab_size]  # more are padding
    with torch.device("meta"):
        head = EagleHead(file, config, with_head_norms=head_norms, draft_ids=draft_ids, vocab_size=vocab_size)
    _check_weights(file.path, weights, head.state_dict())
    moved = {name: each.detach().to(target.device, target.dtype) for name, each in weights.items()}
    head.load_state_dict(moved, assign=True)
    head.rotary_emb = LlamaRotaryEmbedding(config).to(target.device)
    if draft_ids is not None:
        head.draft_ids = draft_ids.to(target.device)
    head.eval()
    return head


def _read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return a head's tensors by one name each, whatever its maker calls the layer and what it lies in."""
    files = weight_files(folder)
    read: dict[str, torch.Tensor] = {}
    for path in files:
        read |= load_file(path)
    if not files:
        read = torch.load(folder / _PICKLED, map_location="cpu", weights_only=True)
    named = {name.removeprefix("model."): tensor for name, tensor in read.items()}
    named = {
        f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name: tensor
        for name, tensor in named.items()
    }
    return {name: tensor for name, tensor in named.items() if not any(part in f".{name}" for part in _NOT_READ)}


def _layer_config(shape: Mapping[str, Any], attention: str, with_head_norms: bool) -> Any:
    """Return transformers' configuration of a head's layers."""
    said = {name: shape[name] for name in _SHAPE if shape.get(name) is not None}
    rope = said.get("rope_scaling")
    if isinstance(rope, dict) and "mrope" in (rope.get("type"), rope.get("rope_type")):
        del said["rope_scaling"]  # its sections differ for pictures alone
    config = (Qwen3Config if with_head_norms else LlamaConfig)(**said)
    layer_types = shape.get("layer_types") or [FULL] * config.num_hidden_layers
    config.layer_types = list(layer_types)
    config.sliding_window = shape.get("sliding_window") if SLIDING in layer_types else None
    config._attn_implementation = attention
    return config


def _draft_ids(folder: Path, weights: dict[str, torch.Tensor], vocab_size: int, config: Any) -> torch.Tensor | None:
    """Take the map of the head's tokens to the target's from the weights, where it knows some of them only."""
    offsets = weights.pop("d2t", None)
    if offsets is None:
        known = len(weights["lm_head.weight"]) if "lm_head.weight" in weights else vocab_size
        if known == vocab_size:
            return None
        if known != config.vocab_size or known > vocab_size:
            raise CapabilityError(
                f"{folder} knows {known} tokens and does not say which of the target's {vocab_size} these are (d2t): "
                "give the head that was made for this model"
            )
        return torch.arange(known)
    ids = offsets.long().cpu() + torch.arange(len(offsets))
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
        raise CapabilityError(
            f"{folder} is not a head for this target: its tokens (d2t) are not all among "
            f"the {vocab_size} that this has, "
            "each once; give the head that was made for this model"
        )
    return ids


def _check_weights(folder: Path, weights: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    missing, unknown = sorted(wanted.keys() - weights.keys()), sorted(weights.keys() - wanted.keys())
    if unknown:
        raise CapabilityError(
            f"{folder} is a head of another form: an EAGLE-3 head with its settings has no {unknown[0]}; name another "
            "draft model"
        )
    if missing:
        raise ModelFileError(
            f"{folder} lacks {len(missing)} weights of an EAGLE-3 head, such as {missing[0]}; fetch it again"
        )
    for name, tensor in wanted.items():
        if weights[name].shape != tensor.shape:
            raise CapabilityError(
                f"{folder} is not a head for this target: {name} is {tuple(weights[name].shape)}, and "
                f"{tuple(tensor.shape)} would fit; give the head that was made for this model"
            )


class MtpHead(nn.Module):  # type: ignore[misc]
    """The MTP layer of a model, as transformers has it; its own state takes the place of the target's for the next."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self._mask: Any = None
        model.create_masks_for_mtp_layer = lambda *_: {"attention_mask": self._mask}

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        cache: Any,
        keep: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the rows to keep, and the own state of every row; see :meth:`EagleHead.forward`."""
        self._mask = _mask_of(mask, self.config, 0)
        own = self.model.forward_layer(0, states[None], positions, cache, input_ids=token_ids)[0]
        return self.model._project_to_logits(own[keep]), own


def load_mtp(target: Any) -> MtpHead:
    """Load the MTP layer in the folder of a model, on whose embedding and output layer it works."""
    from transformers import modeling_layers

    mtp_model: Any = getattr(modeling_layers, "MtpModel", None)
    if not hasattr(mtp_model, "forward_layer"):
        raise CapabilityError("this transformers has no MTP layers to run: install transformers 5.24 or later")
    folder = Path(target.config.name_or_path)
    if not folder.is_dir() or not has_mtp_layer(folder):
        raise CapabilityError(
            f"{target.config.name_or_path or type(target).__name__} has no MTP layer that drafts here: one of "
            f"{', '.join(sorted(MTP_ARCHITECTURES))} in its own folder does"
        )
    try:
        with quiet(), file_errors(folder):
            model = mtp_model.from_pretrained(target, device_map={"": target.device})
    except EngineError as error:
        raise InputError(f"there is no memory for the MTP layer of {folder}: name another draft model") from error
    head = MtpHead(model)
    head.eval()
    return head


class TorchHead(TorchHFEngine):
    """A head over a pool of its own: an engine whose rows are tokens with states of its target.

    Args:
        target: what it drafts for, which holds the states that it reads.
        path: the folder of the head; ``None`` for the MTP layer in the target's.

    Either may be closed first.
    """

    def __init__(self, target: TorchHFEngine, path: Path | None = None) -> None:
        target._check_open()
        model, limits = target._model, target.capabilities
        if path is None:
            held: tuple[int, ...] = (OUTPUT_STATE,)
        else:
            config = model.config.get_text_config()
            file = read_eagle(path, num_layers=config.num_hidden_layers, width=config.hidden_size)
            held = file.layers
        if target.held_layers != held:
            raise CapabilityError(
                f"{path or 'an MTP layer'} reads the states of layers {list(held)}, and the target was loaded with "
                f"those of {list(target.held_layers)}: load it for this head"
            )
        head = load_mtp(model) if path is None else load_eagle(file, model, target.vocabulary.size)
        self._name = "mtp head" if path is None else f"eagle3 head {display_name(path)}"
        context_length = limits.context_length
        if path is not None:
            # Of a longer text it sees the end, from anew.
            context_length = min(context_length, longest_context(head.config) or context_length)
        assert limits.cells is not None
        self._take_settings(target)
        cells = min(context_length * limits.max_sequences, limits.cells) + limits.max_rows
        limits = dataclasses.replace(limits, context_length=context_length, cells=cells, reads_states=True)
        self._begin(head, model.device, model.dtype, limits)
        self._track_width = head.config.hidden_size
        self._finish("" if path is None else f", of layers {', '.join(map(str, held))}")

    def _take_settings(self, target: TorchHFEngine) -> None:
        self._vocabulary = target.vocabulary
        self._spare_cores, self._set_threads = target._spare_cores, target._set_threads

    def _finish(self, more: str = "") -> None:
        """Look at what it makes of anything, and describe it."""
        try:
            self._check_numbers()
            if self._device.type == "cuda":
                warm_up(self)
        except BaseException:
            self.close()
            raise
        self._description = f"{self._name} ({self._type_name()}{more}) on {self._where()}, torch"

    def _read_by_head(self, steps: Sequence[Step], states: Sequence[SequenceCells]) -> list[tuple[FloatArray, bool]]:
        width = self._capabilities.state_width
        return [
            (states_for_rows(step, state.track, len(state.pending_cells), width), step.states is not None)
            for step, state in zip(steps, states, strict=True)
        ]

    def _call_model(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        keep: torch.Tensor,
        states: list[tuple[FloatArray, bool]] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert states is not None
        given = [rows for rows, of_target in states if of_target]
        fused: list[torch.Tensor] = []
        if given:
            fused += self._model.fuse(self._tensor(np.concatenate(given))).split([len(rows) for rows in given])
        read = [fused.pop(0) if of_target else self._tensor(rows) for rows, of_target in states]
        logits, own = self._model(token_ids, torch.cat(read), positions, mask, self._cache, keep)
        return logits, own

    def _tensor(self, rows: FloatArray) -> torch.Tensor:
        return torch.tensor(rows, dtype=self._dtype, device=self._device)

    def _check_numbers(self) -> None:
        """Raise ``ModelFileError`` for weights that make no numbers."""
        sequence = self.open()
        try:
            states = np.ones((2, self._capabilities.state_width), np.float32)
            steps = [Step(sequence, [0, 1], [COMMITTED_END, 0], [0, 1], states)]
            row = self.forward(steps).logits(0, 1)
            if np.isnan(row).any() or not np.isfinite(row).any():
                raise ModelFileError(f"{self._name} has weights that make no numbers: fetch it again")
        finally:
            self.close_sequence(sequence)
