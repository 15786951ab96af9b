"""A tool whose types all stand behind references."""

from __future__ import annotations

from typing import Any

from tests.chat.tool_calls.answers import (
    tool,
)

# As pydantic writes nested models and enumerations: all of it stands behind references.
REFERRED = tool(
    "f",
    {
        "unit": {"$ref": "#/$defs/Unit"},
        "n": {"$ref": "#/$defs/N"},
        "maybe": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "null"}]},
        "described": {"allOf": [{"$ref": "#/$defs/Unit"}], "description": "How it is said."},
        "level": {"$ref": "#/$defs/Level"},
        "place": {"$ref": "#/$defs/Place"},
        "same": {"$ref": "#/properties/n"},
    },
    ["unit", "n", "maybe", "described", "level", "place", "same"],
)
REFERRED["function"]["parameters"]["$defs"] = {
    "Unit": {"enum": ["celsius", "fahrenheit"], "title": "Unit", "type": "string"},
    "N": {"$ref": "#/$defs/Small"},
    "Small": {"type": "integer", "minimum": 0, "maximum": 9},
    "Level": {"enum": [1, 2]},
    "Place": {
        "type": "object",
        "properties": {
            "name": {"$ref": "#/$defs/Unit"},
            "height": {"$ref": "#/$defs/N"},
            "within": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        },
        "required": ["name", "height", "within"],
        "additionalProperties": False,
    },
}


def is_referred(arguments: dict[str, Any]) -> bool:
    """Return whether arguments are of the types that :data:`REFERRED` has."""
    return (
        {arguments["unit"], arguments["described"]} <= {"celsius", "fahrenheit"}
        and all(type(arguments[name]) is int and arguments[name] in range(10) for name in ("n", "same"))
        and (arguments["maybe"] is None or arguments["maybe"] in range(10))
        and arguments["level"] in (1, 2)
        and _is_place(arguments["place"])
    )


def _is_place(value: Any) -> bool:
    return (
        value.keys() == {"name", "height", "within"}
        and value["name"] in ("celsius", "fahrenheit")
        and value["height"] in range(10)
        and (value["within"] is None or _is_place(value["within"]))
    )
