"""LangChain's ChatOpenAI."""

from typing import Any

from calls import ANSWER
from client_data import City
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def _model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="default", max_retries=0, **options)


def _use_tools(model: ChatOpenAI) -> None:
    bound, asked = model.bind_tools([add]), HumanMessage("What is two and two?")
    said: Any = bound.invoke([asked])
    (call,) = said.tool_calls
    result = ToolMessage(str(add.invoke(call["args"])), tool_call_id=call["id"])
    assert bound.invoke([asked, said, result]).text == ANSWER


def chat() -> None:
    assert _model().invoke("What is two and two?").text == ANSWER


def stream() -> None:
    assert "".join(chunk.text for chunk in _model().stream("What is two and two?")) == ANSWER


def tools() -> None:
    _use_tools(_model())


def structured() -> None:
    for method in ("json_schema", "function_calling"):
        assert isinstance(
            _model().with_structured_output(City, method=method).invoke("A city?"), City
        )


def responses() -> None:
    model = _model(use_responses_api=True)
    assert model.invoke("What is two and two?").text == ANSWER
    assert "".join(chunk.text for chunk in model.stream("And now?")) == ANSWER
    _use_tools(model)
