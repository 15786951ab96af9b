"""Speculative decoding one switches on and forgets: lossless, and honest about what it gained.

:func:`load` gives a :class:`Model` with ``generate`` and ``stream``. The parts it is made of are public too: engines
(``paceline.engines``), drafters, policies (``paceline.planning``) and the loop (``paceline.core.loop``).
"""

from paceline.api import Generation, Model, Stream, load
from paceline.core.errors import (
    CapabilityError,
    ClosedError,
    ContextLengthError,
    EngineError,
    InputError,
    ModelFileError,
    ModelWarning,
    NoRoomError,
    PacelineError,
    SamplingError,
    VocabularyMismatchError,
)
from paceline.core.params import SamplingParams, StopRules
from paceline.engines.loading import ModelOptions
from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy

__version__ = "0.1.0"

__all__ = [
    "NO_SPECULATION",
    "CapabilityError",
    "ClosedError",
    "ContextLengthError",
    "EngineError",
    "FixedPolicy",
    "Generation",
    "InputError",
    "Model",
    "ModelFileError",
    "ModelOptions",
    "ModelWarning",
    "NoRoomError",
    "PacelineError",
    "SamplingError",
    "SamplingParams",
    "StopRules",
    "Stream",
    "VocabularyMismatchError",
    "load",
]
