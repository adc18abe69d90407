"""The body of a responses job: OpenAI's newer way to ask for what a chat asks for.

It is generated as a chat (`mlx_rq.jobs.openai.responses_to_chat`) and answered as a Response object
(`mlx_rq.jobs.openai.response_object`).

Source: OpenAI's API reference for responses (names, ranges, defaults).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag

from mlx_rq.jobs.openai.fields import (
    Metadata,
    ModelName,
    Name,
    Strict,
    TemplateOptions,
    string_or_array,
)
from mlx_rq.jobs.openai.priority import Priority
from mlx_rq.jobs.openai.sampling import Sampling
from mlx_rq.jobs.openai.structured import JsonObjectFormat, ReasoningEffort, TextFormat

Status = Literal["in_progress", "completed", "incomplete"]

_PRIORITIES: Mapping[str, Priority] = {"soonest": "high", "2h": "default", "8h": "low"}
"""How urgent a job is whose answer is wanted within such a window."""


class TextPart(Strict):
    """A part of a message: what a user sends, or what an answer carries."""

    type: Literal["input_text", "output_text", "text"]
    text: str

    # What answers carry besides, so that an answer can be sent back as it came.
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


Parts = Annotated[
    Annotated[str, Tag("string")]
    | Annotated[
        list[Annotated[TextPart | RefusalPart, Field(discriminator="type")]],
        Tag("array"),
    ],
    Discriminator(string_or_array),
]


class MessageItem(Strict):
    type: Literal["message"]
    role: Literal["system", "developer", "user", "assistant"]
    content: Parts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: Name
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Parts
    id: str | None = None
    status: Status | None = None


class ReasoningText(Strict):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    summary: list[SummaryText] | None = None
    content: list[ReasoningText] | None = None
    id: str | None = None
    status: Status | None = None
    encrypted_content: None = None


def _as_message(item: Any) -> Any:
    """An item without a type is a message."""
    return item if not isinstance(item, dict) or "type" in item else {"type": "message", **item}


Item = Annotated[
    Annotated[
        MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_as_message),
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


def _choice_shape(value: Any) -> str:
    if isinstance(value, dict):
        return "allowed" if value.get("type") == "allowed_tools" else "named"
    return "mode"


class Reasoning(Strict):
    """How much to reason. A summary is the reasoning itself: there is no second model for one."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class BackgroundOptions(Strict):
    completion_window: Literal["soonest", "2h", "8h"] | None = None


class ResponsesRequest(Sampling):
    """The body of a responses job."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "stream": (False,),
        "stream_options": (),
        "conversation": (),
        "context_management": ([],),
        "moderation": (),
    }

    BUDGET_FIELD: ClassVar[str] = "max_output_tokens"

    input: Annotated[
        Annotated[str, Tag("string")] | Annotated[list[Item], Field(min_length=1), Tag("array")],
        Discriminator(string_or_array),
    ]
    model: ModelName | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=16)] | None = None
    previous_response_id: Annotated[str, StringConstraints(min_length=1)] | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: (
        Annotated[
            Annotated[Literal["none", "auto", "required"], Tag("mode")]
            | Annotated[NamedTool, Tag("named")]
            | Annotated[AllowedTools, Tag("allowed")],
            Discriminator(_choice_shape),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Counts the calls of tools that a service runs itself; here there are none."""
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None

    # Extension.
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def priority(self) -> Priority | None:
        """How urgent the job is; None where it does not say."""
        window = self.background_options and self.background_options.completion_window
        return _PRIORITIES[window] if window else None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are to be told with their logprobs."""
        return self.top_logprobs is not None or bool(self.include)
