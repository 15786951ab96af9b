"""Ranges of the engines' settings, with the options of the command line that set them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.core.errors import InputError

_OPTIONS: Final[Mapping[str, str]] = {
    "context_length": "-c, or -cd for a draft model",
    "max_sequences": "-np",
    "n_gpu_layers": "-ngl, or -ngld for a draft model",
    "threads": "-t, or -td for a draft model",
    "threads_batch": "-tb, or -tbd for a draft model",
}
_WAYS_OUT: Final[Mapping[str, str]] = {
    "context_length": "give a number of tokens, or None for the model's own up to 4096 (-c 0 for all of it)",
}


def check_range(name: str, value: int | None, lowest: int, highest: int) -> None:
    """Check a setting; ``None`` leaves the choice to the engine.

    Raises:
        InputError: the value is out of range. The message names the option, too.
    """
    if value is None or lowest <= value <= highest:
        return
    setting = f"{name} ({_OPTIONS[name]})" if name in _OPTIONS else name
    way_out = _WAYS_OUT.get(name, "choose a value in between")
    raise InputError(f"{setting} is {value}, but must be from {lowest} to {highest}; {way_out}")
