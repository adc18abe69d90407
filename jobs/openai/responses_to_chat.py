"""Reads what a responses request is made of as the parts of the chat that is generated for it."""

import json
from typing import Any

from mlx_rq.jobs.openai.messages import (
    AssistantMessage,
    CustomCall,
    CustomToolCall,
    FunctionCall,
    FunctionToolCall,
    Message,
    SystemMessage,
    ToolCall,
    ToolMessage,
    UserMessage,
    joined,
)
from mlx_rq.jobs.openai.response_items import (
    AllowedTools,
    CustomCallItem,
    FunctionCallItem,
    HostedCallItem,
    Item,
    ItemReference,
    JsonSchemaFormat,
    MessageItem,
    NamedTool,
    OutputItem,
    OwnCallItem,
    OwnOutputItem,
    ReasoningItem,
)


def turns(said: str | list[Item]) -> list[Message]:
    """Reads an input as messages: what an assistant reasons, says and calls in a row is one."""
    if isinstance(said, str):
        return [UserMessage(role="user", content=said)]
    messages: list[Message] = []
    reasoning: str | None = None
    for item in said:
        match item:
            case ReasoningItem():
                reasoning = _reasoning(item)
                continue
            case HostedCallItem():
                continue
            case ItemReference():  # until it is queued: then the item itself is there
                messages.append(_assistant(reasoning))
            case MessageItem(role="user"):
                messages.append(UserMessage(role="user", content=joined(item.content)))
            case MessageItem(role="assistant"):
                messages.append(_assistant(reasoning, content=joined(item.content)))
            case MessageItem():
                messages.append(SystemMessage(role="system", content=joined(item.content)))
            case FunctionCallItem() | CustomCallItem() | OwnCallItem():
                calling = _assistant(reasoning)
                if messages and isinstance(messages[-1], AssistantMessage) and reasoning is None:
                    calling = messages.pop()  # type: ignore[assignment]
                calls = [*(calling.tool_calls or ()), _call(item)]
                messages.append(calling.model_copy(update={"tool_calls": calls}))
            case OutputItem():
                text = joined(item.output)
                messages.append(ToolMessage(role="tool", content=text, tool_call_id=item.call_id))
            case OwnOutputItem():
                text, called = _own_output(item), item.call_id or item.id or ""
                messages.append(ToolMessage(role="tool", content=text, tool_call_id=called))
        reasoning = None
    return messages


def _assistant(reasoning: str | None, content: str | None = None) -> AssistantMessage:
    return AssistantMessage(role="assistant", content=content, reasoning_content=reasoning)


def _reasoning(item: ReasoningItem) -> str:
    return "\n\n".join(part.text for part in item.content or item.summary or ())


def _call(item: FunctionCallItem | CustomCallItem | OwnCallItem) -> ToolCall:
    match item:
        case CustomCallItem():
            custom = CustomCall(name=item.name, input=item.input)
            return CustomToolCall(id=item.call_id, type="custom", custom=custom)
        case FunctionCallItem():
            function = FunctionCall(name=item.name, arguments=item.arguments)
        case OwnCallItem():
            name = item.type.removesuffix("_call")
            arguments = json.dumps(item.action or item.operation or {}, ensure_ascii=False)
            function = FunctionCall(name=name, arguments=arguments)
    return FunctionToolCall(id=item.call_id, type="function", function=function)


def _own_output(item: OwnOutputItem) -> str:
    """Gives what came of it as text; a patch may have no output but its status."""
    if isinstance(item.output, str):
        return item.output
    return json.dumps(item.output or {"status": item.status}, ensure_ascii=False)


def chat_format(wanted: Any) -> dict[str, Any]:
    """Nests a format's schema as a chat's `response_format` does."""
    dumped: dict[str, Any] = wanted.model_dump(by_alias=True)
    if isinstance(wanted, JsonSchemaFormat):
        del dumped["type"]
        return {"type": "json_schema", "json_schema": dumped}
    return dumped


def chat_tool(tool: Any) -> dict[str, Any]:
    """Nests a tool as a chat does."""
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def chat_choice(choice: Any) -> Any:
    """Nests a choice of tools as a chat does."""
    match choice:
        case NamedTool(name=name):
            return {"type": "function", "function": {"name": name}}
        case AllowedTools(mode=mode, tools=tools):
            allowed = {"mode": mode, "tools": [chat_choice(tool) for tool in tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        case _:
            return choice
