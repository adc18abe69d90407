"""The fields that say how an answer's tokens are chosen and where it ends: alike in every body."""

from typing import Annotated

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.fields import Strict, string_or_array

Stop = Annotated[
    Annotated[str, StringConstraints(min_length=1), Tag("string")]
    | Annotated[
        list[Annotated[str, StringConstraints(min_length=1)]],
        Field(min_length=1, max_length=4),
        Tag("array"),
    ],
    Discriminator(string_or_array),
]


_MOST_DIGITS = 19


def _token_name(key: str) -> str:
    """Refuses what is no number: which numbers are tokens, the model says."""
    if not key.isascii() or not key.isdigit() or len(key) > _MOST_DIGITS:
        raise RequestError(
            f"Invalid key in 'logit_bias': {key[:40]!r}. Expected the id of a token.",
            code="invalid_value",
            param="logit_bias",
        )
    return key


TokenName = Annotated[str, AfterValidator(_token_name)]


class Sampling(Strict):
    """How tokens are chosen. None means the default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[TokenName, Annotated[float, Field(ge=-100, le=100)]] | None = None

    # Extensions, named as vLLM and mlx-lm name them.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, none to four."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
