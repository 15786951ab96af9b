"""Speculative decoding one switches on and forgets: lossless, and honest about what it gained.

:func:`load` gives a :class:`Model` with ``generate`` and ``stream``. The parts it is made of are public too: engines
(``paceline.engines``), drafters, policies (``paceline.planning``) and the loop (``paceline.runtime.loop``). What one
needs to write an engine (:class:`Engine`), a drafter (:class:`Drafter`) or a policy (:class:`Policy`) of one's own is
here, too.

A name is imported when it is first used (PEP 562): the command line comes through here, and has to hear Ctrl-C before
numpy is there.
"""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = [
    "COMMITTED_END",
    "NO_SPECULATION",
    "ROOT",
    "AnswerPart",
    "ArgumentsDelta",
    "AsyncReplyStream",
    "AsyncStream",
    "BusyError",
    "CacheParams",
    "CallStarted",
    "CapabilityError",
    "ChatParams",
    "ChatPrompt",
    "ClosedError",
    "Commit",
    "Constraint",
    "ConstraintError",
    "ContextLengthError",
    "DraftBudget",
    "DraftJob",
    "DraftOptions",
    "DraftTree",
    "Drafter",
    "Embedder",
    "EmbeddingEngine",
    "Emission",
    "Engine",
    "EngineCapabilities",
    "EngineError",
    "Environment",
    "Evidence",
    "FinishReason",
    "FixedPolicy",
    "ForwardOutput",
    "GenerateOptions",
    "Generation",
    "InputError",
    "LoadOptions",
    "LogprobParams",
    "Model",
    "ModelFileError",
    "ModelOptions",
    "ModelWarning",
    "NoRoomError",
    "Observer",
    "PacelineError",
    "Policy",
    "PolicyBase",
    "QueueFullError",
    "ReasoningBudget",
    "Reply",
    "ReplyRound",
    "ReplyStream",
    "Request",
    "RequestStats",
    "RoundCosts",
    "RoundRecord",
    "SamplingError",
    "SamplingParams",
    "SavedSequence",
    "SpeculationParams",
    "Step",
    "StopRules",
    "Stream",
    "TargetRows",
    "TextSegment",
    "TokenLogprob",
    "Vocabulary",
    "VocabularyMismatchError",
    "from_environment",
    "from_hub",
    "load",
    "load_embedder",
]

TYPE_CHECKING = False  # type checkers take the name for true; importing typing would take as long as all the rest
if TYPE_CHECKING:
    from paceline.api import Model, load
    from paceline.async_streams import AsyncStream
    from paceline.chat.params import ChatParams
    from paceline.chat.prompts import ChatPrompt
    from paceline.chat.reasoning import AnswerPart
    from paceline.chat.replies import AsyncReplyStream, Reply, ReplyRound, ReplyStream
    from paceline.chat.tool_calls.base import ArgumentsDelta, CallStarted
    from paceline.core.constraint import Constraint
    from paceline.core.errors import (
        BusyError,
        CapabilityError,
        ClosedError,
        ConstraintError,
        ContextLengthError,
        EngineError,
        InputError,
        ModelFileError,
        ModelWarning,
        NoRoomError,
        PacelineError,
        QueueFullError,
        SamplingError,
        VocabularyMismatchError,
    )
    from paceline.core.logprobs import LogprobParams, TokenLogprob
    from paceline.core.params import CacheParams, SamplingParams, SpeculationParams, StopRules
    from paceline.core.reasoning import ReasoningBudget
    from paceline.core.request import Emission, FinishReason, Request
    from paceline.core.stats import RequestStats
    from paceline.core.text import TextSegment
    from paceline.core.tree import ROOT, DraftTree, Evidence
    from paceline.core.vocabulary import Vocabulary
    from paceline.drafters.base import Commit, DraftBudget, Drafter, DraftJob, TargetRows
    from paceline.embedder import Embedder, load_embedder
    from paceline.engines.base import (
        COMMITTED_END,
        EmbeddingEngine,
        Engine,
        EngineCapabilities,
        ForwardOutput,
        SavedSequence,
        Step,
    )
    from paceline.engines.options import DraftOptions, LoadOptions, ModelOptions
    from paceline.environment import Environment, from_environment
    from paceline.models.hub.fetch import from_hub
    from paceline.options import GenerateOptions
    from paceline.planning.base import Observer, Policy, PolicyBase, RoundCosts, RoundRecord
    from paceline.planning.policies.fixed import NO_SPECULATION, FixedPolicy
    from paceline.streams import Generation, Stream
else:
    # Hidden from type checkers, which would take any name for one of this module's.
    _MODULES = {
        "paceline.api": ("Model", "load"),
        "paceline.async_streams": ("AsyncStream",),
        "paceline.chat.params": ("ChatParams",),
        "paceline.chat.prompts": ("ChatPrompt",),
        "paceline.chat.reasoning": ("AnswerPart",),
        "paceline.chat.replies": ("AsyncReplyStream", "Reply", "ReplyRound", "ReplyStream"),
        "paceline.chat.tool_calls.base": ("ArgumentsDelta", "CallStarted"),
        "paceline.core.constraint": ("Constraint",),
        "paceline.core.errors": (
            "BusyError",
            "CapabilityError",
            "ClosedError",
            "ConstraintError",
            "ContextLengthError",
            "EngineError",
            "InputError",
            "ModelFileError",
            "ModelWarning",
            "NoRoomError",
            "PacelineError",
            "QueueFullError",
            "SamplingError",
            "VocabularyMismatchError",
        ),
        "paceline.core.logprobs": ("LogprobParams", "TokenLogprob"),
        "paceline.core.params": ("CacheParams", "SamplingParams", "SpeculationParams", "StopRules"),
        "paceline.core.reasoning": ("ReasoningBudget",),
        "paceline.core.request": ("Emission", "FinishReason", "Request"),
        "paceline.core.stats": ("RequestStats",),
        "paceline.core.text": ("TextSegment",),
        "paceline.core.tree": ("ROOT", "DraftTree", "Evidence"),
        "paceline.core.vocabulary": ("Vocabulary",),
        "paceline.drafters.base": ("Commit", "DraftBudget", "DraftJob", "Drafter", "TargetRows"),
        "paceline.embedder": ("Embedder", "load_embedder"),
        "paceline.engines.base": (
            "COMMITTED_END",
            "EmbeddingEngine",
            "Engine",
            "EngineCapabilities",
            "ForwardOutput",
            "SavedSequence",
            "Step",
        ),
        "paceline.engines.options": ("DraftOptions", "LoadOptions", "ModelOptions"),
        "paceline.environment": ("Environment", "from_environment"),
        "paceline.models.hub.fetch": ("from_hub",),
        "paceline.options": ("GenerateOptions",),
        "paceline.planning.base": ("Observer", "Policy", "PolicyBase", "RoundCosts", "RoundRecord"),
        "paceline.planning.policies.fixed": ("NO_SPECULATION", "FixedPolicy"),
        "paceline.streams": ("Generation", "Stream"),
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
