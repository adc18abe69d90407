"""DSPy: modules that ask for structure in their prompts, and its models themselves."""

import asyncio
import os
from typing import Any

import dspy
from calls import ANSWER, ASK
from client_data import ADD, City

_OPTIONS: Any = {
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": "any",
    "cache": False,
    "num_retries": 0,
}
_LM = dspy.LM("openai/default", **_OPTIONS)
dspy.configure(lm=_LM, adapter=dspy.JSONAdapter())


class Where(dspy.Signature):
    """Name a city."""

    question: str = dspy.InputField()
    city: City = dspy.OutputField()


def chat() -> None:
    assert _LM("What is two and two?") == [ANSWER]


def stream() -> None:
    async def listen() -> list[Any]:
        streaming = dspy.streamify(dspy.Predict(Where))
        return [piece async for piece in streaming(question="A city?")]

    *pieces, last = asyncio.run(listen())
    assert pieces
    assert isinstance(last.city, City)


def tools() -> None:
    """Modules offer tools natively only to models that are in DSPy's list; a model itself does."""
    offered: Any = {"tools": [{"type": "function", "function": ADD}]}
    (said,) = _LM(messages=ASK, **offered)
    (call,) = said["tool_calls"]
    calling = {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    assert _LM(messages=[*ASK, calling, result], **offered) == [ANSWER]


def responses() -> None:
    model = dspy.LM("openai/default", model_type="responses", **_OPTIONS)
    assert model("What is two and two?") == [{"text": ANSWER}]


def structured() -> None:
    assert isinstance(dspy.Predict(Where)(question="A city?").city, City)
