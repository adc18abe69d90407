"""The bodies that jobs carry: OpenAI's request fields, as far as a local text model honours them.

A field that is declared here has its effect (or is one of `_NO_EFFECT`, which OpenAI's clients send
and a local model has nothing to do for). A field that OpenAI knows and mlx-rq does not do yet is in
`not_yet`: it is refused by name, unless its value asks for nothing. Everything else is unknown.
`mlx_rq.jobs.openai.validation` turns what pydantic finds wrong into OpenAI's words.

Source: OpenAI's API reference for chat completions and legacy completions (ranges, defaults).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.fields import Metadata, ModelName, TemplateOptions, TokenId
from mlx_rq.jobs.openai.messages import Message
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.openai.sampling import Sampling
from mlx_rq.jobs.openai.structured import (
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

Kind = Literal["chat", "completion", "responses"]

ANY_MODEL = "default"
"""The model that a body without `model` asks for; every worker serves it."""


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


class _Generation(Sampling):
    """What chat and completion requests have in common. None means the default."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # Every name with the values that ask for nothing.
        "stream": (False,),
        "stream_options": (),
    }

    model: ModelName | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None

    # Extensions, named as vLLM names them.
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


class ChatRequest(_Generation):
    """The body of a chat completion."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_Generation.not_yet,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
    }

    BUDGET_FIELD: ClassVar[str] = "max_completion_tokens"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: Metadata | None = None
    store: bool | None = None

    # Extensions.
    chat_template_kwargs: TemplateOptions | None = None
    reasoning_length: ReasoningLength | None = None

    @property
    def _format(self) -> ResponseFormat | None:
        return self.response_format

    def check(self) -> None:
        super().check()
        check_tools(self.tools or [], self.tool_choice)
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError(
                "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
                code="invalid_value",
                param="top_logprobs",
            )

    @property
    def measured(self) -> int | None:
        """How many of the likeliest tokens to tell beside each chosen one; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def generated(self) -> int:
        """How many choices are generated."""
        return self.n or 1

    @property
    def budget(self) -> int | None:
        """The most tokens an answer may have; None for as many as the context allows."""
        wanted = self.max_completion_tokens
        return self.max_tokens if wanted is None else wanted


class CompletionRequest(_Generation):
    """The body of a legacy completion: plain text in, its continuation out."""

    BUDGET_FIELD: ClassVar[str] = "max_tokens"
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
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "Invalid 'max_tokens': integer below minimum value. Expected a value >= 1 "
                "(0 only with 'echo'), but got 0 instead.",
                code="integer_below_min_value",
                param="max_tokens",
            )
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise RequestError(
                "You requested that the server return more choices than it will generate (HINT: "
                f"you must set 'n' (currently {self.n or 1}) to be at most 'best_of' (currently "
                f"{self.best_of}), or omit either parameter).",
                code="invalid_value",
                param="best_of",
            )
        if self.suffix and self.echo:
            raise RequestError(
                "Invalid 'echo': with a 'suffix', the text in the middle is all that is returned.",
                code="invalid_value",
                param="echo",
            )

    @property
    def generated(self) -> int:
        """How many choices are generated for each prompt; the best `n` of them are returned."""
        return self.best_of or self.n or 1

    @property
    def measured(self) -> int | None:
        """How many of the likeliest tokens to tell beside each chosen one; None for no logprobs."""
        chooses = self.generated > (self.n or 1)
        return 0 if self.logprobs is None and chooses else self.logprobs

    @property
    def budget(self) -> int:
        """The most tokens a continuation may have; OpenAI's default is 16."""
        return self.DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, whichever of the four forms was sent."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        prompts: list[str] | list[list[int]] = [prompt] if is_one else prompt
        return prompts


Request = ChatRequest | CompletionRequest
"""What is generated from. A responses request becomes a chat for that (`responses_to_chat.py`)."""

JobRequest = Request | ResponsesRequest
"""What a job carries."""

REQUESTS: Mapping[Kind, type[ChatRequest] | type[CompletionRequest] | type[ResponsesRequest]] = {
    "chat": ChatRequest,
    "completion": CompletionRequest,
    "responses": ResponsesRequest,
}


def without_hints(body: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a body without the hints to a hosted service that have no effect here."""
    return {name: value for name, value in body.items() if name not in _NO_EFFECT}
