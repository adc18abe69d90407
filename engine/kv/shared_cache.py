"""KV caches of rows that stand on a prefix: the prefix is held once, each row owns what follows it.

A prefix is a chain of parts, one for each level of nesting (a system prompt, a document below it):
a longer prefix refers to the parts of the shorter one and holds only what it adds. A row refers to
its chain and owns a suffix; a batch keeps the suffixes of its rows as mlx-lm does, left-padded, and
refers to each part once, however many rows stand on it. What these caches hand to a layer is
therefore the suffix alone, and only `shared_attention` knows how to attend to the rest.

Written against mlx-lm 0.32 (`mlx_lm/models/cache.py`), whose caches these stand in for.
"""

from collections.abc import Sequence
from typing import Any, Self
from weakref import ref

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache, _BaseCache

from mlx_rq.engine.kv import latents
from mlx_rq.engine.kv.arrangement import Chain, Level, arranged, depth
from mlx_rq.engine.kv.ragged import RaggedKVCache

BLOCK = 64
"""Slots by which suffixes on prefixes grow: they are short, and mlx-lm's 256 would outweigh
them.
"""


_behind: dict[int, tuple[Any, Any]] = {}
"""Weak references to keys that were fetched, and to their caches, by the keys' identity."""


def _note(keys: mx.array, cache: "BatchSharedKVCache") -> None:
    """Notes that keys were fetched from a cache."""
    name = id(keys)
    _behind[name] = ref(keys, lambda _: _behind.pop(name, None)), ref(cache)


def cache_behind(keys: mx.array) -> Any:
    """Finds the cache of this module that some keys were fetched from, as long as they live.

    Layers that attend to the keys of another one do not say whose they are.
    """
    _, cache = _behind.get(id(keys), (None, lambda: None))
    return cache()


class SharedKVCache(_BaseCache):
    """One row in one layer: the chain that it stands on, and a suffix of its own.

    It is written down so; what a layer attends to is a batch of such rows, if only of one.
    """

    def __init__(self, chain: Chain = (), suffix: KVCache | None = None) -> None:
        self.chain = chain
        self.suffix = KVCache() if suffix is None else suffix

    @property
    def offset(self) -> int:
        """The position of the next token."""
        return depth(self.chain) + int(self.suffix.offset)

    @property
    def state(self) -> Any:
        """The suffix's arrays, for those who wait until they are computed."""
        return self.suffix.state

    @state.setter
    def state(self, state: Any) -> None:
        self.suffix.state = state

    @property
    def nbytes(self) -> int:
        """Bytes of the suffix: who built the prefix counts its parts."""
        return int(self.suffix.nbytes)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @classmethod
    def merge(cls, caches: Sequence["SharedKVCache"]) -> "BatchSharedKVCache":
        return BatchSharedKVCache.of(caches)


class BatchSharedKVCache(RaggedKVCache):
    """The rows of a batch in one layer: their suffixes, left-padded, and each part once.

    `offset` is the position of each row's next token, its prefix counted in (rotary embeddings need
    it); masks and slots are those of the suffixes.
    """

    def __init__(self, chains: Sequence[Chain], left_padding: Sequence[int]) -> None:
        super().__init__(left_padding)
        self._stand_on(list(chains))
        self.offset = self.offset + mx.array([depth(chain) for chain in chains])

    @classmethod
    def of(cls, caches: Sequence[SharedKVCache]) -> Self:
        """Puts rows together."""
        suffixes = BatchKVCache.merge([cache.suffix for cache in caches])
        lengths = [int(cache.suffix.offset) for cache in caches]
        batch = cls([cache.chain for cache in caches], [max(lengths) - one for one in lengths])
        batch.keys, batch.values, batch._idx = suffixes.keys, suffixes.values, suffixes._idx
        batch.offset = batch.offset + suffixes._idx
        return batch

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends to the suffixes; gives what a layer is to attend to: all of them."""
        own = super().update_and_fetch(keys, values)
        if self.arrangement.whole:
            own = latents.whole_rows(self.chains, own)
        elif self.arrangement.latent:
            own = latents.fetched(self.chains, own, keys.shape[2])
        _note(own[0], self)
        return own

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array | None:
        """Gives the mask over the suffixes; raises ValueError for a window."""
        _refuse_window(kwargs.get("window_size"))
        mask = super().make_mask(N, return_array=return_array)
        if mask is not None and self.arrangement.whole:
            return latents.whole_mask(self.chains, mask)
        if mask is None or not self.arrangement.latent:
            return mask
        return latents.mask(self.chains, mask)

    def filter(self, batch_indices: Sequence[int]) -> None:
        super().filter(batch_indices)
        self._stand_on([self.chains[row] for row in batch_indices])

    def extend(self, other: BatchKVCache) -> None:
        """Takes in the rows of another batch; raises TypeError for a batch of another kind.

        Its rows would be attended to without a prefix that they may have.
        """
        if not isinstance(other, BatchSharedKVCache):
            raise TypeError(
                f"cannot extend a batch that shares prefixes by a {type(other).__name__}"
            )
        if self.levels or other.levels:
            for batch in (self, other):  # what is allocated ahead is counted by blocks from now on
                batch._cut(BLOCK - 1)
        super().extend(other)
        self._stand_on([*self.chains, *other.chains])

    def _cut(self, ahead: int) -> None:
        """Keeps so many slots at most behind the last token."""
        if self.keys is not None and self.values is not None:
            kept = slice(self._idx + ahead)
            self.keys, self.values = self.keys[..., kept, :], self.values[..., kept, :]

    def extract(self, idx: int) -> SharedKVCache:
        """Gives one row, on the same chain."""
        return SharedKVCache(self.chains[idx], self.row(idx))

    @property
    def suffixes(self) -> tuple[mx.array, mx.array]:
        """What the cache holds itself."""
        own: tuple[mx.array, mx.array] = self.keys_and_values()  # type: ignore[no-untyped-call]
        return own

    @property
    def levels(self) -> tuple[Level, ...]:
        """The parts that rows stand on, level by level."""
        return self.arrangement.levels

    def _stand_on(self, chains: list[Chain]) -> None:
        self.chains, self.arrangement = chains, arranged(chains)
        self.step = BLOCK if self.levels else BatchKVCache.step


def _refuse_window(window_size: int | None) -> None:
    if window_size is not None:
        raise ValueError("a layer with a sliding window cannot share a prefix")
