"""Models that behave small and cost large: the same function, at the cost of a larger shape.

A trained model of a few million weights is placed into the tensors of a larger one; everything else is zero. What it
computes is unchanged, what it costs (weights read, cache filled, vocabulary scored) is what the larger shape costs. So
speed can be measured on a model that says something, and drafts it as a real one would, with nothing to download.
"""

from paceline.conversion.llama import LlamaShape
from paceline.lab.inflate.heads import HEAD_TYPE, inflate_head
from paceline.lab.inflate.provenance import is_up_to_date
from paceline.lab.inflate.shape import (
    FILE_TYPES,
    PRESETS,
    VOCABULARIES,
    find_file_type,
    fit_shape,
    preset_shape,
)
from paceline.lab.inflate.writer import as_gguf, inflate

__all__ = [
    "FILE_TYPES",
    "HEAD_TYPE",
    "PRESETS",
    "VOCABULARIES",
    "LlamaShape",
    "as_gguf",
    "find_file_type",
    "fit_shape",
    "inflate",
    "inflate_head",
    "is_up_to_date",
    "preset_shape",
]
