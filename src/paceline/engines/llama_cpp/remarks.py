"""llama.cpp's warnings while it reads a model: which of them mean that the text differs from what its makers meant.

Of the lines about a *model* everything is passed on that is not known to be harmless. A warning that comes with a newer
llama.cpp is then seen, and listed here if it is noise; a list of what matters would swallow it. Of the lines about a
*context* only what is listed is passed on: they tell of memory and speed, and of a length that paceline limits itself.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from paceline.core.errors import ModelWarning

_FUNCTION: Final = re.compile(r"^\w+:(\s+|$)")

_HARMLESS: Final = re.compile(
    "|".join(
        (
            r"\W*$",  # the frame around a warning
            # llama.cpp mends what it knows to be wrong with well-known models, and does so for most files of them.
            r"control-looking token: .* its type will be overridden",
            r"setting token .* attribute to USER_DEFINED",
            r"special_eog_ids contains both .* removing '<\|end\|>' token from EOG list",
            r"'</s>' is a normal token here",
            r"override '.*' to 'true' for Gemma4",
            # paceline uses none of these tokens.
            r".*newline token",
            r"Mask token",
            # Rows of the vocabulary that no text is made of.
            r"empty token at index",
            r"adding \d+ dummy tokens",
            # Layers that predict several tokens at once: decoding does not use them.
            r"model has unused tensor",
            # The file's name, and where its weights lie.
            r"unknown type",
            r"mmap is not",
            r"tensor overrides to CPU are used with mmap",
        )
    )
)
"""Beginnings of llama.cpp's remarks on a model that change no text."""
_OF_DEVICES: Final = re.compile(r"ggml_")
"""Beginning of the functions of ggml, whose lines tell of devices and memory."""

_CONTEXT_CHANGES_TEXT: Final = re.compile(r"running DENSE attention")
"""Sparse attention that is replaced, as a model was not trained to be run."""


def of_model(lines: Iterable[str]) -> list[str]:
    """Return the remarks on a model that change its text, each once, without the names of functions."""
    said = (_FUNCTION.sub("", line) for line in lines if not _OF_DEVICES.match(line))
    return list(dict.fromkeys(line for line in said if not _HARMLESS.match(line)))


def of_context(lines: Iterable[str]) -> list[str]:
    """Return the remarks on a context that change the text, each once, without the names of functions."""
    return list(dict.fromkeys(_FUNCTION.sub("", line) for line in lines if _CONTEXT_CHANGES_TEXT.search(line)))


def warn(path: Path, remarks: list[str]) -> None:
    """Issue one ``ModelWarning`` with all remarks on a model, if there are any."""
    if remarks:
        warnings.warn(
            f"{path} may write other text than it should; llama.cpp says: {'; '.join(remarks)}; a newer "
            "conversion of the model may fix that",
            ModelWarning,
            stacklevel=2,
        )
