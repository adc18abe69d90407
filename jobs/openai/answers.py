"""Takes the answer out of a response object: its text, or the value that a schema asked for."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mlx_rq.jobs.openai.errors import JobFailed, error_object
from mlx_rq.jobs.openai.job_request import JobRequest, Said
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.schema_types import Schema, read_value

_BY_OBJECT: Mapping[str, type[JobRequest]] = {
    request.object_name: request for request in KINDS.values()
}


class Usage(NamedTuple):
    """Counts of tokens; `cached` prompt tokens were not computed for this answer."""

    prompt: int
    cached: int
    completion: int

    def plus(self, other: "Usage") -> "Usage":
        """Sums up."""
        return Usage(*map(sum, zip(self, other, strict=True)))


def usage_of(response: Mapping[str, Any]) -> Usage:
    """Reads the usage of a response object, by the names of whichever endpoint it is of."""
    usage = response.get("usage") or {}
    prompt, completion = (
        ("input_tokens", "output_tokens")
        if "input_tokens" in usage
        else ("prompt_tokens", "completion_tokens")
    )
    cached = (usage.get(f"{prompt}_details") or {}).get("cached_tokens", 0)
    return Usage(usage.get(prompt, 0), cached, usage.get(completion, 0))


def said_in(response: Mapping[str, Any]) -> list[Said]:
    """Reads what each choice of a response object says; nothing where its kind is not known."""
    kind = _BY_OBJECT.get(response["object"])
    return [Said(None)] if kind is None else kind.said(response)


def is_answer(value: Mapping[str, Any]) -> bool:
    """Tells whether a value is a response object, which can be read if its kind is known."""
    try:
        said = said_in(value)
        usage = usage_of(value)
    except (KeyError, TypeError, AttributeError, IndexError):
        return False
    texts = all(isinstance(choice.text, str | None) for choice in said)
    return bool(said) and texts and all(type(tokens) is int for tokens in usage)


def text_of(response: Mapping[str, Any]) -> str:
    """Gives the text of the first choice, or of all messages of a responses object."""
    return said_in(response)[0].text or ""


def finish_reason_of(response: Mapping[str, Any]) -> str:
    """Says why the answer ended, in the words of chat completions."""
    return said_in(response)[0].finish_reason


def value_of(response: Mapping[str, Any], schema: Schema) -> Any:
    """Reads a structured answer: a value of the type, or the plain JSON value.

    Raises JobFailed where the text is not such a value, as when it was cut off at its last token.
    """
    text = text_of(response)
    try:
        return read_value(text, schema)
    except ValueError as error:
        if finish_reason_of(response) == "length":
            message = "The answer was cut off at its most tokens, before its JSON was complete."
            details = error_object(message, code="length", param="max_completion_tokens")
        else:
            message = f"The answer is not what the schema asked for: {error}"
            details = error_object(message, code="invalid_answer")
        raise JobFailed(str(response["id"]).partition("-")[2], details) from None
