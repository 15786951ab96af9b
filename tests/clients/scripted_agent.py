"""A server whose model does one task through whatever tools its client offers: it reads a file and says what is in it.

What the model writes next is decided by the text of the conversation, as the chat template wrote it. So the answer has
the file's word only where the client's tools, the model's call and the tool's result all came through.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.core.arrays import Float64Array
from tests.serving.hosted import Hosted, hosted, scripted
from tests.serving.scripted import END, SIZE

TEMPLATE: Final = (
    "{% if tools %}<|im_start|>system\nCalls are <tool_call>\n"
    '{"name": name, "arguments": arguments}\n</tool_call>\n'
    "{% for tool in tools %}TOOL {{ tool.function.name }} {{ tool.function.parameters | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT: Final = 1 << 20
"""Tokens, of a byte each: what some agents say before anything else has 100,000."""

_WORD: Final = re.compile(r"WORD-[0-9]+")

_READERS: Final[tuple[tuple[str, str, Callable[[str], Any]], ...]] = (
    ("Read", "file_path", str),  # Claude Code
    ("Read", "filepath", str),  # Continue
    ("read_files", "files", lambda path: [{"path": path}]),  # Cline
    ("exec_command", "cmd", lambda path: f"cat {path}"),  # Codex
    ("shell", "command", lambda path: ["cat", path]),
    ("read_file", "path", str),  # those of a few lines of Python
)
"""Tools that read a file: name, parameter, and what makes the parameter's value of a path."""


def reply(conversation: str, path: Path) -> str:
    """Return what the model says to a conversation: the word, or a call of the tool that gets it."""
    offered = dict(re.findall(r"^TOOL (\S+) (.*)", conversation, re.MULTILINE))
    found = _WORD.search(conversation)
    if found is not None and "SEARCH/REPLACE" in conversation:
        # aider's models write what is to be changed, and call nothing.
        change = f"<<<<<<< SEARCH\n{found[0]}\n=======\nchanged: {found[0]}\n>>>>>>> REPLACE"
        return f"{path.name}\n```\n{change}\n```"
    if found is not None:
        said = f"The word is {found[0]}."
        # smolagents has its agents say the end by a tool.
        return _call("final_answer", {"answer": said}) if "final_answer" in offered else said
    for name, parameter, read in _READERS:
        if f'"{parameter}"' in offered.get(name, ""):
            return f"I read the file.\n{_call(name, {parameter: read(str(path))})}"
    return "There is no tool that reads files."


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def agent_model(path: Path) -> Callable[[Sequence[int]], Float64Array]:
    """Return the logits of a model that replies."""

    def logits(tokens: Sequence[int]) -> Float64Array:
        row: Float64Array = np.full(SIZE, -9.0)
        text = bytes(token_id if token_id < 256 else 10 for token_id in tokens)
        conversation, asks, written = text.rpartition(b"assistant\n")
        if asks:
            said = reply(conversation.decode("utf-8", "replace"), path).encode()
            # A call that has to be made comes without words before it, and may have blanks there.
            written = written.lstrip()
            if not said.startswith(written):
                said = said[max(said.find(b"<tool_call>"), 0) :]
            row[ord("<")] = 20.0
            row[said[len(written)] if len(written) < len(said) else END] = 40.0
        return row

    return logits


@contextmanager
def agent_server(path: Path) -> Iterator[Hosted]:
    """Serve that model; its drafters are on."""
    with hosted(lambda: scripted(TEMPLATE, target=agent_model(path), context_length=CONTEXT)) as server:
        yield server
