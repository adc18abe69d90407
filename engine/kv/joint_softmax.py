"""Attention over prefixes that are held once: exact, and in few operations.

The rows of a prefix attend to it together, in one matrix product over their stacked queries, and
each row to its own suffix; one softmax goes over the scores of both, and the outputs add up.
Stacking is the way of Hydragen (Juravsky et al., arXiv 2402.05099) and ChunkAttention (Ye et al.,
2402.15220), who merge the softmaxes of parts; a joint one takes fewer operations, and to launch
those is what costs where a step is short.

Scores are float32, whatever the model computes in, as in mlx's fused kernel. A product of 16-bit
arrays is rounded to 16 bits, in bfloat16 a score of 30 to the nearest eighth: hence the casts,
which are four operations of ten. Keys of prefixes kept in float32 would spare one, for half as much
memory again, and were hardly quicker on a CPU; those of suffixes are cast in any case, at the
latest when a token is appended.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import mlx.core as mx

from mlx_rq.engine.kv.arrangement import Arrangement, Level
from mlx_rq.engine.kv.segment import KVSegment

SCORES = 2**22
"""Scores in memory at once (16 MiB of float32): long prefills go by pieces."""

_ZERO = mx.array(0.0)


@lru_cache(maxsize=1)  # the layers of a step have the same mask
def additive(mask: mx.array) -> mx.array:
    """Gives a mask that is added to scores."""
    if mask.dtype == mx.bool_:
        return mx.where(mask, 0.0, mx.finfo(mx.float32).min)
    return mask.astype(mx.float32)


@dataclass(frozen=True, slots=True)
class Rows:
    """The suffixes of rows in some heads, (rows, KV heads, tokens, head width), and their parts.

    `first_head` is the KV head of the parts that is the first one here.
    """

    keys: mx.array
    values: mx.array
    arrangement: Arrangement
    scale: float
    first_head: int = 0

    def attend(self, queries: mx.array, mask: mx.array | None, sinks: mx.array | None) -> mx.array:
        """Attends to everything, with so many queries, or heads, at a time that scores fit.

        `queries` and what it gives: (rows, heads, queries, head width). Where queries are wider
        than keys, their first part asks suffixes, and all of them parts.
        """
        rows, heads, length, _ = queries.shape
        kv_heads, own = self.keys.shape[1:3]
        keys = own + sum(level.longest for level in self.arrangement.levels)
        fitting = SCORES // (rows * heads * keys)
        if fitting >= length or length == kv_heads == 1:
            return self._attend(queries, mask, sinks)
        if length > 1:
            step = max(1, fitting)
            pieces = [
                self.attend(queries[:, :, at : at + step], _cut(mask, 2, at, step), sinks)
                for at in range(0, length, step)
            ]
            return mx.concatenate(pieces, axis=2)
        group = heads // kv_heads
        pieces = [
            self._of_head(head).attend(
                queries[:, at : at + group],
                _cut(mask, 1, at, group),
                None if sinks is None else sinks[at : at + group],
            )
            for head, at in enumerate(range(0, heads, group))
        ]
        return mx.concatenate(pieces, axis=1)

    def _of_head(self, head: int) -> "Rows":
        keys, values = (array[:, head : head + 1] for array in (self.keys, self.values))
        return replace(self, keys=keys, values=values, first_head=self.first_head + head)

    def _attend(self, queries: mx.array, mask: mx.array | None, sinks: mx.array | None) -> mx.array:
        rows, heads, length, width = queries.shape
        kv_heads, tokens = self.keys.shape[1:3]
        group = heads // kv_heads
        order, places = self.arrangement.order, self.arrangement.places
        asked = queries.reshape(rows, kv_heads, group * length, width).astype(mx.float32)
        own = self._own_scores(asked[..., : self.keys.shape[3]], mask, length)
        if order is not None:
            asked, own = asked[order], own[order]
        # From here on KV heads come first, then rows: the queries of a group are one matrix.
        shape = kv_heads, len(asked), group * length
        stacked = asked.swapaxes(0, 1).reshape(kv_heads, -1, width)
        levels = self.arrangement.levels
        scores = [self._level_scores(level, stacked, group * length) for level in levels]
        scores = [*(found.reshape(*shape, -1) for found in scores), own.swapaxes(0, 1)]
        if sinks is not None:  # a key without a value, one for each head
            sink = sinks.astype(mx.float32).reshape(kv_heads, 1, group, 1)
            every = mx.broadcast_to(sink, (kv_heads, len(asked), group, length))
            scores.append(every.reshape(*shape, 1))
        weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1).astype(self.values.dtype)
        found, begin = [], 0
        for level in levels:
            some = weights[..., begin : begin + level.longest].reshape(kv_heads, -1, level.longest)
            found.append(self._level_output(level, some, group * length))
            begin += level.longest
        output = reduce(mx.add, found).reshape(*shape, -1).swapaxes(0, 1)
        own = weights[..., begin : begin + tokens].swapaxes(0, 1)
        if places is not None:
            output, own = output[places], own[places]
        return mx.addmm(output, own, self.values).reshape(rows, heads, length, -1)

    def _own_scores(self, queries: mx.array, mask: mx.array | None, length: int) -> mx.array:
        """Scores of suffixes: (rows, KV heads, query heads of each and queries, tokens)."""
        rows, kv_heads, count, width = queries.shape
        keys = self.keys.astype(mx.float32).swapaxes(-1, -2)
        if mask is None:
            return mx.addmm(_ZERO, queries, keys, alpha=self.scale)
        if mask.ndim == 4:
            by_head = mask.shape[1] > 1
            mask = mask.reshape(len(mask), kv_heads if by_head else 1, -1, *mask.shape[2:])
        if length == 1:
            return mx.addmm(mask.squeeze(-2), queries, keys, alpha=self.scale)
        apart = queries.reshape(rows, kv_heads, -1, length, width)
        scores = mx.addmm(mask, apart, keys[:, :, None], alpha=self.scale)
        return scores.reshape(rows, kv_heads, count, -1)

    def _level_scores(self, level: Level, queries: mx.array, each: int) -> mx.array:
        """Scores of parts, of `each` query a row: -inf where a row has no key, or no part."""
        if level.stacked:
            keys = self._stacked(level, lambda part: part.scored).astype(mx.float32)
            asked = queries.reshape(len(queries), len(level.groups), -1, queries.shape[-1])
            products = mx.addmm(level.absent, asked, keys.swapaxes(-1, -2), alpha=self.scale)
            return products.reshape(*queries.shape[:2], -1)
        found, begin = [], 0
        for group in level.groups:
            asked = queries[:, begin : begin + group.rows * each]
            begin += group.rows * each
            if group.part is None:
                found.append(mx.full((*asked.shape[:2], level.longest), -mx.inf))
                continue
            scores = group.part.scores(asked, self._heads, self.scale)
            if short := level.longest - len(group.part):
                scores = mx.pad(scores, [(0, 0), (0, 0), (0, short)], constant_values=-mx.inf)
            found.append(scores)
        return _joined(found)

    def _level_output(self, level: Level, weights: mx.array, each: int) -> mx.array:
        """What the values of parts give, by weights (KV heads, rows and queries, tokens)."""
        if level.stacked:
            by_part = weights.reshape(len(weights), len(level.groups), -1, level.longest)
            sums = by_part @ self._stacked(level, lambda part: part.summed)
            return sums.reshape(*weights.shape[:2], -1)
        found, begin = [], 0
        for group in level.groups:
            some = weights[:, begin : begin + group.rows * each]
            begin += group.rows * each
            if group.part is None:
                found.append(mx.zeros((*some.shape[:2], self.values.shape[-1]), some.dtype))
            else:
                found.append(group.part.weighted(some[..., : len(group.part)], self._heads))
        return _joined(found)

    def _stacked(self, level: Level, of: Callable[[KVSegment], mx.array]) -> mx.array:
        """Puts arrays of parts side by side, all as long: (KV heads, groups, tokens, width)."""
        whole = [of(group.part)[0, self._heads] for group in level.groups if group.part is not None]
        heads, _, width = whole[0].shape
        zeros = _zeros(heads, level.longest, width, whole[0].dtype)
        pieces, parts = [], iter(whole)
        for group in level.groups:
            tokens = len(group.part or ())
            pieces += [next(parts)] if tokens else []
            pieces += [zeros[:, tokens:]] if tokens < level.longest else []
        return mx.concatenate(pieces, axis=1).reshape(heads, len(level.groups), -1, width)

    @property
    def _heads(self) -> slice:
        """Those of the parts that are here."""
        return slice(self.first_head, self.first_head + self.keys.shape[1])


@lru_cache(maxsize=4)
def _zeros(heads: int, tokens: int, width: int, dtype: mx.Dtype) -> mx.array:
    zeros = mx.zeros((heads, tokens, width), dtype)
    mx.eval(zeros)
    return zeros


def _cut(mask: mx.array | None, axis: int, at: int, step: int) -> mx.array | None:
    """Cuts a mask at one of (rows, heads, queries, tokens), unless it is the same for all there."""
    if mask is None:
        return None
    axis -= 4 - mask.ndim
    if axis < 0 or mask.shape[axis] == 1:
        return mask
    return mask[(slice(None),) * axis + (slice(at, at + step),)]


def _joined(arrays: list[mx.array]) -> mx.array:
    return arrays[0] if len(arrays) == 1 else mx.concatenate(arrays, axis=1)
