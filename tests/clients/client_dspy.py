"""DSPy, which asks for structure, and for calls of tools, in its prompts."""

import os

import dspy
from calls import ANSWER
from client_data import City

_LM = dspy.LM(
    "openai/default",
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key="any",
    cache=False,
    num_retries=0,
)
dspy.configure(lm=_LM, adapter=dspy.JSONAdapter())


class Where(dspy.Signature):
    """Name a city."""

    question: str = dspy.InputField()
    city: City = dspy.OutputField()


def chat() -> None:
    assert _LM("What is two and two?") == [ANSWER]


def structured() -> None:
    assert isinstance(dspy.Predict(Where)(question="A city?").city, City)
