"""Speculative decoding one switches on and forgets: lossless, and honest about what it gained.

:func:`load` gives a :class:`Model` with ``generate`` and ``stream``. The parts it is made of are public too: engines
(``paceline.engines``), drafters, policies (``paceline.planning``) and the loop (``paceline.runtime.loop``).

A name is imported when it is first used (PEP 562): the command line comes through here, and has to hear Ctrl-C before
numpy is there.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = [
    "NO_SPECULATION",
    "BusyError",
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

TYPE_CHECKING = False  # to type checkers it is true by its name; importing typing would take as long as all the rest
if TYPE_CHECKING:
    from paceline.api import Generation, Model, Stream, load
    from paceline.core.errors import (
        BusyError,
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
else:
    # Hidden from type checkers, which would take any name for one of this module's.
    _MODULES = {
        "paceline.api": ("Generation", "Model", "Stream", "load"),
        "paceline.core.errors": (
            "BusyError",
            "CapabilityError",
            "ClosedError",
            "ContextLengthError",
            "EngineError",
            "InputError",
            "ModelFileError",
            "ModelWarning",
            "NoRoomError",
            "PacelineError",
            "SamplingError",
            "VocabularyMismatchError",
        ),
        "paceline.core.params": ("SamplingParams", "StopRules"),
        "paceline.engines.loading": ("ModelOptions",),
        "paceline.planning.policies.fixed": ("NO_SPECULATION", "FixedPolicy"),
    }

    def __getattr__(name: str) -> object:
        """Import a public name from the module that defines it."""
        import importlib

        for module, names in _MODULES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(module), name)
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted({*globals(), *__all__})
