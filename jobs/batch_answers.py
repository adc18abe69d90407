"""Takes the answer out of a response object: its text, or the value that a schema asked for."""

import json
from collections.abc import Mapping
from typing import Any

from mlx_rq.jobs.errors import JobFailed, error_object
from pydantic import BaseModel

Schema = type[BaseModel] | Mapping[str, Any]


def choice_of(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gives the first choice of a chat or a completion."""
    choice: Mapping[str, Any] = response["choices"][0]
    return choice


def text_of(response: Mapping[str, Any]) -> str:
    """Gives the text of the first choice."""
    choice = choice_of(response)
    return str(choice["message"]["content"] or "") if "message" in choice else str(choice["text"])


def value_of(response: Mapping[str, Any], schema: Schema) -> Any:
    """Reads a structured answer: an instance of the pydantic class, or the plain JSON value.

    Raises JobFailed where the text is not such a value, as when it was cut off at its last token.
    """
    text = text_of(response)
    try:
        return schema.model_validate_json(text) if isinstance(schema, type) else json.loads(text)
    except ValueError as error:
        if choice_of(response)["finish_reason"] == "length":
            message = "The answer was cut off at its most tokens, before its JSON was complete."
            details = error_object(message, code="length", param="max_completion_tokens")
        else:
            message = f"The answer is not what the schema asked for: {error}"
            details = error_object(message, code="invalid_answer")
        raise JobFailed(str(response["id"]).partition("-")[2], details) from None
