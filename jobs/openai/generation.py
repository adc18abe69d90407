"""What chats and completions have in common: every kind of job is generated as one of them."""

from typing import Annotated

from pydantic import Field

from mlx_rq.jobs.openai.job_request import Body, JobRequest, Said
from mlx_rq.jobs.openai.sampling import Sampling
from mlx_rq.jobs.openai.structured import (
    Choice,
    Grammar,
    Regex,
    ResponseFormat,
    SchemaOrText,
    Shape,
    StructuredOutputs,
    check_shape,
    shape_of,
)

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_SHAPING = frozenset({"response_format", "structured_outputs", *_GUIDED})


class GenerationRequest(JobRequest, Sampling):
    """What chat and completion requests have in common. None means the default."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None

    # Extensions, named as vLLM names them.
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Regex | None = None
    guided_choice: Choice | None = None
    guided_grammar: Grammar | None = None

    @property
    def shape(self) -> Shape | None:
        """What the answer must be, None for free text."""
        if _SHAPING.isdisjoint(self.model_fields_set):
            return None
        guided = {name: getattr(self, name) for name in _GUIDED}
        return shape_of(self._format, self.structured_outputs, guided)

    @property
    def _format(self) -> ResponseFormat | None:
        return None

    @property
    def returned(self) -> int:
        """How many choices are returned for each prompt."""
        return self.n or 1

    @property
    def prompt_logprobs(self) -> int | None:
        """How many of the likeliest tokens to tell beside each of the prompt; None for none."""
        return None

    @classmethod
    def said(cls, answer: Body) -> list[Said]:
        return [cls._said(choice) for choice in answer["choices"]]

    @classmethod
    def _said(cls, choice: Body) -> Said:
        raise NotImplementedError

    def echoed(self, index: int) -> str | list[int]:
        """What of a prompt the answer begins with."""
        return ""

    def check(self) -> None:
        if (shape := self.shape) is not None:
            check_shape(shape)
