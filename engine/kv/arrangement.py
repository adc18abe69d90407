"""Rows of a batch and the prefixes that they stand on: chains of parts, each of which is held once.

A prefix is a chain of parts, one for each level of nesting (a system prompt, a document below it):
a longer prefix refers to the parts of the shorter one and holds only what it adds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import mlx.core as mx

from mlx_rq.engine.kv.segment import KVSegment, LatentSegment

Chain = tuple[KVSegment, ...]


def depth(chain: Chain) -> int:
    """Counts the tokens of a chain."""
    return sum(map(len, chain))


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


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Rows in an order in which those that share parts stand together, at every level of nesting.

    `order` says which row comes where, `places` where a row is then (None: right where it is).
    """

    levels: tuple[Level, ...]
    order: mx.array | None = None
    places: mx.array | None = None

    @property
    def latent(self) -> bool:
        """Whether the parts are those of a layer that keeps latents (`latents.py`)."""
        return any(
            isinstance(group.part, LatentSegment)
            for level in self.levels[:1]
            for group in level.groups
        )


def arranged(chains: Sequence[Chain]) -> Arrangement:
    """Groups rows by the parts that they share."""
    deepest = max(map(len, chains), default=0)
    paths = [(*chain, *[None] * (deepest - len(chain))) for chain in chains]
    seen: dict[KVSegment | None, int] = {}
    ranks = [tuple(seen.setdefault(part, len(seen)) for part in path) for path in paths]
    order = sorted(range(len(paths)), key=ranks.__getitem__)
    levels = tuple(_level([paths[row][n] for row in order]) for n in range(deepest))
    if order == sorted(order):
        return Arrangement(levels)
    places = sorted(order, key=order.__getitem__)
    return Arrangement(levels, indices(tuple(order)), indices(tuple(places)))


def _level(parts: Sequence[KVSegment | None]) -> Level:
    groups = tuple(Group(part, len(list(rows))) for part, rows in groupby(parts))
    return Level(groups, max(len(part) for part in parts if part is not None))


@lru_cache(maxsize=64)
def indices(rows: tuple[int, ...]) -> mx.array:
    """Gives the same array to all layers, whose rows stand alike."""
    return mx.array(rows)
