"""LlamaIndex's OpenAILike."""

import asyncio
import os
from typing import Any

from calls import ANSWER
from client_data import City
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses

_OPTIONS: Any = {
    "model": "default",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": "any",
    "is_function_calling_model": True,
    "max_retries": 0,
}
_MODEL: Any = OpenAILike(is_chat_model=True, **_OPTIONS)
_HOSTED: Any = OpenAILikeResponses(**_OPTIONS)
_ASK = [ChatMessage(role="user", content="What is two and two?")]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def chat() -> None:
    assert _MODEL.chat(_ASK).message.content == ANSWER


def stream() -> None:
    assert "".join(chunk.delta or "" for chunk in _MODEL.stream_chat(_ASK)) == ANSWER


def _use_tools(model: Any) -> None:
    async def run() -> str:
        return str(await FunctionAgent(tools=[add], llm=model).run("What is two and two?"))

    assert asyncio.run(run()) == ANSWER


def tools() -> None:
    _use_tools(_MODEL)


def responses() -> None:
    assert _HOSTED.chat(_ASK).message.content == ANSWER
    assert "".join(chunk.delta or "" for chunk in _HOSTED.stream_chat(_ASK)) == ANSWER
    _use_tools(_HOSTED)


def structured() -> None:
    assert isinstance(_MODEL.as_structured_llm(City).chat(_ASK).raw, City)
