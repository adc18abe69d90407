"""litellm, with OpenAI as its provider."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import litellm
from calls import ANSWER, ASK
from client_data import ADD, City

MODEL: Any = {"model": "openai/default"}


def chat() -> None:
    assert litellm.completion(**MODEL, messages=ASK).choices[0].message.content == ANSWER


def stream() -> None:
    chunks = litellm.completion(**MODEL, messages=ASK, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def tools() -> None:
    asked: Any = {**MODEL, "tools": [{"type": "function", "function": ADD}]}
    message = litellm.completion(**asked, messages=ASK).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    answer = litellm.completion(**asked, messages=[*ASK, message, result])
    assert answer.choices[0].message.content == ANSWER


def structured() -> None:
    answer = litellm.completion(**MODEL, messages=ASK, response_format=City)
    City.model_validate_json(answer.choices[0].message.content)


def responses() -> None:
    answer = litellm.responses(**MODEL, input="What is two and two?")
    assert answer.output[0].content[0].text == ANSWER


def batch() -> None:
    url: Any = "/v1/chat/completions"
    body = {"model": "default", "messages": ASK}
    line = json.dumps({"custom_id": "a", "method": "POST", "url": url, "body": body})
    provider: Any = {"custom_llm_provider": "openai"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "in.jsonl"
        path.write_text(line)
        with path.open("rb") as content:
            file = litellm.create_file(file=content, purpose="batch", **provider)
    batch: Any = litellm.create_batch(
        completion_window="24h", endpoint=url, input_file_id=file.id, **provider
    )
    for _ in range(100):
        batch = litellm.retrieve_batch(batch_id=batch.id, **provider)
        if batch.status == "completed":
            break
        time.sleep(0.2)
    content = litellm.file_content(file_id=batch.output_file_id, **provider).text
    assert json.loads(content)["response"]["status_code"] == 200
