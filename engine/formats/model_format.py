"""How a model marks its reasoning and its tool calls, as far as its tokenizer tells."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tool_parsers import json_tools

from mlx_rq.engine.formats.lark import special_tokens
from mlx_rq.engine.formats.tool_formats import JSON_STRING, Format, format_of

_LOOK_BACK = 16
"""Tokens at the end of a prompt in which the template may have opened or closed the reasoning."""


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """The marks that a model's text is read by. See `model_format_of`."""

    specials: Mapping[str, int]
    """All tokens that a grammar takes for special."""
    hidden: tuple[str, ...]
    """Those that do not belong into an answer's text."""
    think_start: str | None
    think_end: str | None
    think_start_tokens: tuple[int, ...]
    think_end_tokens: tuple[int, ...]
    call_start: str
    call_end: str
    """Empty where a call ends with the text, or where the next one starts."""
    format: Format | None
    """How calls are constrained; None where they can only be parsed."""
    parse_call: Callable[[str, Any], Any]
    native_tools: bool
    """Whether the model's template renders tools; else they are described to it in words."""

    @property
    def end_marks(self) -> list[int]:
        """The special tokens that end the reasoning, an argument of a call, a call."""
        marks = (self.think_end, self.end_text.strip(), self.call_end)
        return [self.specials[mark] for mark in marks if mark and mark in self.specials]

    @property
    def argument(self) -> str:
        """A pattern of what may hold any text within a call; most formats write JSON's strings."""
        return self.format.argument if self.format else JSON_STRING

    @property
    def end_text(self) -> str:
        """How an argument ends, where it does not end as JSON does."""
        return self.format.argument_end if self.format else ""


def model_format_of(tokenizer: TokenizerWrapper) -> ModelFormat:
    """Reads the marks off a tokenizer; a model that knows no tools gets Hermes' way to call them.

    Hermes' way is JSON between `<tool_call>` and `</tool_call>`: most models have seen it.
    """
    specials = special_tokens(tokenizer)
    native = bool(tokenizer.has_tool_calling)
    parse = tokenizer.tool_parser if native else json_tools.parse_tool_call
    return ModelFormat(
        specials=specials,
        hidden=tuple(
            token.content for token in tokenizer.added_tokens_decoder.values() if token.special
        ),
        think_start=tokenizer.think_start,
        think_end=tokenizer.think_end,
        think_start_tokens=tokenizer.think_start_tokens or (),
        think_end_tokens=tokenizer.think_end_tokens or (),
        call_start=tokenizer.tool_call_start if native else json_tools.tool_call_start,
        call_end=tokenizer.tool_call_end if native else json_tools.tool_call_end,
        format=format_of(parse.__module__.rpartition(".")[2], specials),
        parse_call=parse,
        native_tools=native,
    )


def without_reasoning(model_format: ModelFormat) -> ModelFormat:
    """Copies a format for plain texts that go on: they are no turns, and nothing reasons in one."""
    return replace(
        model_format,
        think_start=None,
        think_end=None,
        think_start_tokens=(),
        think_end_tokens=(),
    )


def reasoning_is_open(tokenizer: TokenizerWrapper, prompt: Sequence[int]) -> bool | None:
    """Says whether a prompt ends within the reasoning; None where it leaves that to the model.

    False: the template closed the reasoning, or the model has none.
    """
    if not tokenizer.has_thinking:
        return False
    tail = list(prompt[-_LOOK_BACK:])
    opened = tokenizer.rfind_think_start(tail)
    closed = tokenizer.rfind_think_end(tail)
    # What an earlier turn reasoned is followed by more than white space.
    last = max(opened, closed)
    after = tokenizer.decode(tail[last:], skip_special_tokens=False) if last >= 0 else ""
    mark = tokenizer.think_start if opened > closed else tokenizer.think_end
    if last < 0 or after.replace(mark, "", 1).strip():
        return None
    return bool(opened > closed)


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describes tools in words, for a model whose template does not (the wording is Hermes')."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, '
        '"arguments": <args-json-object>}\n</tool_call>'
    )


def spell_out_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Writes a message's tool calls, or its tool's result, as plain text of the same format."""
    plain = {key: value for key, value in message.items() if key != "tool_call_id"}
    if message["role"] == "tool":
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {**plain, "role": "user", "content": text}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in plain.pop("tool_calls", ())
    ]
    plain["content"] = "\n".join(filter(None, [plain["content"], *calls]))
    return plain
