"""Which turns are dropped from a conversation that does not fit."""

from dataclasses import replace
from typing import Any

import pytest
import speaking
from speaking import with_template

from mlx_rq.engine.formats.model_format import model_format_of
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.prompts.render import render
from mlx_rq.engine.prompts.truncation import fitted
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.openai.validation import validate

USER_FIRST = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate, a user first') }}{% endif %}"
    "[{{ m.content }}]{% endfor %}"
)
ANY_FIRST = "{% for m in messages %}[{{ m.content }}]{% endfor %}"


def model(template: str, context: int) -> LoadedModel:
    return replace(speaking.model(), tokenizer=with_template(template), context_length=context + 16)


def chat(roles: str) -> ChatRequest:
    """A conversation of (u)sers, (a)ssistants, (s)ystem, (t)ools, (f)unctions: 20 letters each."""
    messages: list[dict[str, Any]] = []
    for index, letter in enumerate(roles):
        text = f"{letter}{index}".ljust(20, "q")
        match letter:
            case "u":
                messages.append({"role": "user", "content": text})
            case "a":
                messages.append({"role": "assistant", "content": text})
            case "s":
                messages.append({"role": "system", "content": text})
            case "t":
                messages.append({"role": "tool", "content": text, "tool_call_id": "c"})
            case "f":
                messages.append({"role": "function", "content": text, "name": "f"})
    request = validate("chat", {"messages": messages})
    assert isinstance(request, ChatRequest)
    return request


def kept(request: ChatRequest, template: str, context: int) -> str:
    """The roles of what is kept, by which it is told what was dropped."""
    narrow = model(template, context)
    short = fitted(request, narrow, model_format_of(narrow.tokenizer))
    return "".join(str(message.content)[:2] for message in short.messages)


def tokens(request: ChatRequest, template: str) -> int:
    wide = model(template, 8000)
    (prompt,) = render(request, wide.tokenizer, wide.vocab_size, model_format_of(wide.tokenizer))
    return len(prompt)


@pytest.mark.parametrize("size", range(1, 10))
def test_a_template_that_demands_a_user_first_gets_one(size: int) -> None:
    whole = chat("uauauauau")
    room = whole.model_copy(update={"messages": whole.messages[-size:]})
    rest = size if size % 2 else size - 1  # an answer goes with its question
    expected = "".join(f"{'ua'[i % 2]}{i}" for i in range(9 - rest, 9))
    assert kept(whole, USER_FIRST, tokens(room, ANY_FIRST)) == expected


def test_a_last_turn_of_the_assistants_keeps_the_question_before() -> None:
    whole = chat("uauaua")
    room = whole.model_copy(update={"messages": whole.messages[-3:]})
    assert kept(whole, USER_FIRST, tokens(room, ANY_FIRST)) == "u4a5"
    assert kept(whole, USER_FIRST, 1) == "u4a5", "too long all the same, and the engine says so"


def test_any_turn_may_begin_where_the_template_lets_it() -> None:
    whole = chat("uauau")
    assert kept(whole, ANY_FIRST, tokens(chat("auau"), ANY_FIRST)) == "a1u2a3u4"
    assert kept(whole, ANY_FIRST, tokens(chat("au"), ANY_FIRST)) == "a3u4"
    for result in "tf":
        request = chat(f"ua{result}u")
        assert kept(request, ANY_FIRST, tokens(chat(f"{result}u"), ANY_FIRST)) == "u3"


def test_what_fits_is_left_as_it_is_whoever_begins() -> None:
    for roles in ("au", "uau", "sau"):
        request = chat(roles)
        assert (
            fitted(request, model(ANY_FIRST, 8000), model_format_of(speaking.tokenizer()))
            == request
        )
