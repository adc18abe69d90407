"""Stands in for mlx-lm's attention function where rows stand on prefixes that are held once.

Models call the function by the name that their module imported; `Installation` puts ours there.
"""

import sys
from collections import Counter
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models import base

from mlx_rq.engine.kv.joint_softmax import Rows, additive
from mlx_rq.engine.kv.latents import padding_mask
from mlx_rq.engine.kv.shared_cache import BatchSharedKVCache, cache_behind

_NAME = "scaled_dot_product_attention"


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
    if isinstance(cache, BatchSharedKVCache) and (step := cache.ragged) is not None:
        side_by_side = step.apart(queries)
        found = _attended(side_by_side, keys, values, cache, scale, mask, sinks)
        return step.packed(found)
    return _attended(queries, keys, values, cache, scale, mask, sinks)


def _attended(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    length, size = queries.shape[2], keys.shape[2]
    if _is_whole(cache, length):
        stock: mx.array = base.scaled_dot_product_attention(
            queries, keys, values, cache, scale, mask, sinks=sinks
        )
        return stock
    if cache.arrangement.latent:
        return _to_latents(queries, mask, cache, scale)
    if isinstance(mask, str):  # "causal": the last query sees all keys
        seen = mx.arange(size - length, size)[:, None] >= mx.arange(size)
        mask = None if length == 1 else seen
    rows = Rows(keys, values, cache.arrangement, scale)
    return rows.attend(queries, None if mask is None else additive(mask), sinks)


def _is_whole(cache: Any, queries: int) -> bool:
    """Tells whether a layer is given its rows from their first token on."""
    if not isinstance(cache, BatchSharedKVCache) or not cache.arrangement.levels:
        return True
    return cache.arrangement.whole or (cache.arrangement.latent and queries > 1)


def _to_latents(
    queries: mx.array, rotated: mx.array, cache: BatchSharedKVCache, scale: float
) -> mx.array:
    """Attends to latents, with one query for each row and head; `rotated` ones come multiplied."""
    latents, rotated_keys = cache.suffixes
    rotated = rotated.astype(mx.float32)
    by_row, keys = rotated.swapaxes(1, 2), rotated_keys.astype(mx.float32).swapaxes(-1, -2)
    seen = padding_mask(cache.padding, latents.shape[2])
    bias = mx.addmm(seen, by_row, keys).swapaxes(1, 2)
    wide = mx.concatenate([queries.astype(mx.float32), rotated * (1 / scale)], axis=-1)
    return Rows(latents, latents, cache.arrangement, scale).attend(wide, bias, None)


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
