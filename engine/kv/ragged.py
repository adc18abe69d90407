"""A batch whose rows take in several tokens in one step, each as many as it has.

A grammar often decides more than the next token: the rest of a key, the quotes and brackets around
it. Those tokens need no logits, so they go with the next step instead of taking one each. Padding
all rows to the longest run would compute more than it spares. So the tokens are packed: to the
model, each is a row of its own with one token, at its own position; in the cache they go to the
slots of the row that they belong to, and only attention, which is the small part of a step, sees
them side by side, padded.

Written against mlx-lm 0.32 (`mlx_lm/models/cache.py`), whose batch cache this one extends.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from operator import add
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlx_rq.engine.kv.arrangement import indices

_MOST_PADDED = 5
"""Rows that attention is padded to, for each that has one more token."""

_MOST_LAG = 32
"""Slots that one row may be ahead of another: memory that holds nothing, and is attended to."""

_MOST_POSITIONS = 64
"""Tokens of all rows in a step, as attention sees them: padded to the most of one."""


def most_ahead(rows: int) -> int:
    """Says how many tokens of a row, beside the due one, a step of so many rows may take in."""
    return max(0, _MOST_POSITIONS // rows - 1)


def most_lag(rows: int) -> int:
    """Says how many slots the longest of so many rows may lag behind another, within a step."""
    return _MOST_LAG + most_ahead(rows) if rows > 1 else 0


def longest_run(runs: Sequence[int]) -> int:
    """Says how many tokens of runs to take in with a step, at most of each row.

    `runs` are how many there are of each. So many that attention is not padded much for them.
    """
    rows_at = [sum(run > place for run in runs) for place in range(max(runs))]
    return sum(_MOST_PADDED * rows >= len(runs) for rows in rows_at)


class RaggedStep:
    """So many tokens of each row. Packed, the first token of each row comes first, then the rest,
    row by row.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        """Each row takes in one token at least."""
        self.counts = tuple(counts)
        firsts = [(row, 0) for row in range(len(counts))]
        rest = [(row, place) for row, count in enumerate(counts) for place in range(1, count)]
        self._tokens = firsts + rest
        self.longest = max(counts)

    @cached_property
    def rows(self) -> mx.array:
        """The row of each token."""
        return indices(tuple(row for row, _ in self._tokens))

    @cached_property
    def places(self) -> mx.array:
        """How many tokens of its row come before each, in this step."""
        return indices(tuple(place for _, place in self._tokens))

    @cached_property
    def last(self) -> mx.array:
        """Which packed token is the last of each row."""
        return indices(tuple(self._packed(row, count - 1) for row, count in enumerate(self.counts)))

    def slots(self, ends: Sequence[int]) -> mx.array:
        """The slot of each token, where so many slots of its row are used."""
        return indices(tuple(ends[row] + place for row, place in self._tokens))

    def apart(self, packed: mx.array) -> mx.array:
        """Puts each row's tokens side by side: (tokens, heads, 1, width) to (rows, heads, longest,
        width). Behind a row's last token, that one is repeated.
        """
        return packed[:, :, 0][self._padded].swapaxes(1, 2)

    def packed(self, padded: mx.array) -> mx.array:
        """Puts them one behind the other again."""
        flat = padded.swapaxes(1, 2).flatten(0, 1)
        return flat[self._unpadded][:, :, None]

    @cached_property
    def _padded(self) -> mx.array:
        places = range(self.longest)
        return mx.array(
            [
                [self._packed(row, min(place, count - 1)) for place in places]
                for row, count in enumerate(self.counts)
            ]
        )

    @cached_property
    def _unpadded(self) -> mx.array:
        return mx.array([row * self.longest + place for row, place in self._tokens])

    def _packed(self, row: int, place: int) -> int:
        """Finds a row's token among the packed ones."""
        return len(self.counts) + self._before[row] + place - 1 if place else row

    @cached_property
    def _before(self) -> list[int]:
        return list(accumulate((count - 1 for count in self.counts), initial=0))


