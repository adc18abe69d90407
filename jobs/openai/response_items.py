"""What the body of a responses job is made of: the items of its input, its tools, its formats.

Source: OpenAI's API reference for responses (names, ranges, defaults).
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from mlx_rq.jobs.openai.fields import CalledName, History, Name, Strict, string_or_array
from mlx_rq.jobs.openai.messages import RefusalPart
from mlx_rq.jobs.openai.structured import (
    JsonObjectFormat,
    ReasoningEffort,
    TextFormat,
    choice_shape,
)

Status = Literal["in_progress", "completed", "incomplete"]


class TextPart(History):
    """A part of a message: what a user sends, or what an answer carries."""

    left_out = frozenset({"annotations", "logprobs", "parsed", "cache_control"})

    type: Literal["input_text", "output_text", "text"]
    text: str


Parts = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[
        list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
        Tag("array"),
    ],
    Discriminator(string_or_array),
]


class MessageItem(History):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(History):
    left_out = frozenset({"parsed_arguments", "async", "async_", "caller", "namespace"})

    type: Literal["function_call"]
    call_id: str
    name: CalledName
    arguments: str
    id: str | None = None
    status: Status | None = None


class CustomCallItem(History):
    """A call of a tool that takes any text, as other servers' models make them."""

    left_out = frozenset({"async", "async_", "caller", "namespace", "status"})

    type: Literal["custom_tool_call"]
    call_id: str
    name: CalledName
    input: str
    id: str | None = None


class OutputItem(History):
    left_out = frozenset({"caller", "name", "namespace"})

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None


class OwnCallItem(History):
    """A call of one of OpenAI's own tools that the client runs: a shell, a patch of files."""

    left_out = frozenset({"caller", "environment"})

    type: Literal["local_shell_call", "shell_call", "apply_patch_call"]
    call_id: str
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    id: str | None = None
    status: Status | None = None


class OwnOutputItem(History):
    left_out = frozenset({"caller", "max_output_length"})

    type: Literal["local_shell_call_output", "shell_call_output", "apply_patch_call_output"]
    output: str | list[dict[str, Any]] | None = None
    call_id: str | None = None
    id: str | None = None
    status: Status | Literal["failed"] | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(History):
    left_out = frozenset({"encrypted_content"})  # which only who wrote it can read

    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: Status | None = None


class HostedCallItem(History):
    """What a hosted service did itself; what came of it is in the answer that follows."""

    model_config = ConfigDict(extra="ignore")

    type: Literal[
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "program",
        "program_output",
    ]


class ItemReference(Strict):
    """Names an item of an earlier answer; `mlx_rq.jobs.client.conversation` puts that in its place
    before a job is queued.
    """

    type: Literal["item_reference"]
    id: str


def _with_type(item: Any) -> Any:
    """An item without a type is a message, or a reference where it has nothing but an id."""
    if not isinstance(item, dict) or item.get("type") is not None:
        return item
    is_id = item.keys() - {"type"} == {"id"}
    return {**item, "type": "item_reference" if is_id else "message"}


def referred(item: Any) -> str | None:
    """Gives the id of the item that this one stands for; None where it stands for itself."""
    typed = _with_type(item)
    return typed["id"] if typed["type"] == "item_reference" else None


Item = Annotated[
    Annotated[
        MessageItem
        | FunctionCallItem
        | CustomCallItem
        | OutputItem
        | OwnCallItem
        | OwnOutputItem
        | ReasoningItem
        | HostedCallItem
        | ItemReference,
        Field(discriminator="type"),
    ],
    BeforeValidator(_with_type),
]


class JsonSchemaFormat(Strict):
    """A JSON schema, its fields not nested as they are in a chat's."""

    type: Literal["json_schema"]
    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Text(Strict):
    format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(Strict):
    """A tool, its fields not nested as they are in a chat's."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(Strict):
    type: Literal["function"]
    name: Name


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")],
    Discriminator(choice_shape),
]


class Reasoning(Strict):
    """How much to reason. A summary is the reasoning itself: there is no second model for one."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
