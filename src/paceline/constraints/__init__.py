"""Grammars and JSON schemas that an answer keeps to, compiled by llguidance.

A :class:`ConstraintCompiler` makes a :class:`~paceline.core.constraint.Constraint` of a source for one vocabulary.
"""

from paceline.constraints.compiler import CompilingLimits, ConstraintCompiler
from paceline.constraints.sources import Calls, Choice, Gbnf, JsonObject, JsonSchema, Lark, Regex, Source, Whitespace

__all__ = [
    "Calls",
    "Choice",
    "CompilingLimits",
    "ConstraintCompiler",
    "Gbnf",
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Regex",
    "Source",
    "Whitespace",
]
