"""How much memory KV takes, and how much of it there is."""

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_rq.engine.rows import Row
from mlx_rq.engine.trunks import Key, Trunks
from mlx_rq.jobs.errors import RequestError

_SHARE = 0.8
"""The part of what the weights leave free that KV may take; the rest is for activations."""

_CPU_SHARE = 0.5
"""On a CPU, where the memory is everybody's, KV and weights together take at most half of it."""


@dataclass(frozen=True, slots=True)
class KVCost:
    """What one row costs, in bytes: for each token that it holds, and however short it is."""

    per_token: int
    per_row: int

    def bytes(self, rows: int, tokens: int) -> int:
        """The cost of rows that are padded to `tokens` tokens each."""
        return rows * (self.per_row + tokens * self.per_token)


def measure_kv(model: Module) -> KVCost:
    """Measures a model's KV by computing one token with it."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    per_token = per_row = 0
    for cache in _leaves(caches):
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if isinstance(keys, mx.array) and isinstance(values, mx.array):
            # A cache allocates many slots at once. A rotating one stops growing at its window; its
            # rows are taken for longer than they are, which errs on the safe side.
            per_token += (keys.nbytes + values.nbytes) // keys.shape[2]
        else:
            per_row += cache.nbytes
    return KVCost(per_token, per_row)


def _leaves(caches: Iterable[Any]) -> Iterable[Any]:
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is None:
            yield cache
        else:
            yield from _leaves(inner)


def default_kv_bytes(model: Module) -> int:
    """Says how many bytes trunks and rows together may take on this machine beside the weights."""
    parameters: Any = tree_flatten(model.parameters())
    weights = sum(array.nbytes for _, array in parameters)
    if mx.metal.is_available():
        limit = int(mx.device_info()["max_recommended_working_set_size"])
        room = _SHARE * (limit - weights)
    else:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        room = _CPU_SHARE * physical - weights
    return max(int(room), 64 * 1024**2)


class KVBudget:
    """Says which rows fit: KV of trunks and rows together stays within a number of bytes.

    Without one, it is what the machine has room for. `reserve` tokens of a row's answer count at
    its admission.
    """

    def __init__(self, model: Module, nbytes: int | None, reserve: int) -> None:
        self.cost = measure_kv(model)
        self.nbytes = nbytes or default_kv_bytes(model)
        self._reserve = reserve

    def check(self, rows: Iterable[Row]) -> None:
        """Raises RequestError for a row whose prompt alone is too large."""
        for row in rows:
            least = self.cost.bytes(1, len(row.prompt) + 1)
            if least > self.nbytes:
                raise RequestError(
                    f"The KV of the prompt's {len(row.prompt)} tokens takes {least:,} bytes; this "
                    f"worker keeps {self.nbytes:,} (--kv-budget). Reduce the prompt.",
                    code="context_length_exceeded",
                )

    def fitting(
        self, running: Iterable[Row], more: Iterable[Row], trunks: Trunks, keep: frozenset[Key]
    ) -> int:
        """Counts the rows for which there is memory beside those that run.

        Trunks are evicted for them, except those to `keep`.
        """
        reserved = [self._reserved(row) for row in running]
        count = 0
        for row in more:
            reserved.append(self._reserved(row))
            needed = self.cost.bytes(len(reserved), max(reserved))
            if not trunks.shrink(self.nbytes - needed, keep=keep):
                break
            count += 1
        return count

    def _reserved(self, row: Row) -> int:
        return len(row.tokens) + min(row.remaining, self._reserve)

    def outgrown(self, running: Collection[Row], trunks: Trunks) -> bool:
        """Tells whether rows that run have to make room, though every trunk were evicted.

        One alone may always go on.
        """
        if len(running) <= 1:
            return False
        longest = max(len(row.prompt) + len(row.text.tokens) for row in running)
        needed = self.cost.bytes(len(running), longest + 1)
        return not trunks.shrink(self.nbytes - needed, keep=frozenset())
