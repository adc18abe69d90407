"""Turns a request into prompt token ids, one list for each prompt.

Chats go through the model's own chat template, in the form that it takes (`forms.py`). A model
without a template gets a plain transcript:

    System: …

    User: …

    Assistant:

Texts of a chat never become control tokens (`engine/text/special_tokens.py`); a completion's prompt
may be written with them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_rq.engine.formats.model_format import (
    ModelFormat,
    describe_tools,
    model_format_of,
    spell_out_calls,
)
from mlx_rq.engine.prompts.forms import forms_of
from mlx_rq.engine.prompts.infill import infill
from mlx_rq.engine.text.special_tokens import tokenise
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.messages import (
    AssistantMessage,
    FunctionMessage,
    Message,
    ToolCall,
    ToolMessage,
    joined,
)
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest, Request

Renderer = Callable[[Any, TokenizerWrapper, ModelFormat], list[list[int]]]

_PLAIN_ROLES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}


def render(
    request: Request,
    tokenizer: TokenizerWrapper,
    vocabulary: int,
    model_format: ModelFormat | None = None,
) -> list[list[int]]:
    """Gives the prompts of a request as token ids; chats have one, completions one or more.

    Raises RequestError where the template refuses the conversation, a token id, be it a text's, is
    outside of the vocabulary, or a prompt comes to no token at all.
    """
    model_format = model_format or model_format_of(tokenizer)
    prompts = _RENDERERS[request.kind](request, tokenizer, model_format)
    param = request.prompt_field
    for prompt in prompts:
        if not prompt:
            raise RequestError(
                f"Invalid '{param}': it comes to no token at all for this model.",
                code="invalid_value",
                param=param,
            )
        if (highest := max(prompt)) >= vocabulary:
            # A tokenizer may have more tokens than the model: those of images, for example.
            spelled = f" ({tokenizer.decode([highest])!r})" if highest < len(tokenizer) else ""
            raise RequestError(
                f"Invalid '{param}': token id {highest}{spelled} is outside of the model's "
                f"vocabulary of {vocabulary} tokens (0 to {vocabulary - 1}).",
                code="integer_above_max_value",
                param=param,
            )
    return prompts


def _render_completion(
    request: CompletionRequest, tokenizer: TokenizerWrapper, _: ModelFormat
) -> list[list[int]]:
    # Texts with the special tokens that the model's tokenizer adds by itself (BOS), if any.
    prompts = [list(tokenizer.encode(p) if isinstance(p, str) else p) for p in request.prompts]
    if request.suffix:
        return [infill(prompt, request.suffix, tokenizer) for prompt in prompts]
    return prompts


def _render_chat(
    request: ChatRequest, tokenizer: TokenizerWrapper, model_format: ModelFormat
) -> list[list[int]]:
    messages = [_plain(message) for message in request.messages]
    if not model_format.native_tools:
        messages = _with_tools_in_words(messages, request)
    if not tokenizer.has_chat_template:
        return [tokenise(_transcript, [messages], tokenizer, "")]
    messages = [_with_thoughts_apart(message, tokenizer) for message in messages]
    write = partial(_apply_template, tokenizer)
    values = [messages, _tools(request), _options(request)]
    return [tokenise(write, values, tokenizer, _seen_of_template(tokenizer))]


_RENDERERS: Mapping[str, Renderer] = {
    ChatRequest.kind: _render_chat,
    CompletionRequest.kind: _render_completion,
}
"""For each kind that is generated from; the others become one of these."""


def _with_tools_in_words(
    messages: Sequence[dict[str, Any]], request: ChatRequest
) -> list[dict[str, Any]]:
    """Tells a model whose template knows no tools about them: in its system message."""
    spelled = [spell_out_calls(message) for message in messages]
    if not request.tools:
        return spelled
    words = describe_tools(_tools(request))
    if spelled[0]["role"] != "system":
        return [{"role": "system", "content": words}, *spelled]
    content = "\n\n".join(filter(None, [spelled[0]["content"], words]))
    return [{**spelled[0], "content": content}, *spelled[1:]]


def _tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Writes the tools as templates expect them; all of them, so that prefixes stay the same."""
    return [tool.model_dump(exclude_none=True) for tool in request.tools or ()]


