"""Rows of a batch and the prefixes that they stand on: chains of parts, each of which is held once.

A prefix is a chain of parts, one for each level of nesting (a system prompt, a document below it):
a longer prefix refers to the parts of the shorter one and holds only what it adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Self

import mlx.core as mx

from mlx_rq.engine.kv.segment import KVSegment, QuantizedSegment

Chain = tuple[KVSegment, ...]

SHORT = 2**20
"""Bytes of a part's keys that are copied while a kernel is launched: 5 µs, at 400 GB/s."""


def depth(chain: Chain) -> int:
    """Counts the tokens of a chain."""
    return sum(map(len, chain))


_EVENED = 1.5
"""At most so many times the rows are computed, so that all groups have one size."""


@dataclass(frozen=True, slots=True)
class Group:
    """So many rows, one after the other, and the part that they stand on (None: on nothing)."""

    part: KVSegment | None
    rows: int


@dataclass(frozen=True, slots=True)
class Level:
    """The groups of all rows at one level of nesting, and the tokens of the longest part there."""

    groups: tuple[Group, ...]
    longest: int
    stacked: bool = False
    """Whether all groups are of one size, and it is quicker to copy their parts side by side, and
    multiply by all of them at once, than to go one by one.
    """

    @property
    def absent(self) -> mx.array:
        """Gives what is added to scores where a part has no token: (groups, 1, tokens)."""
        return _absent(tuple(len(group.part or ()) for group in self.groups), self.longest)


@lru_cache(maxsize=64)
def _absent(lengths: tuple[int, ...], longest: int) -> mx.array:
    if min(lengths) == longest:
        return mx.array(0.0)
    return mx.array([[[0.0] * tokens + [-mx.inf] * (longest - tokens)] for tokens in lengths])


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows in an order in which those that share parts stand together, at every level of nesting.

    `order` says which row comes where, `places` where a row is then (None: right where it is);
    `latent`, whether the parts are those of a layer that keeps latents (`latents.py`); `whole`, of
    one to which its rows are given whole.
    """

    levels: tuple[Level, ...]
    order: mx.array | None = None
    places: mx.array | None = None
    latent: bool = False
    whole: bool = False

    def __deepcopy__(self, memo: object) -> Self:
        """Gives itself: mlx-lm copies whole batches where it splits one."""
        return self


def arranged(chains: Sequence[Chain]) -> Arrangement:
    """Groups rows by the parts that they share."""
    deepest = max(map(len, chains), default=0)
    paths = [(*chain, *[None] * (deepest - len(chain))) for chain in chains]
    seen: dict[KVSegment | None, int] = {}
    ranks = [tuple(seen.setdefault(part, len(seen)) for part in path) for path in paths]
    order = sorted(range(len(paths)), key=ranks.__getitem__)
    levels, evened = _levels(paths, order), _evened(order, ranks)
    if len(order) < len(evened) <= _EVENED * len(order):
        even = _levels(paths, evened)
        if sum(level.stacked for level in even) > sum(level.stacked for level in levels):
            order, levels = evened, even
    latent, whole = (
        any(getattr(part, kind) for chain in chains for part in chain[:1])
        for kind in ("latent", "whole")
    )
    if order == list(range(len(paths))):
        return Arrangement(levels, latent=latent, whole=whole)
    places = tuple(map(order.index, range(len(paths))))
    return Arrangement(levels, indices(tuple(order)), indices(places), latent, whole)


def _evened(order: Sequence[int], ranks: Sequence[object]) -> list[int]:
    """Repeats rows, so that as many stand on each chain."""
    groups = [list(rows) for _, rows in groupby(order, key=ranks.__getitem__)]
    most = max(map(len, groups), default=0)
    return [row for rows in groups for row in rows + rows[-1:] * (most - len(rows))]


def _levels(paths: Sequence[Sequence[KVSegment | None]], order: Sequence[int]) -> tuple[Level, ...]:
    return tuple(map(_level, zip(*(paths[row] for row in order), strict=True)))


def _level(parts: Sequence[KVSegment | None]) -> Level:
    groups = tuple(Group(part, len(list(rows))) for part, rows in groupby(parts))
    longest = max(len(part) for part in parts if part is not None)
    even = len({group.rows for group in groups}) == 1
    return Level(groups, longest, len(groups) > 2 and even and all(map(_is_short, parts)))


def _is_short(part: KVSegment | None) -> bool:
    if part is None:
        return True
    return not isinstance(part, QuantizedSegment) and part.scored.nbytes <= SHORT


@lru_cache(maxsize=64)
def indices(rows: tuple[int, ...]) -> mx.array:
    """Gives the same array to all layers, whose rows stand alike."""
    return mx.array(rows)
