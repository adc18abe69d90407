"""Reads a responses request as the chat that is generated for it."""

from typing import Any

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.messages import (
    AssistantMessage,
    FunctionCall,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    joined,
)
from mlx_rq.jobs.openai.requests import ChatRequest, JobRequest, Request
from mlx_rq.jobs.openai.responses import (
    AllowedTools,
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    JsonSchemaFormat,
    MessageItem,
    NamedTool,
    ReasoningItem,
    ResponsesRequest,
)
from mlx_rq.jobs.openai.sampling import Sampling

_SAME_NAME = (
    *Sampling.model_fields,
    *("model", "parallel_tool_calls", "metadata", "store", "chat_template_kwargs"),
)
_CALLED_BY_CHATS = {
    # What a fault of the chat is called in the request that it was made from.
    "messages": "input",
    "response_format": "text.format.schema",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}


def generated(request: JobRequest) -> Request:
    """Gives the request that is generated from: a responses request becomes a chat."""
    return as_chat(request) if isinstance(request, ResponsesRequest) else request


def as_chat(request: ResponsesRequest) -> ChatRequest:
    """Reads a responses request as a chat. Messages: the instructions, then the input's items."""
    said = request.input
    messages: list[Message] = (
        [UserMessage(role="user", content=said)] if isinstance(said, str) else turns(said)
    )
    if not messages:
        raise RequestError(
            "Invalid 'input': expected something to answer beside reasoning.",
            code="invalid_value",
            param="input",
        )
    if request.instructions is not None:
        messages.insert(0, SystemMessage(role="system", content=request.instructions))
    text, reasoning = request.text, request.reasoning
    chat: dict[str, Any] = {
        **{name: getattr(request, name) for name in _SAME_NAME},
        "messages": messages,
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _format(text.format) if text and text.format else None,
        "tools": None if request.tools is None else [_nested(tool) for tool in request.tools],
        "tool_choice": _choice(request.tool_choice),
        "reasoning_effort": reasoning and reasoning.effort,
        "logprobs": request.wants_logprobs or None,
        "top_logprobs": (request.top_logprobs or 0) if request.wants_logprobs else None,
    }
    return ChatRequest.model_validate(chat)


def restated(error: RequestError, request: JobRequest) -> RequestError:
    """Says what is wrong with a chat in the names of the request that it was made from."""
    if not isinstance(request, ResponsesRequest) or error.param is None:
        return error
    field, rest = error.param, ""
    for separator in ("[", "."):
        if separator in field:
            field, _, end = field.partition(separator)
            rest = separator + end + rest
    param = _CALLED_BY_CHATS.get(field, field) + rest.replace("].function.", "].")
    message = str(error).replace(f"'{error.param}'", f"'{param}'")
    return RequestError(message, code=error.code, param=param)


def turns(items: list[Item]) -> list[Message]:
    """Reads items as messages: what an assistant reasons, says and calls in a row is one."""
    messages: list[Message] = []
    reasoning: str | None = None
    for item in items:
        match item:
            case ReasoningItem():
                reasoning = _reasoning(item)
                continue
            case MessageItem(role="user"):
                messages.append(UserMessage(role="user", content=joined(item.content)))
            case MessageItem(role="assistant"):
                messages.append(_assistant(reasoning, content=joined(item.content)))
            case MessageItem():
                messages.append(SystemMessage(role="system", content=joined(item.content)))
            case FunctionCallItem():
                calling = _assistant(reasoning)
                if messages and isinstance(messages[-1], AssistantMessage) and reasoning is None:
                    calling = messages.pop()  # type: ignore[assignment]
                calls = [*(calling.tool_calls or ()), _call(item)]
                messages.append(calling.model_copy(update={"tool_calls": calls}))
            case FunctionOutputItem():
                text = joined(item.output)
                messages.append(ToolMessage(role="tool", content=text, tool_call_id=item.call_id))
        reasoning = None
    return messages


def _assistant(reasoning: str | None, content: str | None = None) -> AssistantMessage:
    return AssistantMessage(role="assistant", content=content, reasoning_content=reasoning)


def _reasoning(item: ReasoningItem) -> str:
    return "\n\n".join(part.text for part in item.content or item.summary or ())


def _call(item: FunctionCallItem) -> ToolCall:
    function = FunctionCall(name=item.name, arguments=item.arguments)
    return ToolCall(id=item.call_id, type="function", function=function)


def _format(wanted: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = wanted.model_dump(by_alias=True)
    if isinstance(wanted, JsonSchemaFormat):
        del dumped["type"]
        return {"type": "json_schema", "json_schema": dumped}
    return dumped


def _nested(tool: Any) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _choice(choice: Any) -> Any:
    match choice:
        case NamedTool(name=name):
            return {"type": "function", "function": {"name": name}}
        case AllowedTools(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice
