"""Assistants of Gemma 4: heads without a cache, which read that of their target.

Their layers look into what the target's last layer of each kind has written. Every row is read behind the last
committed token of one of the target's sequences, however many drafts there are before, and leaves nothing::

    target's pool    t0 t1 ... t(n-2)                       t(n-1) is the root, at position n-1
    rows             (t(n-1), state of t(n-2))              each at position n-1, seeing all of these
                     (d1, own state), (d2, own state)

Source: https://ai.google.dev/gemma/docs/mtp/overview.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers

from paceline.core.arrays import BoolArray, FloatArray, Int64Array
from paceline.core.errors import CapabilityError, ModelFileError
from paceline.engines.base import COMMITTED_END, LentSequences, Step, check_lent
from paceline.engines.options import OUTPUT_STATE
from paceline.engines.torch_hf.cells import SequenceCells
from paceline.engines.torch_hf.engine import PackedRows, TorchHFEngine, row_ranges
from paceline.engines.torch_hf.heads import TorchHead
from paceline.engines.torch_hf.loading import file_errors, quiet
from paceline.engines.torch_hf.masks import FULL, SLIDING
from paceline.engines.torch_hf.states import DeviceTrack
from paceline.models.hub.local_cache import display_name

_DRAFT_CELLS: Final = 64
"""Drafts of a sequence at once."""


class _Drafts(SequenceCells):
    """What is drafted behind a sequence of the target, whose tokens lie there."""

    def __init__(self, track: DeviceTrack) -> None:
        super().__init__(0, track)
        self.num_committed = 0

    @property
    def length(self) -> int:
        return self.num_committed


class TorchAssistant(LentSequences, TorchHead):
    """A head that reads the cache of its target beside states."""

    def __init__(self, target: TorchHFEngine, path: Path) -> None:
        target._check_open()
        self.lender: TorchHFEngine = target
        model, limits = target._model, target.capabilities
        self._name = f"assistant {display_name(path)}"
        assistant = _load(path, model)
        if target.held_layers != (OUTPUT_STATE,):
            raise CapabilityError(f"{path} reads what the output layer does, and the target holds other states")
        self._target_embedding = model.get_input_embeddings()
        self._layers = _layers_read(model.config.get_text_config())
        self._mask: Any = None
        assistant.create_attention_masks = lambda *_: self._mask
        self._take_settings(target)
        cells = limits.max_rows + _DRAFT_CELLS * limits.max_sequences
        self._begin(assistant, model.device, model.dtype, dataclasses.replace(limits, cells=cells, reads_states=True))
        self._finish()

    # --- sequences: the target's --------------------------------------------------------------------------------------

    def open(self) -> int:
        """Open a sequence of the target to measure passes with; it holds one token, as a row needs one to read."""
        sequence = self.lender.open_within(self.lender.capabilities.max_sequences + 1)
        self.lender.forward([Step(sequence, [0], [COMMITTED_END], [])])
        self.lender.commit(sequence, [0])
        return sequence

    def commit(self, sequence: int, path: Sequence[int]) -> None:
        drafts = self._sequences.pop(sequence, None)
        if drafts is not None:
            drafts.pending.check_path(path)
            self._pool.release(np.array(drafts.pending_cells, np.int64))

    def _sequence(self, handle: int) -> SequenceCells:
        self._check_open()
        if self._torn:
            self._repair()
        of_target = self.lender._sequence(handle)
        check_lent(handle, of_target.length, len(of_target.pending))
        drafts = self._sequences.get(handle)
        if drafts is None:
            drafts = self._sequences[handle] = _Drafts(DeviceTrack(self._track_width, self._device, self._dtype))
        assert isinstance(drafts, _Drafts)
        drafts.num_committed = of_target.length
        return drafts

    def _repair(self) -> None:
        self._unread = None
        self._sequences.clear()
        self._pool.recount(())
        self._torn = False

    # --- a pass -------------------------------------------------------------------------------------------------------

    def _pack(
        self, steps: Sequence[Step], states: Sequence[SequenceCells], cells: Int64Array, width_step: int
    ) -> PackedRows:
        seen = [self.lender._sequence(step.sequence).committed for step in steps]
        width = 1 + max(int(each.max()) for each in seen)
        width = min(-(-width // width_step) * width_step, self.lender.num_cells)
        visible: BoolArray = np.zeros((len(cells), width), dtype=np.bool_)
        for rows, its, drafts in zip(row_ranges(steps), seen, states, strict=True):
            visible[rows, its] = True
            self._pool.positions[cells[rows]] = drafts.length
        return self._packed(steps, states, cells, visible)

    def _masks(self, visible: BoolArray, positions: Int64Array) -> Any:
        masks = self.lender._masks(visible, positions)
        return masks if isinstance(masks, dict) else {FULL: masks, SLIDING: masks}

    def _call_model(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        mask: Any,
        keep: torch.Tensor,
        states: list[tuple[FloatArray, bool]] | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert states is not None
        read = torch.cat([self._tensor(rows) for rows, _ in states])[None]
        self._mask = mask
        width = mask[FULL].shape[-1]
        output = self._model(
            inputs_embeds=torch.cat((self._target_embedding(token_ids), read), -1),
            position_ids=positions,
            # Indices, whatever they are: by a number it would compute the last rows alone, and fail at that.
            logits_to_keep=keep,
            shared_kv_states={kind: self.lender._cache.layer(layer, width) for kind, layer in self._layers.items()},
        )
        return output.logits[0][keep], output.last_hidden_state[0]


def _layers_read(config: Any) -> dict[str, int]:
    """Return which layer of a target its assistants read, of each kind of layer."""
    return {config.layer_types[index]: index for index, mode in enumerate(config.kv_sharing_modes) if mode == "store"}


def _load(path: Path, target: Any) -> Any:
    """Load an assistant in the type of its target and where that is."""
    of_target = target.config.get_text_config()
    with quiet(), file_errors(path):
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    if config.model_type != "gemma4_assistant" or of_target.model_type != "gemma4_text":
        raise CapabilityError(
            f"{path} is a head of the kind {config.model_type} and no gemma4_assistant, or its target is no "
            f"Gemma 4 (gemma4_text) but {of_target.model_type}: name another draft model"
        )
    its = config.get_text_config()
    try:
        layers = _layers_read(of_target)
        _layers_read(its)
    except ValueError:
        # 5.23 finds no layer that writes keys and values where none does.
        raise CapabilityError(
            f"{path} takes transformers 5.24 or later, and {transformers.__version__} is installed: update it"
        ) from None
    pairs = [("backbone_hidden_size", config.backbone_hidden_size, of_target.hidden_size)]
    pairs.append(("vocab_size", its.vocab_size, of_target.vocab_size))
    for index, kind in enumerate(its.layer_types):
        one, other = its.per_layer_config[index], of_target.per_layer_config[layers[kind]]
        pairs += [(name, getattr(one, name), getattr(other, name)) for name in ("head_dim", "num_key_value_heads")]
    for name, has, wanted in pairs:
        if has != wanted:
            raise CapabilityError(
                f"{path} is not a head for this target: its {name} is {has}, not {wanted}; give the assistant that was "
                "made for this model, or leave it out"
            )
    # All tokens are as good as those of the likeliest groups, and what a row says does not hang on its neighbours.
    config.use_ordered_embeddings = False
    with quiet(), file_errors(path):
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            str(path),
            local_files_only=True,
            config=config,
            dtype=target.dtype,
            attn_implementation=of_target._attn_implementation,
            output_loading_info=True,
        )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ModelFileError(f"{path} lacks {len(missing)} weights of the head, such as {missing[0]}; fetch it again")
    return model.to(target.device).eval()
