"""instructor: typed answers over tool calls, JSON schemas and prompts."""

import time

import instructor
from calls import ANSWER, ASK
from client_data import City
from instructor.batch import BatchProcessor
from openai import OpenAI


def _ask(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(max_retries=0), mode=mode)
    city = client.chat.completions.create(
        model="default", messages=ASK, response_model=City, max_retries=0
    )
    assert isinstance(city, City)


def chat() -> None:
    """Without a model of the answer, it gives what the server said."""
    client = instructor.from_openai(OpenAI(max_retries=0))
    answer = client.chat.completions.create(model="default", messages=ASK, response_model=None)
    assert answer.choices[0].message.content == ANSWER


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


def batch() -> None:
    processor = BatchProcessor("openai/default", City)
    batch_id = processor.submit_batch(processor.create_batch_from_messages([ASK, ASK]))
    for _ in range(100):
        if processor.get_batch_status(batch_id)["status"] == "completed":
            break
        time.sleep(0.2)
    assert [type(one.result) for one in processor.retrieve_results(batch_id)] == [City, City]
