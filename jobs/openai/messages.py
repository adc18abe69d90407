"""The messages of a chat, as OpenAI's clients send them and as answers carry them back."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Discriminator, Field, Tag

from mlx_rq.jobs.openai.fields import (
    CalledName,
    History,
    SpeakerName,
    Strict,
    string_or_array,
)


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


class ThinkingPart(History):
    """What was thought before it was answered, as Anthropic's and Mistral's models write it."""

    left_out = frozenset({"signature", "closed"})

    type: Literal["thinking"]
    thinking: str | list[TextPart]

    @property
    def text(self) -> str:
        """Nothing of it is said."""
        return ""


class Spoken(History):
    """What was said aloud."""

    left_out = frozenset({"id", "data", "expires_at"})

    transcript: str | None = None


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Field(min_length=1), Tag("array")],
    Discriminator(string_or_array),
]


AssistantContent = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[
        list[Annotated[TextPart | RefusalPart | ThinkingPart, Field(discriminator="type")]],
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


class CustomCall(Strict):
    name: CalledName
    input: str


# Those who put an answer together from a stream leave the index in.
_BESIDE_CALLS = frozenset({"index", "extra_content", "provider_specific_fields"})


class FunctionToolCall(History):
    left_out = _BESIDE_CALLS

    id: str
    type: Literal["function"]
    function: FunctionCall

    @property
    def called(self) -> FunctionCall:
        return self.function


class CustomToolCall(History):
    """A call of a tool that takes any text, as other servers' models make them."""

    left_out = _BESIDE_CALLS

    id: str
    type: Literal["custom"]
    custom: CustomCall

    @property
    def called(self) -> FunctionCall:
        """Reads it as a call of a function, its text as the arguments."""
        return FunctionCall(name=self.custom.name, arguments=self.custom.input)


def _call_shape(value: Any) -> str:
    """Names the form of a call; one of an unknown type is told of that as a function's."""
    is_custom = isinstance(value, CustomToolCall) or (
        isinstance(value, Mapping) and value.get("type") == "custom"
    )
    return "of a custom tool" if is_custom else "of a function"


ToolCall = Annotated[
    Annotated[FunctionToolCall, Tag("of a function")]
    | Annotated[CustomToolCall, Tag("of a custom tool")],
    Discriminator(_call_shape),
]


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
            # `prefix`: a last message of the assistant's is gone on with anyway.
            *("annotations", "parsed", "cache_control", "prefix"),
            # OpenAI's stored completions; OpenRouter; Groq; Gemini; Azure; litellm; vLLM.
            *("id", "content_parts", "reasoning_details", "images", "executed_tools"),
            *("extra_content", "context", "end_turn"),
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
    thinking: str | None = None
    audio: Spoken | None = None
    function_call: FunctionCall | None = None
    """What a tool call was before there could be several."""

    @property
    def said(self) -> str:
        """What it said, in whichever way."""
        spoken = self.audio and self.audio.transcript
        return joined(self.content) or self.refusal or spoken or ""

    @property
    def thought(self) -> str:
        """What it thought before, in whichever field a server has that."""
        parts = self.content if isinstance(self.content, list) else []
        thinking = (part.thinking for part in parts if isinstance(part, ThinkingPart))
        in_parts = "\n\n".join(joined(one) for one in thinking)
        return self.reasoning_content or self.reasoning or self.thinking or in_parts

    @property
    def calls(self) -> list[ToolCall]:
        """All that it called, of whichever kind."""
        if self.function_call is None:
            return self.tool_calls or []
        call = FunctionToolCall(
            id=legacy_call_id(self.function_call.name), type="function", function=self.function_call
        )
        return [*(self.tool_calls or ()), call]


class ToolMessage(History):
    left_out = frozenset({"cache_control"})

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: SpeakerName | None = None


class FunctionMessage(History):
    """What a function returned, before calls had ids."""

    role: Literal["function"]
    content: Content | None
    name: CalledName

    @property
    def tool_call_id(self) -> str:
        return legacy_call_id(self.name)


def legacy_call_id(name: str) -> str:
    """Names a call of the function that a message without an id speaks of."""
    return f"call_{name}"


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage,
    Field(discriminator="role"),
]
