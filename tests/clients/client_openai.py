"""openai-python: the client that the others are made of."""

import io
import json
import time
from typing import Any

from calls import ANSWER, ASK
from client_data import ADD, City
from openai import OpenAI

client = OpenAI(max_retries=0, _strict_response_validation=True)
MODEL: Any = {"model": "default"}


def chat() -> None:
    answer = client.chat.completions.create(**MODEL, messages=ASK)
    assert answer.choices[0].message.content == ANSWER


def stream() -> None:
    chunks = client.chat.completions.create(**MODEL, messages=ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def tools() -> None:
    asked: Any = {**MODEL, "tools": [{"type": "function", "function": ADD}]}
    message = client.chat.completions.create(**asked, messages=ASK).choices[0].message
    (call,) = message.tool_calls or ()
    assert call.type == "function"
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    answer = client.chat.completions.create(**asked, messages=[*ASK, message, result])
    assert answer.choices[0].message.content == ANSWER


def structured() -> None:
    answer = client.chat.completions.parse(**MODEL, messages=ASK, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


def responses() -> None:
    first = client.responses.create(**MODEL, input="What is two and two?")
    assert first.output_text == ANSWER
    with client.responses.stream(
        **MODEL, input="And now?", previous_response_id=first.id
    ) as events:
        assert events.get_final_response().output_text == ANSWER
    assert isinstance(
        client.responses.parse(**MODEL, input="x", text_format=City).output_parsed, City
    )


def batch() -> None:
    url: Any = "/v1/chat/completions"
    body = {**MODEL, "messages": ASK}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
    file = client.files.create(file=("in.jsonl", io.BytesIO(line.encode())), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    for _ in range(100):
        batch = client.batches.retrieve(batch.id)
        if batch.status == "completed":
            break
        time.sleep(0.2)
    record = json.loads(client.files.content(batch.output_file_id or "").text)
    assert record["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
