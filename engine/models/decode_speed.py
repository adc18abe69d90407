"""Times steps of a model, and finds how many sequences to decode before more give little more.

The time of a step is no straight line over the sequences: a quantised matrix product on an Apple
chip grows with them up to about ten, costs the same from there to 32, and twice that at 33. So all
sizes are tried, and the fewest sequences are taken that give nearly the most tokens a second.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_rq.engine.kv.layers import apart, can_share
from mlx_rq.engine.models.device import Device, MLXDevice, tried

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LARGER = (96, 128, 192, 256)
"""Sequences that are tried; the larger ones where the most that were tried before are the best."""

SMALLEST = 4
"""A batch costs little where it gains little, and a trial on a busy machine may show no gain."""

NEARLY = 0.9
"""The part of the most tokens a second that is nearly as good."""

CONTEXT = 1024
"""Tokens that sequences hold in a trial: a prompt of some pages, and half of its answer."""

CONTEXTS = (CONTEXT // 4, CONTEXT, 4 * CONTEXT, 16 * CONTEXT)
"""Those of trials where it is known what sequences hold: the longer they are, the sooner reading
their KV takes the time, and no more of them pay.
"""

_WARM_UP_SECONDS = 0.2
"""A device that was idle computes slowly at first."""

LONGEST_STEP_SECONDS = 1.0
"""Nobody waits longer for each token; where steps take that long, no more sequences are tried."""

_STEPS = 3

Speeds = Mapping[int, float]
"""Tokens a second, by how many sequences decode together."""

StepSeconds = Callable[[int], float | None]
"""Times a decode step of so many sequences; None where there is no memory for them."""


def fewest(speeds: Speeds) -> int:
    """Says how many sequences give nearly the most tokens a second."""
    enough = NEARLY * max(speeds.values())
    return max(SMALLEST, min(size for size, speed in speeds.items() if speed >= enough))


def measured(seconds: StepSeconds) -> dict[int, float]:
    """Tries more and more sequences."""
    speeds: dict[int, float] = {}
    for size in _sizes(speeds):
        taken = seconds(size)
        if taken is None:
            break
        speeds[size] = size / taken
        if taken > LONGEST_STEP_SECONDS and size >= SMALLEST:
            break
    return speeds


def _sizes(speeds: Speeds) -> Iterable[int]:
    yield from SIZES
    for size in LARGER:
        if max(speeds, key=speeds.__getitem__) < max(speeds):
            return
        yield size


class DecodeTrial:
    """Times decode steps of a model over sequences that hold so many tokens each."""

    def __init__(
        self,
        model: Module,
        *,
        room: int | None = None,
        context: int = CONTEXT,
        clock: Callable[[], float] = time.perf_counter,
        device: Device | None = None,
    ) -> None:
        """`room` is what KV may take, in bytes."""
        self._device = device or MLXDevice()
        self._model = model
        self._room = room
        self._context = context
        self._clock = clock
        self._warm = False
        self._one_sequence = sum(cache.nbytes for cache in self._caches(1))

    def seconds(self, sequences: int) -> float | None:
        """The quickest of a few steps, as somebody else may use the machine too.

        None where there is no memory for more sequences than the fewest: by count, or by trial.
        """
        if sequences <= SMALLEST:
            return self._quickest(sequences)
        if self._room is not None and sequences * self._one_sequence > self._room:
            return None
        what = f"steps of {sequences} sequences"
        return tried(self._device, lambda: self._quickest(sequences), None, what)

    def _quickest(self, sequences: int) -> float:
        caches = self._caches(sequences)
        began = self._clock()
        self._timed(sequences, caches)  # what is compiled, is compiled here
        while not self._warm and self._clock() - began < _WARM_UP_SECONDS:
            self._timed(sequences, caches)
        self._warm = True
        quickest = min(self._timed(sequences, caches) for _ in range(_STEPS))
        del caches
        mx.clear_cache()
        return quickest

    def _timed(self, sequences: int, caches: list[Any]) -> float:
        tokens = mx.zeros((sequences, 1), dtype=mx.int32)
        started = self._clock()
        mx.eval(self._model(tokens, cache=caches))
        return self._clock() - started

    def _caches(self, sequences: int) -> list[Any]:
        """Caches of sequences that hold the context."""
        caches: list[Any] = make_prompt_cache(self._model)
        mx.eval(self._model(mx.zeros((sequences, 1), dtype=mx.int32), cache=caches))
        for cache in filter(can_share, apart(caches)):
            lengthen(cache, self._context)
        return caches


class PrefillTrial(DecodeTrial):
    """Times the prefill of so many prompt tokens, in sequences that hold a context already."""

    def __init__(self, model: Module, tokens: int, **settings: Any) -> None:
        """`tokens` are those of a step, over all of its sequences together."""
        self._tokens = tokens
        super().__init__(model, **settings)

    def _timed(self, sequences: int, caches: list[Any]) -> float:
        for cache in filter(can_share, apart(caches)):
            lengthen(cache, self._context)  # without what was prefilled before
        tokens = mx.zeros((sequences, self._tokens // sequences), dtype=mx.int32)
        started = self._clock()
        self._model(tokens, cache=caches)
        mx.eval([cache.state for cache in caches])  # nobody asks for the logits of a prompt
        return self._clock() - started


def lengthen(cache: Any, tokens: int) -> None:
    """Makes a plain cache of one token hold so many, all alike: only time counts."""
    cache.keys = mx.repeat(cache.keys[:, :, :1], tokens, axis=2)
    cache.values = mx.repeat(cache.values[:, :, :1], tokens, axis=2)
    cache.offset = tokens
    mx.eval(cache.keys, cache.values)