def _plain(message: Message) -> dict[str, Any]:
    """Writes a message as templates expect it: content as one string, arguments as objects."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": joined(message.content)}
    if isinstance(message, AssistantMessage):
        plain["content"] = message.said
        if message.thought:
            plain["reasoning_content"] = message.thought
        if message.calls:
            plain["tool_calls"] = [_plain_call(call) for call in message.calls]
    elif isinstance(message, ToolMessage | FunctionMessage):
        plain.update(role="tool", tool_call_id=message.tool_call_id)
    if message.name:
        plain["name"] = message.name
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """Writes a call as templates expect it: of a function, whose arguments are an object.

    A text that is none, of a custom tool or of a model that went wrong, stays what it is.
    """
    try:
        arguments = json.loads(call.called.arguments)
    except ValueError:
        arguments = call.called.arguments
    function = {"name": call.called.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _with_thoughts_apart(message: dict[str, Any], tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """Takes the thoughts out of an answer's text, where the template would: it finds no mark there.

    What a template writes is guarded in texts, and the mark after the thoughts is a part of that.
    """
    end = tokenizer.think_end
    if (
        message["role"] != "assistant"
        or "reasoning_content" in message
        or not end
        or end not in message["content"]
        or end not in str(tokenizer.chat_template)
    ):
        return message
    thoughts, _, content = message["content"].partition(end)
    thoughts = thoughts.rpartition(tokenizer.think_start)[2]
    return {**message, "reasoning_content": thoughts.strip("\n"), "content": content.lstrip("\n")}


def _options(request: ChatRequest) -> dict[str, Any]:
    """Gives the variables that the template gets beside messages and tools."""
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options.setdefault("reasoning_effort", request.reasoning_effort)
        options.setdefault("enable_thinking", request.reasoning_effort != "none")
    return options


def _apply_template(
    tokenizer: TokenizerWrapper,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]],
    options: Mapping[str, Any],
) -> str:
    # A last message of the assistant's is the beginning of the answer: the model goes on from it.
    continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    given = {**options, "tools": tools} if tools else options

    def apply(conversation: Sequence[dict[str, Any]]) -> str:
        text = tokenizer.apply_chat_template(
            list(conversation),
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **given,
        )
        return str(text)

    refusals = []
    for conversation in forms_of(messages):
        try:
            return apply(conversation)
        except Exception as refusal:  # a template is a program of somebody else's
            refusals.append(refusal)
    raise RequestError(
        f"Invalid 'messages': the model's chat template refuses them: {refusals[0]}.",
        code="invalid_value",
        param="messages",
    )


_CALL = {"id": "call_0001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
_SAMPLES: Sequence[Sequence[dict[str, Any]]] = (
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_0001", "content": "t"},
    ],
    [{"role": "user", "content": "u"}, {"role": "tool", "content": "t"}],
)


@lru_cache(maxsize=4)
def _seen_of_template(tokenizer: TokenizerWrapper) -> str:
    """Gives a template's source and what it makes of every role: some put their marks together."""
    seen = [str(tokenizer.chat_template)]
    for messages in _SAMPLES:
        with suppress(RequestError):
            seen.append(_apply_template(tokenizer, messages, (), {}))
    return "\n".join(seen)


def _transcript(messages: Sequence[dict[str, Any]]) -> str:
    """Writes the plain transcript for a model without a template (see the module)."""
    lines = [f"{_PLAIN_ROLES[message['role']]}: {message['content']}" for message in messages]
    if messages[-1]["role"] != "assistant":
        lines.append("Assistant:")
    return "\n\n".join(lines)
