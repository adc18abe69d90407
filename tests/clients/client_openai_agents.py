"""openai-agents: agents over chats, and over the Responses API (their default)."""

import asyncio
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from calls import ANSWER
from client_data import City
from openai import AsyncOpenAI

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def _agent(kind: type = OpenAIChatCompletionsModel, **options: Any) -> Any:
    model = kind(model="default", openai_client=AsyncOpenAI(max_retries=0))
    return Agent(name="test", instructions="Be brief.", model=model, **options)


def _run(agent: Any) -> Any:
    return asyncio.run(Runner.run(agent, "What is two and two?")).final_output


def chat() -> None:
    assert _run(_agent()) == ANSWER


def stream() -> None:
    async def listen() -> str:
        result = Runner.run_streamed(_agent(), "What is two and two?")
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    assert asyncio.run(listen()) == ANSWER


def tools() -> None:
    assert _run(_agent(tools=[add])) == ANSWER


def structured() -> None:
    assert isinstance(_run(_agent(output_type=City)), City)


def responses() -> None:
    assert _run(_agent(OpenAIResponsesModel, tools=[add])) == ANSWER
    assert isinstance(_run(_agent(OpenAIResponsesModel, output_type=City)), City)
