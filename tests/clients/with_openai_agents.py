"""OpenAI's Agents SDK, in its own loop: ``python with_openai_agents.py URL API FILE``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agents import (  # type: ignore[import-not-found]
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool  # type: ignore[untyped-decorator]
def read_file(path: str) -> str:
    """Return what a text file says.

    Args:
        path: of the file.
    """
    return Path(path).read_text()


async def main(url: str, api: str, path: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    kind = {"responses": OpenAIResponsesModel, "chat": OpenAIChatCompletionsModel}[api]
    agent = Agent(
        name="reader",
        instructions="Read files with your tool.",
        tools=[read_file],
        model=kind(model="scripted", openai_client=client),
    )
    asked = f"Which word is in {path}?"
    whole = await Runner.run(agent, asked)
    print(whole.final_output)
    streamed = Runner.run_streamed(agent, asked)
    kinds = [event.type async for event in streamed.stream_events()]
    print(streamed.final_output, "in", len(kinds), "events")


asyncio.run(main(*sys.argv[1:]))
