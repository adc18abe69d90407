"""How one row chooses its tokens."""

from dataclasses import dataclass

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
