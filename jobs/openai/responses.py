"""The body of a responses job: OpenAI's newer way to ask for what a chat asks for.

It is generated as a chat, and answered as a Response object
(`mlx_rq.jobs.openai.response_object`).

Source: OpenAI's API reference for responses (names, ranges, defaults).
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, StringConstraints, Tag

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.fields import Metadata, Strict, TemplateOptions, string_or_array
from mlx_rq.jobs.openai.job_request import Body, JobRequest, Said
from mlx_rq.jobs.openai.messages import SystemMessage
from mlx_rq.jobs.openai.priority import Priority
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.openai.response_items import (
    FunctionTool,
    Item,
    ItemReference,
    Reasoning,
    Text,
    ToolChoice,
)
from mlx_rq.jobs.openai.responses_to_chat import chat_choice, chat_format, chat_tool, turns
from mlx_rq.jobs.openai.sampling import Sampling

_PRIORITIES: Mapping[str, Priority] = {"soonest": "high", "2h": "default", "8h": "low"}
"""How urgent a job is whose answer is wanted within such a window."""

_SAME_NAME = (
    *Sampling.model_fields,
    *("model", "adapters", "parallel_tool_calls", "metadata", "store", "chat_template_kwargs"),
)
_CALLED_BY_CHATS = {
    # What a fault of the chat is called in the request that it was made from.
    "messages": "input",
    "response_format": "text.format.schema",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


LOGPROBS: Final = "message.output_text.logprobs"

Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""What a response may be asked to hold besides, as OpenAI has it.

Reasoning always comes, and in plain text; images and OpenAI's own tools there are none of here.
"""


class BackgroundOptions(Strict):
    completion_window: Literal["soonest", "2h", "8h"] | None = None


class ResponsesRequest(JobRequest, Sampling):
    """The body of a responses job."""

    kind = "responses"
    prompt_field = "input"
    budget_field = "max_output_tokens"
    url = "/v1/responses"
    object_name = "response"
    id_prefix = "resp_"
    example: ClassVar[Body] = {"input": "Name a colour.", "background": True}
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **JobRequest.not_yet,
        "conversation": (),
        "context_management": ([],),
        "moderation": (),
    }

    input: Annotated[
        Annotated[str, Tag("string")] | Annotated[list[Item], Field(min_length=1), Tag("array")],
        Discriminator(string_or_array),
    ]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=16)] | None = None
    previous_response_id: Annotated[str, StringConstraints(min_length=1)] | None = None
    text: Text | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    """Counts the calls of tools that a service runs itself; here there are none."""
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[Includable] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None

    # Extension.
    chat_template_kwargs: TemplateOptions | None = None

    @property
    def priority(self) -> Priority | None:
        window = self.background_options and self.background_options.completion_window
        return _PRIORITIES[window] if window else None

    @property
    def goes_back(self) -> bool:
        items = () if isinstance(self.input, str) else self.input
        refers = any(isinstance(item, ItemReference) for item in items)
        return refers or self.previous_response_id is not None

    @property
    def truncates(self) -> bool:
        return self.truncation == "auto"

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are to be told with their logprobs."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def check(self) -> None:
        try:
            self.generated_from().check()
        except RequestError as error:
            raise self.restated(error) from None
        if self.background and self.store is False:
            raise RequestError(
                "Invalid 'store': a response in the background has to be stored.",
                code="invalid_value",
                param="store",
            )

    def generated_from(self) -> ChatRequest:
        """Gives the chat. Its messages: the instructions, then the input's items."""
        messages = turns(self.input)
        if not messages:
            raise RequestError(
                "Invalid 'input': expected something to answer beside reasoning.",
                code="invalid_value",
                param="input",
            )
        if self.instructions is not None:
            messages.insert(0, SystemMessage(role="system", content=self.instructions))
        text, reasoning = self.text, self.reasoning
        chat: dict[str, Any] = {
            **{name: getattr(self, name) for name in _SAME_NAME},
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": chat_format(text.format) if text and text.format else None,
            "tools": None if self.tools is None else [chat_tool(tool) for tool in self.tools],
            "tool_choice": chat_choice(self.tool_choice),
            "reasoning_effort": reasoning and reasoning.effort,
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": (self.top_logprobs or 0) if self.wants_logprobs else None,
        }
        return ChatRequest.model_validate(chat)

    def restated(self, error: RequestError) -> RequestError:
        if error.param is None:
            return error
        field, rest = error.param, ""
        for separator in ("[", "."):
            if separator in field:
                field, _, end = field.partition(separator)
                rest = separator + end + rest
        param = _CALLED_BY_CHATS.get(field, field) + rest.replace("].function.", "].")
        message = str(error).replace(f"'{error.param}'", f"'{param}'")
        return RequestError(message, code=error.code, param=param)

    @classmethod
    def said(cls, answer: Body) -> list[Said]:
        """Reads a Response as one choice: the text of all its messages, its calls of functions."""
        items = answer["output"]
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        text = "".join(part["text"] for part in parts if part["type"] == "output_text")
        calls = [item for item in items if item["type"] == "function_call"]
        return [Said(text, calls, "length" if answer["status"] == "incomplete" else "stop")]

    @classmethod
    def with_schema(cls, body: Body, wanted: Body) -> dict[str, Any]:
        flat = {"type": wanted["type"], **wanted["json_schema"]}
        return {**body, "text": {**(body.get("text") or {}), "format": flat}}
