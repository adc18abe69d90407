"""What a layer that keeps latents (MLA, DeepSeek's way) is handed where its rows stand on prefixes.

For each token it keeps a latent, which is the key and the value of all heads, and a rotated key.
mlx-lm has them as the keys and values of a cache. While the layer decodes, our attention is given
the latents as they were fetched, the queries that go with them, and in the place of a mask the
scores of rotated keys. What the parts of prefixes need is the rotated queries: so it fetches the
unit matrix for rotated keys, and the scores by that are those queries, to the bit.

While prompts are prefilled, the layer expands latents by weights of its own, for each row. It
fetches whole rows then, prefix and suffix, in copies that last for its turn.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache

import mlx.core as mx
import numpy as np

from mlx_rq.engine.kv.arrangement import Chain, depth, indices
from mlx_rq.engine.kv.segment import KVSegment

Fetched = tuple[mx.array, mx.array]
"""Latents and rotated keys: (rows, 1, tokens, width of either)."""


def fetched(chains: Sequence[Chain], own: Fetched, queries: int) -> Fetched:
    """Gives what a layer is to fetch for so many queries of each row, `own` being its suffixes."""
    latents, rotated = own
    if queries == 1:
        return latents, _unit(rotated.shape[-1], rotated.dtype)
    return whole_rows(chains, own)


def whole_rows(chains: Sequence[Chain], own: Fetched) -> Fetched:
    """Gives copies of whole rows, prefix and suffix, `own` being the suffixes."""
    latents, rotated = own
    distinct = list(dict.fromkeys(chains))
    which = indices(tuple(map(distinct.index, chains)))
    longest = max(map(depth, distinct))

    def whole(parts: Callable[[KVSegment], mx.array], own: mx.array) -> mx.array:
        below = _stacked([list(map(parts, chain)) for chain in distinct], longest, own)
        if len(distinct) == 1:
            rows = mx.broadcast_to(below, (len(chains), *below.shape[1:]))
        else:
            rows = below[which]
        return mx.concatenate([rows, own], axis=2)

    return whole(lambda part: part.keys, latents), whole(lambda part: part.values, rotated)


@lru_cache(maxsize=4)
def _unit(width: int, dtype: mx.Dtype) -> mx.array:
    matrix = mx.eye(width, dtype=dtype)[None, None]
    mx.eval(matrix)
    return matrix


def _stacked(chains: Sequence[Sequence[mx.array]], longest: int, like: mx.array) -> mx.array:
    """Joins the parts of each chain, behind so many zeros that all chains are as long."""
    rows = []
    for parts in chains:
        short = longest - sum(part.shape[2] for part in parts)
        zeros = mx.zeros((1, like.shape[1], short, like.shape[-1]), like.dtype)
        rows.append(mx.concatenate([zeros, *parts], axis=2))
    return mx.concatenate(rows)


def mask(chains: Sequence[Chain], own: mx.array) -> mx.array | None:
    """Gives the mask over what is fetched, `own` being that over suffixes: (rows, 1, queries, …).

    None for one query, whose scores are those by the unit matrix.
    """
    return None if own.shape[-2] == 1 else whole_mask(chains, own)


def whole_mask(chains: Sequence[Chain], own: mx.array) -> mx.array:
    """Gives the mask over whole rows."""
    queries, longest = own.shape[-2], max(map(depth, chains))
    short = mx.array([longest - depth(chain) for chain in chains])[:, None, None, None]
    below = mx.broadcast_to(mx.arange(longest) >= short, (len(chains), 1, queries, longest))
    return mx.concatenate([below, mx.broadcast_to(own, (len(chains), *own.shape[1:]))], axis=-1)


@lru_cache(maxsize=1)  # the layers of a step have the same
def padding_mask(padding: tuple[int, ...], slots: int) -> mx.array:
    """Gives what is added to scores of suffixes, (rows, 1, 1, slots): nothing but at padding."""
    seen = np.arange(slots) >= np.array(padding)[:, None, None, None]
    return mx.array(np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32))
