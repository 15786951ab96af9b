"""States of a model's tokens: what chosen layers and the output layer read in a pass, and where they are kept.

They are read by hooks on the model's modules. transformers can return hidden states, too, but of the last layer's
output only what the last norm makes of it. They stay on the device until a head asks for them: of a prompt it asks for
the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from paceline.core.arrays import FloatArray
from paceline.core.errors import CapabilityError
from paceline.engines.options import OUTPUT_STATE
from paceline.engines.state_track import MAX_STATES, StateTrack


class StateCapture:
    """Keeps what layers of a model read in the latest pass.

    Args:
        model: a causal language model of transformers, which gets hooks.
        layers: numbers of layers, or ``OUTPUT_STATE`` for the output layer. The number of layers is what the last of
            them puts out, before the norm behind it.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        self._latest: dict[int, torch.Tensor] = {}
        self._layers = tuple(layers)
        self._hooks: list[Any] = []
        modules = _layer_modules(model)
        for layer in layers:
            if layer == OUTPUT_STATE:
                self._hooks.append(model.base_model.register_forward_hook(self._keeper_of_output(layer)))
            elif 0 <= layer < len(modules):
                self._hooks.append(modules[layer].register_forward_pre_hook(self._keeper(layer), with_kwargs=True))
            elif 0 < layer == len(modules):
                self._hooks.append(modules[-1].register_forward_hook(self._keeper_of_output(layer)))
            else:
                self.remove()
                has = f"has layers 0 to {len(modules) - 1}" if modules else "has no list of layers"
                raise CapabilityError(
                    f"{model.config.name_or_path or type(model).__name__} {has}, and its head reads what layer {layer} "
                    "does: give the head that was made for this model"
                )

    def take(self) -> torch.Tensor:
        latest, self._latest = self._latest, {}
        states = [latest[layer][0] for layer in self._layers]
        return states[0] if len(states) == 1 else torch.cat(states, -1)

    def remove(self) -> None:
        """Take the hooks off the model, which may outlive the engine."""
        for hook in self._hooks:
            hook.remove()

    def _keeper(self, layer: int) -> Any:
        def keep(module: Any, inputs: Any, named: Any) -> None:
            self._latest[layer] = inputs[0] if inputs else named["hidden_states"]

        return keep

    def _keeper_of_output(self, layer: int) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            self._latest[layer] = output if isinstance(output, torch.Tensor) else output[0]

        return keep


def _layer_modules(model: Any) -> Sequence[Any]:
    """Return a model's layers in order; none where they are no list in its decoder."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return ()


class DeviceTrack(StateTrack):
    """The states of one sequence, on a device and in the type of its model."""

    __slots__ = ("_device", "_dtype")

    def __init__(
        self, width: int, device: torch.device, dtype: torch.dtype, start: int = 0, most: int = MAX_STATES
    ) -> None:
        self._device, self._dtype = device, dtype
        super().__init__(width, start, most)

    @property
    def num_bytes(self) -> int:
        return int(self._num * self.width * self._committed.element_size())

    def append(self, rows: torch.Tensor) -> None:
        """Add the states of new pending nodes, which nothing else changes."""
        self._pending = torch.cat((self._pending, rows)) if len(self._pending) else rows

    def pending(self, node: int) -> FloatArray:
        return _on_host(self._pending[node])

    def read(self, start: int, stop: int) -> FloatArray:
        self.check_held(start, stop)
        return _on_host(self._committed[start - self._start : stop - self._start])

    def copy(self, device: torch.device | None = None) -> DeviceTrack:
        """Return the same of the committed tokens, on another device where one is given."""
        copy = DeviceTrack(self.width, device or self._device, self._dtype, self._start, self._most)
        copy._num = self._num
        copy._committed = self._committed[: self._num].to(copy._device, copy=True)
        return copy

    def _new(self, rows: int, width: int) -> Any:
        return torch.empty((rows, width), dtype=self._dtype, device=self._device)


def _on_host(states: torch.Tensor) -> FloatArray:
    rows: FloatArray = states.cpu().float().numpy()
    rows.flags.writeable = False
    return rows
