"""How one row chooses its tokens."""

from dataclasses import dataclass

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import Request

_GREEDY_BELOW = 1e-5
"""Temperatures below this one leave nothing to chance, but numbers that float32 does not have."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one row chooses its tokens. Temperature 0 (or top_k 1) takes the likeliest.

    Presence and frequency penalties count the tokens that the row has generated; the repetition
    penalty looks at the prompt as well (both as vLLM does; OpenAI has no repetition penalty).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1 or self.top_p == 0

    @property
    def filtered(self) -> bool:
        """Whether some tokens are left out before one is drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def adjusts(self) -> bool:
        """Whether any logits are changed before tokens are chosen by them."""
        return self.penalised or bool(self.logit_bias) or self.min_tokens > 0


def params_of(request: Request, vocabulary: int) -> SamplingParams:
    """Reads the sampling parameters; raises RequestError for a token id that does not exist."""
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "min_tokens": request.min_tokens,
    }
    biases = []
    for token, bias in (request.logit_bias or {}).items():
        if int(token) >= vocabulary:
            raise RequestError(
                f"Invalid key in 'logit_bias': {token[:40]!r}. Expected the id of a token, "
                f"0 to {vocabulary - 1}.",
                code="invalid_value",
                param="logit_bias",
            )
        biases.append((int(token), float(bias)))
    return SamplingParams(
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        logit_bias=tuple(sorted(biases)),
    )
