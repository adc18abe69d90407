"""Keeps the KV of shared prefixes: each trunk is prefilled once and then read by all its rows.

A trunk is built in chunks, so that rows go on decoding meanwhile, and on a copy of the deepest
trunk that it begins with, so that nothing is computed twice. A trunk ends exactly where its rows
branch off; it is never trimmed, because rotating and state-space caches cannot be. What is built
stays for later windows until the byte budget needs its place.
"""

import copy
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

_TOKEN_BYTES = array("I").itemsize
_FORGETTING_SECONDS = 3600.0
"""A trunk that was not used for this long counts half."""

Key = bytes
"""A prefix as the bytes of its token ids: two keys are compared by memcmp."""


def key_of(tokens: Sequence[int]) -> Key:
    """Writes token ids as a key."""
    return array("I", tokens).tobytes()


@dataclass(eq=False, slots=True)
class Trunk:
    """The frozen cache of a prefix, one entry a layer. Read it, copy it, never write to it."""

    key: Key
    caches: list[Any]
    nbytes: int
    last_used: float
    uses: int = 0
    computed: int = 0
    """Tokens that were prefilled for it: its depth, less what a shorter trunk had of it."""

    @property
    def depth(self) -> int:
        return len(self.key) // _TOKEN_BYTES

    def value(self, now: float) -> float:
        """Says what it is worth to keep: tokens saved for each byte, less as time goes by."""
        age = (now - self.last_used) / _FORGETTING_SECONDS
        return (1 + self.uses) * self.depth / max(1, self.nbytes) / (1 + age)


class Trunks:
    """The trunks that this engine holds."""

    def __init__(
        self,
        model: Module,
        *,
        chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._chunk = chunk
        self._clock = clock
        self._held: dict[Key, Trunk] = {}
        self._building: Trunk | None = None
        self._goal: Key = b""
        self.prefilled_tokens = 0
        self.prefill_seconds = 0.0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        return sum(trunk.nbytes for trunk in self._held.values())

    @property
    def distinct_tokens(self) -> int:
        """Tokens held, those counted once that a longer trunk has from a shorter one."""
        return sum(trunk.computed for trunk in self._held.values())

    def deepest(self, prompt: Key, at_most: int) -> Trunk | None:
        """Finds the longest held trunk of at most `at_most` tokens that a prompt begins with."""
        fitting = (
            trunk
            for key, trunk in self._held.items()
            if trunk.depth <= at_most and prompt.startswith(key)
        )
        return max(fitting, key=lambda trunk: trunk.depth, default=None)

    def use(self, trunk: Trunk, rows: int) -> None:
        """Notes that rows are generated from a trunk."""
        trunk.uses += rows
        trunk.last_used = self._clock()

    def build(self, key: Key) -> Trunk | None:
        """Does one chunk's work on a trunk; returns it once it is whole, at once where it is held.

        Another key than last time abandons the trunk in work.
        """
        if key in self._held:
            return self._held[key]
        if self._building is None or self._goal != key:
            self._goal = key
            self._building = self._begin(key)
        trunk = self._building
        done = len(trunk.key)
        chunk = key[done : done + self._chunk * _TOKEN_BYTES]
        started = self._clock()
        self._model(mx.array([array("I", chunk).tolist()]), cache=trunk.caches)
        mx.eval([cache.state for cache in trunk.caches])
        mx.clear_cache()
        self.prefill_seconds += self._clock() - started
        self.prefilled_tokens += len(chunk) // _TOKEN_BYTES
        trunk.key = key[: done + len(chunk)]
        trunk.computed += len(chunk) // _TOKEN_BYTES
        if trunk.key != key:
            return None
        self._building = None
        _drop_spare_slots(trunk.caches)
        trunk.nbytes = sum(cache.nbytes for cache in trunk.caches)
        trunk.last_used = self._clock()
        self._held[key] = trunk
        return trunk

    def abandon(self) -> None:
        """Forgets the trunk in work, whose caches an error may have left half written."""
        self._building = None

    def _begin(self, key: Key) -> Trunk:
        parent = self.deepest(key, at_most=len(key) // _TOKEN_BYTES - 1)
        # A deep copy is lazy: memory is taken where the child writes. A shallow one would let the
        # child write into its parent.
        caches = make_prompt_cache(self._model) if parent is None else copy.deepcopy(parent.caches)
        if parent is not None:
            self.use(parent, 1)
        return Trunk(b"" if parent is None else parent.key, caches, 0, self._clock())

    def shrink(self, nbytes: int, *, keep: frozenset[Key]) -> bool:
        """Evicts the least valuable trunks until all take at most `nbytes`; says whether they do.

        Those that rows wait for (`keep`) stay, and nothing is evicted where that cannot be enough.
        """
        loose = [trunk for key, trunk in self._held.items() if key not in keep]
        excess = self.nbytes - nbytes
        if excess > sum(trunk.nbytes for trunk in loose):
            return False
        now = self._clock()
        for trunk in sorted(loose, key=lambda trunk: trunk.value(now)):
            if excess <= 0:
                break
            del self._held[trunk.key]
            excess -= trunk.nbytes
            self.evicted += 1
        return True


def _drop_spare_slots(caches: Sequence[Any]) -> None:
    """Gives back the slots that a growing cache allocates ahead: a trunk never grows again."""
    for cache in caches:
        if type(cache) is KVCache:
            keys, values = cache.keys_and_values()
            cache.keys, cache.values = mx.contiguous(keys), mx.contiguous(values)
    mx.eval([cache.state for cache in caches])
