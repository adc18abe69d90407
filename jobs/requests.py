"""The bodies that jobs carry: OpenAI's request fields, as far as a local text model honours them.

A field that is declared here has its effect (or is one of `_NO_EFFECT`, which OpenAI's clients send
and a local model has nothing to do for). A field that OpenAI knows and mlx-rq does not do yet is in
`NOT_YET`: it is refused by name, unless its value asks for nothing. Everything else is unknown.
`mlx_rq.jobs.validation` turns what pydantic finds wrong into OpenAI's words.

Source: OpenAI's API reference for chat completions and legacy completions (ranges, defaults).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from mlx_rq.jobs.fields import Name, Strict, TokenId
from mlx_rq.jobs.structured import (
    Choice,
    Grammar,
    ReasoningEffort,
    ReasoningLength,
    Regex,
    ResponseFormat,
    SchemaOrText,
    Shape,
    StructuredOutputs,
    Tool,
    ToolChoice,
    check_shape,
    check_tools,
    shape_of,
)
from pydantic import Discriminator, Field, StringConstraints, Tag

Kind = Literal["chat", "completion"]


def _shape(value: Any) -> str:
    """Tells a string from an array, so that an error speaks of the one that was meant."""
    return "array" if isinstance(value, list) else "string"


def _prompt_shape(value: Any) -> str:
    """Tells apart the four forms of a prompt by what the array begins with."""
    if not isinstance(value, list):
        return "string"
    match value[:1]:
        case [int()]:
            return "tokens"
        case [list()]:
            return "token arrays"
        case _:
            return "array"


Stop = Annotated[
    Annotated[str, StringConstraints(min_length=1), Tag("string")]
    | Annotated[
        list[Annotated[str, StringConstraints(min_length=1)]],
        Field(min_length=1, max_length=4),
        Tag("array"),
    ],
    Discriminator(_shape),
]


class TextPart(Strict):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("string")] | Annotated[list[TextPart], Field(min_length=1), Tag("array")],
    Discriminator(_shape),
]


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

_NO_EFFECT = frozenset(
    {
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "service_tier",
        "verbosity",
        "prediction",
    }
)
"""Hints to a hosted service; OpenAI's clients may send them and nothing here depends on them."""

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class _Generation(Strict):
    """What chat and completion requests have in common. None means the default."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # Every name with the values that ask for nothing.
        "stream": (False,),
        "stream_options": (),
    }

    model: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None

    # Extensions, named as vLLM and mlx-lm name them.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choice | None = None
    guided_grammar: Grammar | None = None

    @property
    def shape(self) -> Shape | None:
        """What the answer must be, None for free text."""
        guided = {name: getattr(self, name) for name in _GUIDED}
        return shape_of(self._format, self.structured_outputs, guided)

    @property
    def _format(self) -> ResponseFormat | None:
        return None

    def check(self) -> None:
        """Raises RequestError where fields do not go together, or exceed the caps on schemas."""
        if (shape := self.shape) is not None:
            check_shape(shape)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none to four."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(_Generation):
    """The body of a chat completion."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_Generation.not_yet,
        "logprobs": (False,),
        "top_logprobs": (0,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "store": (False,),
        "metadata": ({},),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None

    # Extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_length: ReasoningLength | None = None

    @property
    def _format(self) -> ResponseFormat | None:
        return self.response_format

    def check(self) -> None:
        super().check()
        check_tools(self.tools or [], self.tool_choice)

    @property
    def budget(self) -> int | None:
        """The most tokens an answer may have; None for as many as the context allows."""
        wanted = self.max_completion_tokens
        return self.max_tokens if wanted is None else wanted


class CompletionRequest(_Generation):
    """The body of a legacy completion: plain text in, its continuation out."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_Generation.not_yet,
        "logprobs": (),
        "echo": (False,),
        "suffix": ("",),
        "best_of": (1,),
    }

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    prompt: Annotated[
        Annotated[str, Tag("string")]
        | Annotated[list[str], Field(min_length=1), Tag("array")]
        | Annotated[list[TokenId], Field(min_length=1), Tag("tokens")]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1),
            Tag("token arrays"),
        ],
        Discriminator(_prompt_shape),
    ]

    @property
    def budget(self) -> int:
        """The most tokens a continuation may have; OpenAI's default is 16."""
        return self.DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever of the four forms was sent."""
        match self.prompt:
            case str():
                return [self.prompt]
            case [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return self.prompt  # type: ignore[return-value]


Request = ChatRequest | CompletionRequest

REQUESTS: Mapping[Kind, type[ChatRequest] | type[CompletionRequest]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
}


def without_hints(body: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a body without the hints to a hosted service that have no effect here."""
    return {name: value for name, value in body.items() if name not in _NO_EFFECT}
