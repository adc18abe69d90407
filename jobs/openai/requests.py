"""The bodies that jobs carry: OpenAI's request fields, as far as a local text model honours them.

A field that is declared here has its effect. A field that OpenAI knows and mlx-rq does not do yet
is in `not_yet`: it is refused by name, unless its value asks for nothing. Everything else is
unknown, but for hints to a hosted service (`job_request.py`). `mlx_rq.jobs.openai.validation` turns
what pydantic finds wrong into OpenAI's words.

Source: OpenAI's API reference for chat completions and legacy completions (ranges, defaults).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Field, Tag

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.fields import Metadata, TemplateOptions, TokenId
from mlx_rq.jobs.openai.generation import GenerationRequest
from mlx_rq.jobs.openai.job_request import Body, JobRequest, Said
from mlx_rq.jobs.openai.messages import Message, joined
from mlx_rq.jobs.openai.structured import (
    ReasoningEffort,
    ReasoningLength,
    ResponseFormat,
    Tool,
    ToolChoice,
    check_tools,
)

ANY_MODEL = "default"
"""The model that a body without `model` asks for; every worker serves it."""


BETWEEN = ":"
"""Stands between the names of a model and of an adapter, so it is in none of an adapter's."""


def asked_model(model: str | None, adapter: str | None = None) -> str:
    """Names what a body asks for: a model, or a model with an adapter on it.

    An adapter is asked for by a name under which a worker serves it; no job has files loaded.
    """
    name = model or ANY_MODEL
    return name if adapter is None else f"{name}{BETWEEN}{adapter}"


def is_any(name: str) -> bool:
    """Tells the name that every worker serves, by itself or with an adapter, from a model's own."""
    return name.partition(BETWEEN)[0] == ANY_MODEL


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


class ChatRequest(GenerationRequest):
    """The body of a chat completion."""

    kind = "chat"
    prompt_field = "messages"
    budget_field = "max_completion_tokens"
    url = "/v1/chat/completions"
    object_name = "chat.completion"
    id_prefix = "chatcmpl-"
    example: ClassVar[Body] = {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_completion_tokens": 20,
    }
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **JobRequest.not_yet,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "moderation": (),
    }

    in_turns: ClassVar[bool] = True
    """Whether the answer is a turn of a conversation, as the model writes one: it may reason, and
    call tools.
    """

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
        return self.returned

    @property
    def budget(self) -> int | None:
        """The most tokens an answer may have; None for as many as the context allows."""
        wanted = self.max_completion_tokens
        return self.max_tokens if wanted is None else wanted

    @property
    def plain_text(self) -> str:
        """The prompt as a person reads it."""
        return "\n".join(f"{message.role}: {joined(message.content)}" for message in self.messages)

    def generated_from(self) -> "ChatRequest":
        return self

    @classmethod
    def _said(cls, choice: Body) -> Said:
        message = choice["message"]
        calls = message.get("tool_calls") or ()
        return Said(message.get("content"), calls, choice.get("finish_reason", "stop"))


class CompletionRequest(GenerationRequest):
    """The body of a legacy completion: plain text in, its continuation out."""

    kind = "completion"
    prompt_field = "prompt"
    budget_field = "max_tokens"
    url = "/v1/completions"
    object_name = "text_completion"
    id_prefix = "cmpl-"
    example: ClassVar[Body] = {"prompt": "Once upon a time", "max_tokens": 20}

    DEFAULT_MAX_TOKENS: ClassVar[int] = 16

    # A plain text goes on: without turns, tools, reasoning.
    in_turns: ClassVar[bool] = False
    tools: ClassVar[None] = None
    tool_choice: ClassVar[None] = None
    parallel_tool_calls: ClassVar[None] = None
    reasoning_length: ClassVar[None] = None

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
        if self.best_of is not None and self.best_of < self.returned:
            raise RequestError(
                "You requested that the server return more choices than it will generate (HINT: "
                f"you must set 'n' (currently {self.returned}) to be at most 'best_of' (currently "
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
        return self.best_of or self.returned

    @property
    def measured(self) -> int | None:
        """How many of the likeliest tokens to tell beside each chosen one; None for no logprobs."""
        chooses = self.generated > self.returned
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

    @property
    def prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo else None

    def echoed(self, index: int) -> str | list[int]:
        return self.prompts[index] if self.echo else ""

    @property
    def plain_text(self) -> str:
        """The prompts as a person reads them."""
        return "\n".join(map(str, self.prompts))

    def generated_from(self) -> "CompletionRequest":
        return self

    @classmethod
    def _said(cls, choice: Body) -> Said:
        return Said(choice["text"], (), choice.get("finish_reason", "stop"))


Request = ChatRequest | CompletionRequest
"""What is generated from."""
