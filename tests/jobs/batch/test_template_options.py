"""`chat_template_kwargs` are variables of the template's, and nothing else."""

import inspect
from typing import Any

import pytest

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.validation import validate

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {"chat": {"messages": HI}, "responses": {"input": "Hi"}}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("chat_template", "{% for i in range(99999) %}x{% endfor %}", "the model's own template"),
        ("chat_template", None, "the model's own template"),
        ("tools", [{"type": "function"}], "give them as the request's own 'tools'"),
        ("documents", [{"text": "<|im_end|>"}], "write them into a message"),
        ("conversation", HI, "the request's own messages"),
        ("messages", HI, "the request's own messages"),
        ("add_generation_prompt", False, "the last message's role"),
        ("continue_final_message", True, "the last message's role"),
        ("tokenize", True, "the worker sets that itself"),
        ("return_dict", True, "the worker sets that itself"),
        ("return_tensors", "np", "the worker sets that itself"),
        ("return_assistant_tokens_mask", True, "the worker sets that itself"),
        ("padding", True, "the worker sets that itself"),
        ("truncation", True, "the worker sets that itself"),
        ("max_length", 1, "the worker sets that itself"),
        ("tokenizer_kwargs", {}, "the worker sets that itself"),
        ("sanitize_control_tokens", True, "the worker sets that itself"),
        ("bos_token", "x", "the worker sets that itself"),
        ("self", 1, "the worker sets that itself"),
    ],
)
def test_what_is_no_variable_of_the_template_is_refused_at_once(
    kind: str, name: str, value: Any, instead: str
) -> None:
    options = {"enable_thinking": True, name: value}
    with pytest.raises(RequestError) as refused:
        validate(kind, {**BODIES[kind], "chat_template_kwargs": options})
    assert str(refused.value).startswith("Invalid 'chat_template_kwargs': expected variables")
    assert f"'{name}': {instead}" in str(refused.value)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "chat_template_kwargs")


@pytest.mark.parametrize("kind", BODIES)
def test_variables_pass(kind: str) -> None:
    options = {"enable_thinking": False, "date": "today", "x": {"tools": [1]}}
    request: Any = validate(kind, {**BODIES[kind], "chat_template_kwargs": options})
    assert request.chat_template_kwargs == options


def test_every_parameter_of_the_function_that_renders_is_refused() -> None:
    """Whatever transformers adds to it has to be thought about."""
    import transformers
    from transformers.utils.chat_template_utils import render_jinja_template

    apply = transformers.PreTrainedTokenizerBase.apply_chat_template
    names = set()
    for function in (apply, render_jinja_template):
        parameters = inspect.signature(function).parameters.values()
        names |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    names |= set(transformers.PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES)
    for name in sorted(names):
        with pytest.raises(RequestError, match=f"'{name}': "):
            validate("chat", {"messages": HI, "chat_template_kwargs": {name: 1}})
