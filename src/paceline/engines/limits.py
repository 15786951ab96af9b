"""Ranges of the engines' settings, with the options that set them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.core.errors import InputError

_OPTIONS: Final[Mapping[str, str]] = {
    "context_length": "`context_length` (`DraftOptions.context_length` of a draft model)",
    "max_sequences": "`max_sequences`",
    "gpu_layers": "`gpu_layers` (`DraftOptions.gpu_layers` of a draft model)",
    "threads": "`threads` (`DraftOptions.threads` of a draft model)",
    "threads_batch": "`threads_batch` (`DraftOptions.threads_batch` of a draft model)",
}
_WAYS_OUT: Final[Mapping[str, str]] = {
    "context_length": (
        "give a number of tokens, or None for as much of the model's own as fits (0 on the command line for all of it)"
    ),
}


def check_range(name: str, value: int | None, lowest: int, highest: int) -> None:
    """Raise ``InputError`` if a setting is out of range, by the name of its option.

    ``None`` leaves the choice to the engine.
    """
    if value is None or lowest <= value <= highest:
        return
    setting = _OPTIONS.get(name, name)
    way_out = _WAYS_OUT.get(name, "choose a value in between")
    raise InputError(f"{setting} is {value}, but must be from {lowest} to {highest}; {way_out}", field=name)
