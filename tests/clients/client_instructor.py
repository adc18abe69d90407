"""instructor: typed answers over tool calls, JSON schemas and prompts."""

import instructor
from calls import ASK
from client_data import City
from openai import OpenAI


def _ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    city = client.chat.completions.create(
        model="default", messages=ASK, response_model=City, max_retries=0
    )
    assert isinstance(city, City)


def stream() -> None:
    client = instructor.from_openai(OpenAI(max_retries=0), mode=instructor.Mode.TOOLS)
    *_, last = client.chat.completions.create_partial(
        model="default", messages=ASK, response_model=City
    )
    assert (last.name, last.people) == ("x", 1)


def tools() -> None:
    _ask(instructor.Mode.TOOLS)


def structured() -> None:
    _ask(instructor.Mode.JSON_SCHEMA)


def responses() -> None:
    _ask(instructor.Mode.RESPONSES_TOOLS)
