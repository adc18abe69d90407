"""A job that counts the tokens of another body's prompt, as the worker's model renders it.

    {"count_tokens": {"messages": […], "tools": […]}}

Nothing is generated for it; `{"object": "response.input_tokens", "input_tokens": 42}` answers it.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Discriminator, Tag, model_validator

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.job_request import Body, JobRequest, Said
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest, Request
from mlx_rq.jobs.openai.responses import ResponsesRequest


def _kind_counted(body: Any) -> str:
    """Tells the bodies apart by the field that only one kind has, as `kind_of` does."""
    kinds: tuple[type[JobRequest], ...] = (CompletionRequest, ResponsesRequest)
    fields = body if isinstance(body, Mapping) else {}
    found = (kind.kind for kind in kinds if fields.get(kind.prompt_field) is not None)
    return next(found, ChatRequest.kind)


class TokenCountRequest(JobRequest):
    """The body of a token count."""

    kind = "token_count"
    prompt_field = "count_tokens"
    object_name = "response.input_tokens"
    example: ClassVar[Body] = {"count_tokens": ChatRequest.example}

    count_tokens: Annotated[
        Annotated[ChatRequest, Tag("chat")]
        | Annotated[CompletionRequest, Tag("completion")]
        | Annotated[ResponsesRequest, Tag("responses")],
        Discriminator(_kind_counted),
    ]

    @model_validator(mode="before")
    @classmethod
    def _of_the_same_model(cls, body: Any) -> Any:
        """Takes the model that the counted body names, unless this one names another."""
        counted = body.get(cls.prompt_field) if isinstance(body, Mapping) else None
        if isinstance(counted, Mapping) and body.get("model") is None:
            return {**body, "model": counted.get("model")}
        return body

    @property
    def goes_back(self) -> bool:
        return self.count_tokens.goes_back

    @property
    def truncates(self) -> bool:
        return self.count_tokens.truncates

    def check(self) -> None:
        self.count_tokens.check()

    def generated_from(self) -> Request:
        return self.count_tokens.generated_from()

    def restated(self, error: RequestError) -> RequestError:
        return self.count_tokens.restated(error)

    @classmethod
    def said(cls, answer: Body) -> list[Said]:
        return [Said(str(answer["input_tokens"]))]

    @classmethod
    def amended(cls, body: Body, change: Callable[[Body], dict[str, Any]]) -> dict[str, Any]:
        return {**body, cls.prompt_field: change(body[cls.prompt_field])}


def counting(body: Body) -> dict[str, Any]:
    """Makes the body of a token count of another body."""
    return {"model": body.get("model"), TokenCountRequest.prompt_field: body}