class RaggedKVCache(BatchKVCache):
    """mlx-lm's cache of a batch, whose rows may also end at different slots.

    Where a row begins and ends is known without asking the device, which every layer would have to
    wait for.
    """

    def __init__(self, left_padding: Sequence[int]) -> None:
        super().__init__(list(left_padding))
        self._padding, self._rolling = list(left_padding), list[int]()
        self._lag = [0] * len(self._padding)
        self.keys: mx.array | None  # type: ignore[assignment]
        self.values: mx.array | None  # type: ignore[assignment]
        self.ragged: RaggedStep | None = None
        """The step that is being computed; None where it takes in as much of each row."""

    @property
    def padding(self) -> tuple[int, ...]:
        """Slots before each row's first token."""
        return tuple(self._padding)

    @property
    def lag(self) -> tuple[int, ...]:
        """Slots behind each row's last token."""
        return tuple(self._lag)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Appends to the rows; gives all of them."""
        if self.ragged is None and not any(self._lag):
            own: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call]
            return own
        self._append(self.ragged or RaggedStep([1] * len(self._lag)), keys, values)
        return self.keys_and_values()  # type: ignore[no-untyped-call,no-any-return]

    def _append(self, step: RaggedStep, keys: mx.array, values: mx.array) -> None:
        ends = [self._idx - lag for lag in self._lag]
        slots, ends = step.slots(ends), list(map(add, ends, step.counts))
        self._idx = max(ends)
        self._lag = [self._idx - end for end in ends]
        if self.ragged is None:
            self.offset = self.offset + 1
        assert self.keys is not None, "rows that decode have keys"
        assert self.values is not None
        if (missing := self._idx - self.keys.shape[2]) > 0:
            room = [(0, 0), (0, 0), (0, -(-missing // self.step) * self.step), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, room), mx.pad(self.values, room)
        self.keys[step.rows, :, slots] = keys[:, :, 0]
        self.values[step.rows, :, slots] = values[:, :, 0]

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array | None:
        """Gives the mask over the slots: (rows, 1, tokens, slots)."""
        if self.ragged is None and not any(self._lag):
            mask: mx.array = super().make_mask(N, return_array=return_array, **kwargs)
            return mask
        assert N == 1, "a batch whose rows end at different slots decodes"
        counts = (1,) * len(self._lag) if self.ragged is None else self.ragged.counts
        ends = [self._idx - lag for lag in self._lag]
        slots = mx.arange(max(map(add, ends, counts)))
        before = indices(tuple(ends))[:, None, None, None]
        places = mx.arange(max(counts))[:, None]
        return (slots <= before + places) & (slots >= self.left_padding[:, None, None, None])

    def align(self) -> None:
        """Has all rows end at one slot, and the longest begin at the first."""
        if not any(self._lag) or self.keys is None or self.values is None:
            return
        padding = list(map(add, self._padding, self._lag))
        unused = min(padding)  # else rows that overtake each other would leave more and more
        slots = mx.maximum(mx.arange(unused, self._idx) - indices(self.lag)[:, None], 0)
        self.keys = mx.take_along_axis(self.keys, slots[:, None, :, None], axis=2)
        self.values = mx.take_along_axis(self.values, slots[:, None, :, None], axis=2)
        self._idx -= unused
        self._padding = [slots - unused for slots in padding]
        self.left_padding = indices(self.padding)
        self._lag = [0] * len(self._lag)

    @property
    def uneven(self) -> bool:
        """Whether some rows are so far ahead that `align` is worth its copy."""
        return max(self._lag) > _MOST_LAG

    def trim(self, n: int) -> int:
        """Forgets up to `n` tokens of every row, as many as the shortest has; says how many."""
        self.align()
        forgotten = min(n, self._idx - max(self._padding))
        self._idx -= forgotten
        self.offset = self.offset - forgotten
        return forgotten

    def filter(self, batch_indices: Sequence[int]) -> None:
        """Keeps these rows, and no slot that none of them uses."""
        rows = mx.array(list(batch_indices))
        padding = [self._padding[row] for row in batch_indices]
        lag = [self._lag[row] for row in batch_indices]
        unused, ahead = min(padding), min(lag)
        if self.keys is not None and self.values is not None:
            # Cut first: what the rows are then gathered into is no larger than they need.
            used = slice(unused, self._idx - ahead if ahead else None)
            self.keys = self.keys[..., used, :][rows]
            self.values = self.values[..., used, :][rows]
            self._idx -= unused + ahead
        self.offset = self.offset[rows]
        self._padding = [slots - unused for slots in padding]
        self._lag = [slots - ahead for slots in lag]
        self.left_padding = mx.array(self._padding)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Says how prompts that come next are padded, so that they have one length."""
        super().prepare(left_padding=left_padding, lengths=lengths, right_padding=right_padding)  # type: ignore[no-untyped-call]
        if left_padding is not None:
            self._padding = list(map(add, self._padding, left_padding))
        self._rolling = list(right_padding or ())

    def finalize(self) -> None:
        """Turns the padding on the right into one on the left."""
        super().finalize()  # type: ignore[no-untyped-call]
        if self._rolling:
            self._padding = list(map(add, self._padding, self._rolling))
            self._rolling = []

    def extend(self, other: BatchKVCache) -> None:
        """Takes in the rows of another batch of this kind."""
        assert isinstance(other, RaggedKVCache)
        longest = max(self._idx, other._idx)
        self._padding = [
            slots + longest - batch._idx for batch in (self, other) for slots in batch._padding
        ]
        self._lag += other._lag
        super().extend(other)  # type: ignore[no-untyped-call]

    def row(self, idx: int) -> KVCache:
        """Gives one row by itself."""
        alone = KVCache()
        if self.keys is not None and self.values is not None:
            own = slice(self._padding[idx], self._idx - self._lag[idx])
            alone.keys = mx.contiguous(self.keys[idx : idx + 1, :, own])
            alone.values = mx.contiguous(self.values[idx : idx + 1, :, own])
            alone.offset = alone.keys.shape[2]
        return alone


@contextmanager
def ragged_step(caches: Sequence[RaggedKVCache], counts: Sequence[int]) -> Iterator[RaggedStep]:
    """Has the forward pass within take in packed tokens, so many of each row, in all layers."""
    step, offset = RaggedStep(counts), caches[0].offset
    during, after = offset[step.rows] + step.places, offset + indices(step.counts)
    for cache in caches:
        cache.ragged, cache.offset = step, during
    yield step
    for cache in caches:
        cache.ragged, cache.offset = None, after
        if cache.uneven:
            cache.align()
