"""How many prompt tokens a step prefills, by how long steps took.

Sequences that decode stand still while a prompt is prefilled beside them, and a worker tells of its
progress between forward passes. So a pass is bounded by its time, over all the sequences in it:
while others decode, by the time of a few of their steps.
"""

from mlx_rq.engine.scheduling.step_size import StepSize

_DECODE_STEPS = 2.0
"""Beside sequences that decode, prefill may take as long as so many steps of theirs."""

LEAST = 32
"""Prompt tokens that are prefilled at least, however slow that is."""

_LONGEST_SECONDS = 10.0
"""A pass takes so long at most: far less than the silence after which a worker is killed."""

_NEWS = 0.3
"""How much of a mean is the latest measure: contexts grow, and machines are shared."""


class Pace:
    """Learns what a decode step and a prompt token take."""

    def __init__(self) -> None:
        self._decode: float | None = None  # seconds a step
        self._token: float | None = None  # seconds a prompt token

    def tokens(self, step_size: StepSize, *, decoding: bool) -> int:
        """Says how many prompt tokens, over all sequences, the next step is to prefill at most."""
        if self._token is None or (decoding and self._decode is None):
            return min(step_size.chunk, LEAST) if decoding else step_size.chunk
        longest = _LONGEST_SECONDS
        if decoding and self._decode is not None:
            longest = min(longest, _DECODE_STEPS * self._decode)
        most = step_size.chunk if decoding else step_size.chunk_alone
        affordable = int(longest / self._token) if self._token > 0 else most
        return min(most, max(LEAST, affordable))

    def took(self, seconds: float, *, prefilled: int, decoded: bool) -> None:
        """Learns from a step; one that did both tells of prefill, once that of decode is known.

        A few prompt tokens tell nothing: they take as long as the launch of a pass.
        """
        if 0 < prefilled < LEAST:
            return
        if not prefilled:
            if decoded:
                self._decode = _mean(self._decode, seconds)
        elif not decoded:
            self._token = _mean(self._token, seconds / prefilled)
        elif self._decode is not None:
            self._token = _mean(self._token, max(0.0, seconds - self._decode) / prefilled)
        elif self._token is not None:
            self._decode = max(0.0, seconds - prefilled * self._token)


def _mean(before: float | None, latest: float) -> float:
    return latest if before is None else (1 - _NEWS) * before + _NEWS * latest
