"""The messages of a chat, as OpenAI's clients send them and as answers carry them back."""

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Discriminator, Field, Tag

from mlx_rq.jobs.openai.fields import CalledName, History, SpeakerName, string_or_array


class TextPart(History):
    left_out = frozenset({"annotations", "cache_control"})

    type: Literal["text"]
    text: str


class RefusalPart(History):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Field(min_length=1), Tag("array")],
    Discriminator(string_or_array),
]


AssistantContent = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[
        list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
        Field(min_length=1),
        Tag("array"),
    ],
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


class FunctionCall(History):
    left_out = frozenset({"parsed_arguments"})

    name: CalledName
    arguments: str


class ToolCall(History):
    # Those who put an answer together from a stream leave the index in.
    left_out = frozenset({"index", "extra_content", "provider_specific_fields"})

    id: str
    type: Literal["function"]
    function: FunctionCall


class SystemMessage(History):
    left_out = frozenset({"cache_control"})

    role: Literal["system", "developer"]
    content: Content
    name: SpeakerName | None = None


class UserMessage(History):
    left_out = frozenset({"cache_control"})

    role: Literal["user"]
    content: Content
    name: SpeakerName | None = None


class AssistantMessage(History):
    left_out = frozenset(
        {
            *("annotations", "parsed", "cache_control"),
            # OpenAI's stored completions; OpenRouter; Groq; litellm; vLLM.
            *("id", "content_parts", "reasoning_details", "images", "executed_tools"),
            *("provider_specific_fields", "thinking_blocks", "reasoning_items", "token_ids"),
        }
    )

    role: Literal["assistant"]
    content: AssistantContent | None = None
    name: SpeakerName | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(History):
    left_out = frozenset({"cache_control"})

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: SpeakerName | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]
