"""The fields that say how an answer's tokens are chosen and where it ends: alike in every body."""

from typing import Annotated

from pydantic import Discriminator, Field, StringConstraints, Tag

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


class Sampling(Strict):
    """How tokens are chosen. None means the default."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None

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
