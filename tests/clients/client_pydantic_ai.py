"""pydantic-ai: agents with typed output, over chats and responses."""

import asyncio
from datetime import timedelta
from typing import Any

from calls import ANSWER
from client_data import City
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.capabilities import BatchModelRequests
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel


def _agent(model: Any = OpenAIChatModel, **options: Any) -> Any:
    return Agent(model("default"), **options)


def _run(agent: Any) -> Any:
    return agent.run_sync("What is two and two?").output


def _adding(**options: Any) -> Any:
    agent = _agent(**options)

    @agent.tool_plain
    def add(a: int, b: int) -> int:
        return a + b

    return agent


def chat() -> None:
    assert _run(_agent()) == ANSWER


def stream() -> None:
    assert _agent().run_stream_sync("What is two and two?").get_output() == ANSWER


def tools() -> None:
    assert _run(_adding()) == ANSWER


def structured() -> None:
    for output in (City, NativeOutput(City)):  # over a tool, and over a JSON schema
        assert isinstance(_run(_agent(output_type=output)), City)


def responses() -> None:
    assert _run(_adding(model=OpenAIResponsesModel)) == ANSWER
    assert isinstance(_run(_agent(OpenAIResponsesModel, output_type=NativeOutput(City))), City)


def batch() -> None:
    """Two runs whose requests wait in one batch: for a tool's call, and for the answer."""
    soon = timedelta(seconds=0.2)
    batching = BatchModelRequests(max_requests=2, poll_interval=soon, max_poll_interval=soon)
    agent = _adding(model=OpenAIResponsesModel, capabilities=[batching])

    async def run() -> list[Any]:
        return await asyncio.gather(*(agent.run("What is two and two?") for _ in range(2)))

    assert [one.output for one in asyncio.run(run())] == [ANSWER, ANSWER]
