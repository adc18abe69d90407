"""Attention over a prefix that is held once: exact, by parts.

Softmax over all keys of a row is a weighted mean of softmaxes over parts of them; the weights are
the parts' shares of the total mass, whose logarithm (log-sum-exp) each part gives beside its
output. So the rows of a prefix attend to it together, in one matrix product over their stacked
queries, and each attends to its own suffix; then the outputs are merged, in float32. The way is
that of Hydragen (Juravsky et al., arXiv 2402.05099) and ChunkAttention (Ye et al., 2402.15220).

Models call the function by the name that their module imported; `install` puts ours there.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base

from mlx_rq.engine.kv.shared_cache import (
    BatchSharedKVCache,
    KVSegment,
    Level,
    SharedKVCache,
    cache_behind,
)

_SCORES = 2**22
"""Scores in memory at once (16 MiB of float32): long prefills go by pieces."""

_NAME = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Attention over some of the keys, in float32: the normalised output, and the log of the mass.

    Shapes (…, queries, head width) and (…, queries, 1).
    """

    output: mx.array
    mass: mx.array

    def merged(self, other: "_Outcome") -> "_Outcome":
        """Attention over the keys of both."""
        share = mx.sigmoid(other.mass - self.mass)
        output = self.output + share * (other.output - self.output)
        return _Outcome(output, mx.logaddexp(self.mass, other.mass))


