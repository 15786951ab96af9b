"""Hugging Face's smolagents, in its own loop: ``python with_smolagents.py URL FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool  # type: ignore[import-not-found]


@tool  # type: ignore[untyped-decorator]
def read_file(path: str) -> str:
    """Return what a text file says.

    Args:
        path: The path of the file.
    """
    return Path(path).read_text()


def main(url: str, path: str) -> None:
    model = OpenAIServerModel(model_id="scripted", api_base=f"{url}/v1", api_key="none")
    agent = ToolCallingAgent(tools=[read_file], model=model, max_steps=4, verbosity_level=0)
    print(agent.run(f"Which word is in {path}?"))


main(*sys.argv[1:])
