"""A model's own sampling settings: defaults for requests that do not set them.

::

    a call, or the command line  >  PACELINE_* on the command line  >  the model  >  paceline's own defaults

A GGUF file says it in ``general.sampling.*``, a Hugging Face folder in ``generation_config.json``. What is not said
there has paceline's own default, not that of transformers. ``do_sample`` counts where it is ``false`` in so many words,
and is temperature 0 then, as it is to transformers; a file that leaves it out does not ask to be decoded greedily.
How many tokens an answer has (``max_new_tokens``) is left to the request.

Sources: ``common_init_sampler_from_model`` in https://github.com/ggml-org/llama.cpp/blob/master/common/common.cpp and
https://huggingface.co/docs/transformers/main_classes/text_generation
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from paceline.core.errors import InputError, ModelFileError, ModelWarning
from paceline.core.numbers import shown
from paceline.core.params import LLAMA_CPP_ORDER, OFF, TRANSFORMERS_ORDER, SamplingParams, read_samplers
from paceline.models.files import read_json_if_present
from paceline.models.gguf_header import read_gguf_header

_GGUF_PREFIX: Final = "general.sampling."
"""Beginning of the metadata keys of sampling settings."""
_SEQUENCE: Final = "sequence"
"""Behind the prefix, the key of the order of processors."""
_OF_GGUF: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "penalty_last_n",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
}
"""Fields of :class:`~paceline.core.params.SamplingParams`, by what follows the prefix."""

_FOLDER_FILE: Final = "generation_config.json"
"""File of a folder with its sampling settings."""
_OF_FOLDERS: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
}
"""Fields of :class:`~paceline.core.params.SamplingParams`, by what ``generation_config.json`` calls them."""

_MISSING_OF_GGUF: Final[Mapping[str, object]] = {"mirostat": 0}
"""Settings that change the distribution and are not supported, by what follows the prefix, with their neutral value."""
_MISSING_OF_FOLDERS: Final[Mapping[str, object]] = {
    "num_beams": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""Settings that change the distribution and are not supported, by key of ``generation_config.json``, with their neutral
value.
"""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's sampling settings.

    Attributes:
        values: by the fields of :class:`~paceline.core.params.SamplingParams`, each of them checked; read-only.
        source: where they were read, for people; empty where there are none.
    """

    values: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    source: str = ""

    def left_open(self, options: Mapping[str, object]) -> dict[str, Any]:
        """Return the values for what a call does not set; ``None`` there counts as not set."""
        return {name: value for name, value in self.values.items() if options.get(name) is None}


NO_DEFAULTS: Final = SamplingDefaults()
"""Defaults of a model that says nothing, or is not to be asked."""


def read_sampling_defaults(path: Path) -> SamplingDefaults:
    """Read the sampling settings of a model; warn of those that cannot be used, and leave them out."""
    defaults = _read_folder(path / _FOLDER_FILE) if path.is_dir() else _read_gguf(path)
    return defaults if defaults.values else NO_DEFAULTS


def _read_gguf(path: Path) -> SamplingDefaults:
    said = {
        key.removeprefix(_GGUF_PREFIX): _shorten_float(value)
        for key, value in read_gguf_header(path).metadata.items()
        if key.startswith(_GGUF_PREFIX)
    }
    values = _check_values(path, said, _OF_GGUF, _GGUF_PREFIX)
    if _SEQUENCE in said:
        try:
            values |= _read_sequence(said[_SEQUENCE])
        except InputError as error:
            _warn(f"{path} has {_GGUF_PREFIX}{_SEQUENCE} {shown(said[_SEQUENCE])}, which is ignored: {error}")
    _warn_missing(path, said, _MISSING_OF_GGUF)
    return SamplingDefaults(MappingProxyType(values), "GGUF metadata")


def _read_folder(path: Path) -> SamplingDefaults:
    try:
        said = read_json_if_present(path)
    except ModelFileError as error:
        _warn(f"the model's own defaults for sampling are ignored: {error}")
        return NO_DEFAULTS
    values = _check_values(path, said, _OF_FOLDERS, "")
    if values.get("repeat_penalty", 1.0) != 1.0:
        values["penalty_last_n"] = -1  # transformers counts the whole sequence
    if said.get("do_sample") is False:
        values["temperature"] = 0.0
    _warn_missing(path, said, _MISSING_OF_FOLDERS)
    return SamplingDefaults(MappingProxyType(values), _FOLDER_FILE)


def _check_values(path: Path, said: Mapping[str, object], fields: Mapping[str, str], prefix: str) -> dict[str, Any]:
    """Return the values that can be used, by field, and warn of the others."""
    values: dict[str, Any] = {}
    for key, name in fields.items():
        value = said.get(key)
        if value is None:
            continue
        if name == "top_k" and value == -1:
            value = 0  # -1 and 0 both stand for all tokens
        try:
            values[name] = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
        except InputError as error:
            _warn(f"{path} has {prefix}{key} {shown(value)}, which is ignored: {error}")
    return values


def _read_sequence(sequence: object) -> dict[str, Any]:
    """Return the order of processors that llama.cpp's order of samplers stands for, and what it switches off.

    Those that it leaves out stand where they usually do, for requests that set them.

    Raises:
        InputError: it stands for no order.
    """
    if not isinstance(sequence, str):
        raise InputError("give a text")
    order = [LLAMA_CPP_ORDER[0], *read_samplers([name for name in sequence.split(";") if name])]
    usual = TRANSFORMERS_ORDER if order == [name for name in TRANSFORMERS_ORDER if name in order] else LLAMA_CPP_ORDER
    values: dict[str, Any] = {}
    plain = SamplingParams()
    for before, name in itertools.pairwise(usual):
        if name not in order:
            order.insert(order.index(before) + 1, name)
            values |= {option: off for option, off in OFF[name].items() if getattr(plain, option) != off}
    return values | {"order": tuple(order)}


def _warn_missing(path: Path, said: Mapping[str, object], neutral: Mapping[str, object]) -> None:
    asked = [
        f"{key} {shown(said[key])}"
        for key, changes_nothing in neutral.items()
        if said.get(key) not in (None, changes_nothing, [], {})
    ]
    if asked:
        _warn(f"{path} asks for {', '.join(asked)}, which paceline does not have; answers are sampled without")


def _shorten_float(value: object) -> object:
    """Return a number of 32 bits as it was written: 0.6, not 0.6000000238418579."""
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    return float(str(narrow)) if float(narrow) == value else value


def _warn(message: str) -> None:
    warnings.warn(message, ModelWarning, stacklevel=2)
