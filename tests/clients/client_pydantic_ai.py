"""pydantic-ai: agents with typed output, over chats and responses."""

from typing import Any

from calls import ANSWER
from client_data import City
from pydantic_ai import Agent, NativeOutput
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
