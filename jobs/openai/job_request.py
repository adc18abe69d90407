"""What the bodies of all kinds of jobs have in common, and what a kind says of itself.

A kind of job is a subclass of `JobRequest`: its fields are those of the body, and the class is the
record of the kind (name, URL, what its answers are called). `kinds.py` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pydantic import model_validator

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.fields import ModelName, Strict
from mlx_rq.jobs.openai.priority import Priority

if TYPE_CHECKING:
    from mlx_rq.jobs.openai.requests import Request

_NO_EFFECT = frozenset(
    {
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "verbosity",
        "prediction",
    }
)
"""Hints to a hosted service; OpenAI's clients may send them and nothing here depends on them."""

Body = Mapping[str, Any]


class Said(NamedTuple):
    """What one choice of an answer says, whichever kind of job it answers."""

    text: str | None
    calls: Sequence[Body] = ()
    """Of tools, as the answer has them."""
    finish_reason: str = "stop"
    """In the words of chat completions."""


class JobRequest(Strict):
    """What a job carries: the body of one kind of job."""

    kind: ClassVar[str]
    prompt_field: ClassVar[str]
    """The field that only bodies of this kind have, and that errors about the prompt name."""
    budget_field: ClassVar[str]
    """What the most tokens of an answer are called."""
    url: ClassVar[str | None] = None
    """OpenAI's endpoint, where lines of a batch may name it."""
    object_name: ClassVar[str]
    """The `object` of an answer."""
    id_prefix: ClassVar[str] = ""
    """What makes an answer's id of a job's."""
    example: ClassVar[Body]
    """A body, for the description of the HTTP server."""
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {"stream": (False,), "stream_options": ()}
    """OpenAI's fields that are refused by name, with the values that ask for nothing."""

    model: ModelName | None = None
    adapters: ModelName | None = None
    """The adapter that is to be on the model, as mlx-lm's server calls it."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, body: Any) -> Any:
        """Leaves out what has no effect; refuses what is not supported yet."""
        if not isinstance(body, Mapping):
            return body
        known = {name: value for name, value in body.items() if name not in _NO_EFFECT}
        for name, harmless in cls.not_yet.items():
            if name in known:
                value = known.pop(name)
                if value is not None and value not in harmless:
                    raise RequestError(
                        f"Unsupported parameter: '{name}' {_why_not(name)}.",
                        code="unsupported_parameter",
                        param=name,
                    )
        return known

    @property
    def priority(self) -> Priority | None:
        """How urgent the job is; None where it does not say."""
        return None

    @property
    def goes_back(self) -> bool:
        """Whether it speaks of earlier answers, which are to be put into its body."""
        return False

    @property
    def truncates(self) -> bool:
        """Whether a conversation that does not fit the context is to be shortened."""
        return False

    def check(self) -> None:
        """Raises RequestError where fields do not go together, or exceed the caps on schemas."""

    def generated_from(self) -> "Request":
        """Gives the chat or the completion that is generated for it."""
        raise NotImplementedError

    def restated(self, error: RequestError) -> RequestError:
        """Says what is wrong with what is generated from in the names of this request."""
        return error

    @classmethod
    def said(cls, answer: Body) -> list[Said]:
        """Reads an answer to such a job, choice by choice."""
        raise NotImplementedError

    @classmethod
    def with_schema(cls, body: Body, wanted: Body) -> dict[str, Any]:
        """Copies a body with a `response_format` in it, where this kind has the place for that."""
        return {**body, "response_format": wanted}

    @classmethod
    def amended(cls, body: Body, change: Callable[[Body], dict[str, Any]]) -> dict[str, Any]:
        """Copies a body with a change to what is generated from."""
        return change(body)


_STREAMS = (
    "is for requests that wait for their answer: /v1/chat/completions, /v1/completions and "
    "/v1/responses of the HTTP server (`mlx-rq serve`, `mlx-rq up`)"
)
_WHY_NOT: Mapping[str, str] = {
    **dict.fromkeys(("stream", "stream_options"), _STREAMS),
    "moderation": "is a service of OpenAI's; here, nothing judges what is asked and answered",
    "functions": "is what 'tools' were called before: send each as "
    '{"type": "function", "function": {…}} in \'tools\'',
    "function_call": "is what 'tool_choice' was called before: send that, beside 'tools'",
    "conversation": "names what is not kept here; 'previous_response_id' goes on from a response",
}


def _why_not(name: str) -> str:
    return _WHY_NOT.get(name, "is not supported yet")
