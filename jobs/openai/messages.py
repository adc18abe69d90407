"""The messages of a chat, as OpenAI's clients send them and as answers carry them back."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Discriminator, Field, Tag

from mlx_rq.jobs.openai.fields import Name, Strict, string_or_array


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Field(min_length=1), Tag("array")],
    Discriminator(string_or_array),
]


class HasText(Protocol):
    """A part of a message, of whichever kind of request."""

    @property
    def text(self) -> str: ...


def joined(content: str | Sequence[HasText] | None) -> str:
    """Gives a message's text, its parts joined; empty where it has none."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content)


class FunctionCall(Strict):
    name: Name
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Content
    name: Name | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Content | None = None
    name: Name | None = None
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1)] | None = None

    # What answers carry besides, so that an answer can be sent back as it came.
    reasoning: str | None = None
    reasoning_content: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
