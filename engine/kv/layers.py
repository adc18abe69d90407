"""The caches of a model's layers, some of which keep a list of them: attention beside a state."""

from collections.abc import Callable, Iterable
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from mlx_rq.engine.kv.shared_cache import SharedKVCache

Caches = list[Any]
"""One cache for each layer, or a list of them."""


def can_share(cache: Any) -> bool:
    """Tells whether attention whose cache is of this kind can refer to a prefix."""
    return type(cache) is KVCache


def apart(caches: Iterable[Any]) -> Caches:
    """Gives the caches of layers one by one, those of lists as well."""
    found: Caches = []
    for cache in caches:
        found += cache.caches if _is_taken_apart(cache) else [cache]
    return found


def of_several(caches: Iterable[Any]) -> Caches:
    """Gives the caches of tokens of which a layer has several.

    One may be an index that picks the tokens of the other (DeepSeek V3.2): out of whole rows. A
    trial is too short to see that.
    """
    lists = [_of_tokens(cache) for cache in caches if _is_taken_apart(cache)]
    return [one for some in lists if len(some) > 1 for one in some]


def each(caches: Iterable[Any], change: Callable[[Any], Any]) -> Caches:
    """Gives layers, in the place of each cache, what it is changed to."""
    return [
        CacheList(*map(change, cache.caches)) if _is_taken_apart(cache) else change(cache)
        for cache in caches
    ]


def _is_taken_apart(cache: Any) -> bool:
    """Tells whether it is a list of caches that keep all tokens, and states of one size."""
    if not isinstance(cache, CacheList):
        return False
    of_tokens = _of_tokens(cache)
    return bool(of_tokens) and all(isinstance(one, KVCache | SharedKVCache) for one in of_tokens)


def _of_tokens(caches: CacheList) -> Caches:
    return [one for one in caches.caches if not isinstance(one, ArraysCache)]