def shared_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attends to the prefixes of a shared cache and to its rows' suffixes, `keys` and `values`.

    Takes and gives what mlx-lm's function does, and leaves every other cache to that one. `queries`
    have the shape (rows, heads, queries, head width), `keys` (rows, KV heads, suffix, head width);
    all queries come after the whole prefix, `mask` (and so causality) is over the suffix alone. A
    layer that attends to another one's keys may give no cache.
    """
    cache = cache_behind(keys) if cache is None else cache
    levels = cache.levels if isinstance(cache, SharedKVCache | BatchSharedKVCache) else ()
    if not levels:
        stock: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache, scale, mask, sinks=sinks
        )
        return stock
    rows, heads, length, width = queries.shape
    kv_heads = keys.shape[1]
    grouped = (queries * scale).reshape(rows, kv_heads, (heads // kv_heads) * length, width)
    found = _over_suffix(grouped, keys, values, mask, length)
    for level in levels:
        found = found.merged(_over_level(level, grouped, values.shape[-1]))
    output = found.output
    if sinks is not None:  # a key without a value, one for each head
        sink = mx.repeat(sinks.astype(mx.float32).reshape(1, kv_heads, -1), length, axis=-1)
        output = output * mx.sigmoid(found.mass - sink[..., None])
    return output.astype(queries.dtype).reshape(rows, heads, length, -1)


def _over_suffix(
    queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None, length: int
) -> _Outcome:
    """Attention of every row to its own suffix, of so many queries at a time as fit."""
    rows, kv_heads, count, width = queries.shape
    size = keys.shape[2]
    if isinstance(mask, str):  # "causal": the last query sees all keys
        every = length == 1
        mask = None if every else mx.arange(size - length, size)[:, None] >= mx.arange(size)
    step = max(1, _SCORES // (rows * kv_heads * (count // length) * size))
    if step >= length:
        return _attend(queries, keys, values, _masking(mask, length))
    apart = queries.reshape(rows, kv_heads, -1, length, width)
    found = []
    for at in range(0, length, step):
        piece = apart[:, :, :, at : at + step]
        seen = mask if mask is None or mask.shape[-2] == 1 else mask[..., at : at + step, :]
        stacked = piece.reshape(rows, kv_heads, -1, width)
        found.append(_attend(stacked, keys, values, _masking(seen, piece.shape[3])))

    def whole(pieces: list[mx.array]) -> mx.array:
        by_head = [
            one.reshape(rows, kv_heads, count // length, -1, one.shape[-1]) for one in pieces
        ]
        return _joined(by_head, axis=3).reshape(rows, kv_heads, count, -1)

    return _Outcome(whole([one.output for one in found]), whole([one.mass for one in found]))


def _masking(mask: mx.array | None, length: int) -> Callable[[mx.array], mx.array] | None:
    """Gives what masks scores: (rows, KV heads, query heads of each and queries, keys)."""
    if mask is None:
        return None

    def masked(scores: mx.array) -> mx.array:
        rows, kv_heads, count, size = scores.shape
        apart = scores.reshape(rows, kv_heads, count // length, length, size)
        seen = mask
        if seen.ndim == 4:
            by_head = seen.shape[1] > 1
            seen = seen.reshape(seen.shape[0], kv_heads if by_head else 1, -1, *seen.shape[2:])
        if seen.dtype == mx.bool_:
            apart = mx.where(seen, apart, mx.finfo(mx.float32).min)
        else:
            apart = apart + seen
        return apart.reshape(scores.shape)

    return masked


def _attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    masked: Callable[[mx.array], mx.array] | None = None,
) -> _Outcome:
    scores = (queries @ keys.swapaxes(-1, -2)).astype(mx.float32)
    if masked is not None:
        scores = masked(scores)
    weights = mx.softmax(scores, axis=-1)
    # The highest score's weight is one part of the mass: no second pass of exponentials is needed.
    mass = scores.max(axis=-1, keepdims=True) - mx.log(weights.max(axis=-1, keepdims=True))
    return _Outcome((weights.astype(values.dtype) @ values).astype(mx.float32), mass)


def _over_level(level: Level, queries: mx.array, width: int) -> _Outcome:
    """Attention of every row to its part at a level; one without a part has mass zero there."""
    found = [
        _over_part(group.part, queries if group.rows is None else queries[group.rows])
        for group in level.groups
    ]
    if level.bare:
        shape = (1, *queries.shape[1:-1])
        found.append(_Outcome(mx.zeros((*shape, width)), mx.full((*shape, 1), -mx.inf)))
    output = _joined([one.output for one in found])
    mass = _joined([one.mass for one in found])
    if level.places is not None:
        output, mass = output[level.places], mass[level.places]
    return _Outcome(output, mass)


def _over_part(part: KVSegment, queries: mx.array) -> _Outcome:
    """Attention of the rows of a part to it: their queries are stacked, as if of one row."""
    rows, kv_heads, count, width = queries.shape
    stacked = queries.transpose(1, 0, 2, 3).reshape(1, kv_heads, rows * count, width)
    step = max(1, _SCORES // (kv_heads * len(part)))
    found = [
        _attend(stacked[:, :, at : at + step], part.keys, part.values)
        for at in range(0, rows * count, step)
    ]

    def by_row(pieces: list[mx.array]) -> mx.array:
        whole = _joined(pieces, axis=2)
        return whole.reshape(kv_heads, rows, count, -1).transpose(1, 0, 2, 3)

    return _Outcome(by_row([one.output for one in found]), by_row([one.mass for one in found]))


def _joined(arrays: list[mx.array], axis: int = 0) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=axis)


_installed: Counter[ModuleType] = Counter()
"""How many models have our function in a module: two of one architecture may be loaded."""


class Installation:
    """Our function in the place of mlx-lm's, where the attention of one model looks for it."""

    def __init__(self, model: Module) -> None:
        """Installs it; where no module of the model uses mlx-lm's function, `modules` is empty."""
        self.modules = _modules_of(model)
        for module in self.modules:
            _installed[module] += 1
            setattr(module, _NAME, shared_attention)

    def remove(self) -> None:
        """Puts mlx-lm's own function back, unless another model goes on with ours."""
        for module in self.modules:
            _installed[module] -= 1
            if _installed[module] == 0:
                setattr(module, _NAME, base.scaled_dot_product_attention)
        self.modules = ()


def _modules_of(model: Module) -> tuple[ModuleType, ...]:
    """The Python modules of a model's classes (and their bases) that use mlx-lm's function."""
    classes = {kind for _, layer in model.named_modules() for kind in type(layer).__mro__}
    modules = {
        sys.modules[kind.__module__]: None for kind in classes if kind.__module__ in sys.modules
    }
    ours = (base.scaled_dot_product_attention, shared_attention)
    return tuple(m for m in modules if m is not base and getattr(m, _NAME, None) in ours)
