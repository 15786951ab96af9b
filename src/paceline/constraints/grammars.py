"""Sources as the grammars that llguidance reads."""

from __future__ import annotations

import json

from paceline.constraints.gbnf import lark_of
from paceline.constraints.installed import need_llguidance
from paceline.constraints.schema_limits import check_schema
from paceline.constraints.sources import Choice, Gbnf, JsonObject, JsonSchema, Lark, Regex, Source, Whitespace
from paceline.engines.base import Vocabulary

_WHITESPACE: dict[Whitespace, dict[str, object]] = {
    "any": {},
    "short": {"whitespace_pattern": r" |\n[ \t]{0,20}"},
    "single": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    "none": {"whitespace_flexible": False},
}


def grammar_of(source: Source, vocabulary: Vocabulary) -> str:
    """Return llguidance's grammar for a source.

    Args:
        source: what is wanted.
        vocabulary: the model's, for grammars that name tokens.

    Raises:
        ConstraintError: the source says what cannot be said in llguidance's grammar, or would take too long.
    """
    matcher = need_llguidance().LLMatcher
    grammar: str
    match source:
        case JsonSchema() | JsonObject():
            check_schema(json.loads(source.text))
            overrides = {"lenient": False, "coerce_one_of": False, **_WHITESPACE[source.whitespace]}
            grammar = matcher.grammar_from_json_schema(source.text, overrides=overrides)
        case Gbnf():
            grammar = matcher.grammar_from_lark(lark_of(source.text, vocabulary))
        case Lark():
            grammar = matcher.grammar_from_lark(source.text)
        case Regex():
            grammar = matcher.grammar_from_regex(source.text)
        case Choice():
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(source.text))
            grammar = matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    return grammar
