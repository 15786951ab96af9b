"""Which family's format a chat template speaks of, and which of its marks are control tokens."""

from __future__ import annotations

import sys

import pytest

from paceline.chat.tool_calls import parser
from paceline.chat.tool_calls.base import ToolCallFormat
from paceline.chat.tool_calls.formats import FORMATS, control_marks, find_format
from paceline.chat.tool_calls.parser import ToolCallParser
from paceline.core.errors import CapabilityError
from paceline.engines.scripted import ScriptedVocabulary
from tests.chat.tool_calls.answers import BY_NAME, SOURCES, TOOLS


@pytest.mark.parametrize("family", [one.name for one in FORMATS])
def test_a_template_is_known_by_its_marks(family: str) -> None:
    found = find_format(f"{{# of a model #}}{SOURCES[family]}")
    assert found is not None
    assert found.name == family


def test_other_templates_are_of_no_family() -> None:
    assert find_format("<|im_start|>{{ message.role }}<|im_end|> <tool_response>") is None
    assert find_format("") is None


class _Vocabulary(ScriptedVocabulary):
    """All tokens but the first are control tokens."""

    @property
    def control_ids(self) -> frozenset[int]:
        return frozenset(range(1, self.size))


def test_control_tokens_among_the_marks_are_found() -> None:
    pieces = [b"a", b"[TOOL_CALLS]", b"[ARGS]", b"<|call|>", b"<|channel|>", b"<other>", b"</tool_call>", b"<|start|>"]
    # What ends an answer is not in its text.
    vocabulary = _Vocabulary(pieces, end_ids=[3])
    assert control_marks(BY_NAME["mistral"], vocabulary) == {"[TOOL_CALLS]": 1, "[ARGS]": 2}
    assert control_marks(BY_NAME["gpt-oss"], vocabulary) == {"<|channel|>": 4, "<|start|>": 7}
    assert control_marks(BY_NAME["hermes"], vocabulary) == {"</tool_call>": 6}


def test_without_the_library_there_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    parser._library.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    with pytest.raises(CapabilityError, match=r"pip install '\.\[serve\]'"):
        ToolCallParser(ToolCallFormat("a/model", {}), TOOLS)
