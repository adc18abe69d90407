"""Verifies drafted tokens: one forward pass over the token that is due and those drafted after it.

The token of each position is chosen as ever, by the model's own logits and the position's own
random number; drafted tokens are kept as far as they are the chosen ones, and the KV of the others
is taken back. So what a draft says never shows in an answer, and after the pass everything is as if
the sequence had decoded step by step.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from mlx_rq.engine.kv.adapter_rows import adapter_rows
from mlx_rq.engine.models.device import finite_rows
from mlx_rq.engine.sampling.sampler import SequenceSampler, choose_ahead


class Verified(NamedTuple):
    """What a pass came to."""

    tokens: list[int]
    """The token that was due, and the drafted ones that are accepted: decided, and in the KV."""
    due: mx.array
    """The token [1] that is due now."""
    finite: mx.array
    """Whether that one [1] was chosen by numbers."""


class Verification:
    """A pass for the one sequence that caches are of; it is launched at once."""

    def __init__(
        self,
        model: Module,
        caches: Sequence[Any],
        due: mx.array,
        drafts: mx.array,
        sampler: SequenceSampler,
    ) -> None:
        """`due` [1] is the token that was chosen last, `drafts` [any] may follow it."""
        self._caches, self._sampler = caches, sampler
        self._inputs = mx.concatenate([due, drafts])
        with adapter_rows([sampler.adapter]):
            logits = model(self._inputs[None], cache=caches)[0]
        self._chosen, self._finite = choose_ahead(logits, sampler), finite_rows(logits)
        mx.async_eval(self._inputs, self._chosen, self._finite)

    def read(self) -> Verified:
        """Waits for the pass, and takes back what was not accepted."""
        inputs: list[int] = self._inputs.tolist()  # type: ignore[assignment]
        chosen: list[int] = self._chosen.tolist()  # type: ignore[assignment]
        finite: list[bool] = self._finite.tolist()  # type: ignore[assignment]
        drafted, accepted = inputs[1:], 0
        while accepted < len(drafted) and finite[accepted]:
            if chosen[accepted] != drafted[accepted]:
                break
            accepted += 1
        if refused := len(drafted) - accepted:
            for cache in self._caches:
                cache.trim(refused)
        self._sampler.skip(accepted + 1)
        now = slice(accepted, accepted + 1)
        return Verified(inputs[: accepted + 1], self._chosen[now], self._finite[now])


def room(caches: Sequence[Any]) -> int | None:
    """Counts the tokens that caches can take in and give back; None for any number.

    A layer with a window forgets its oldest tokens once it is full, for good.
    """
    rooms = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is not None:
            rooms.append(room(inner))
        elif (window := getattr(cache, "max_size", None)) is not None:
            rooms.append(max(0, window - cache.size() - 1))
    return min((one for one in rooms if one is not None), default=None)
