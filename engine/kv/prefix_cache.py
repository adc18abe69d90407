"""Keeps the KV of shared prefixes: each is prefilled once, and then read by all its sequences.

A prefix is built in chunks, so that sequences go on decoding meanwhile, and on a copy of the
deepest prefix that it begins with, so that nothing is computed twice. A prefix ends exactly where
its sequences branch off; it is never trimmed, because rotating and state-space caches cannot be.
What is built stays for later windows until the byte budget needs its place.

Where the model lets sequences refer to a prefix (see `sharing.py`), a longer prefix refers to
the one below it, too, and takes memory only for what it adds.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_rq.engine.kv.adapter_rows import adapter_rows
from mlx_rq.engine.kv.cached_prefix import CachedPrefix
from mlx_rq.engine.kv.prefix_key import TOKEN_BYTES, Key, adapter_of, tokens_of
from mlx_rq.engine.kv.sharing import (
    SharingCost,
    built_on,
    frozen,
    own_bytes,
    worth,
)

NextUse = Callable[[], Mapping[Key, float]]
"""Tells how soon sequences that wait will need which prefixes: 0 for those that come next."""


def no_use() -> Mapping[Key, float]:
    """Nobody waits for any prefix."""
    return {}


class PrefixCache:
    """The prefixes that this engine holds."""

    def __init__(
        self,
        model: Module,
        *,
        chunk: int,
        share_from: int | None = None,
        bits: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prefixes are referred to where that spares `share_from` tokens a step; else copied.

        Those that may be referred to are held in so many `bits`.
        """
        self._model = model
        self._chunk = chunk
        self._share_from = share_from
        self._bits = bits
        self._clock = clock
        self._held: dict[Key, CachedPrefix] = {}
        self._building: CachedPrefix | None = None
        self._goal: Key = b""
        self.broken_off = False
        """Whether an error ended the computing of a prefix."""
        self.prefilled_tokens = 0
        self.prefill_seconds = 0.0
        self.built = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[CachedPrefix]:
        return iter(self._held.values())

    def __getitem__(self, key: Key) -> CachedPrefix:
        return self._held[key]

    @property
    def shared(self) -> bool:
        """Whether sequences may refer to prefixes."""
        return self._share_from is not None

    @property
    def nbytes(self) -> int:
        return sum(prefix.nbytes for prefix in self._held.values())

    @property
    def distinct_tokens(self) -> int:
        """Tokens held, those counted once that a longer prefix has from a shorter one."""
        return sum(prefix.computed for prefix in self._held.values())

    def holds(self, key: Key) -> bool:
        """Says whether a prefix is whole."""
        return key in self._held

    def deepest(self, prompt: Key, at_most: int) -> CachedPrefix | None:
        """Finds the longest held prefix of at most `at_most` tokens that a prompt begins with."""
        fitting = (
            prefix
            for key, prefix in self._held.items()
            if prefix.depth <= at_most and prompt.startswith(key)
        )
        return max(fitting, key=lambda prefix: prefix.depth, default=None)

    def use(self, prefix: CachedPrefix, sequences: int) -> None:
        """Notes that sequences are generated from a prefix."""
        prefix.uses += sequences
        prefix.uncharged = 0
        prefix.last_used = self._clock()

    def worth_referring(
        self, prefix: CachedPrefix | None, sequences: int, in_use: Iterable[CachedPrefix]
    ) -> CachedPrefix | None:
        """Says to how much of a prefix so many new sequences had better refer; None: to nothing.

        `in_use` are the prefixes that running sequences refer to, one for each sequence.
        """
        if prefix is None or self._share_from is None:
            return None
        users = Counter(below for used in in_use for below in used.chain)
        chain = [(one.length, sequences + users[one]) for one in prefix.chain]
        levels = worth(chain, SharingCost.of(self._share_from), begun=bool(users))
        return prefix.chain[levels - 1] if levels else None

    def build(self, key: Key, tokens: int | None = None) -> CachedPrefix | None:
        """Does one chunk's work on a prefix; returns it once it is whole, at once where it is held.

        The chunk is of so many `tokens`. Another key than last time abandons the prefix in work.
        """
        if key in self._held:
            return self._held[key]
        if self._building is None or self._goal != key:
            self._goal = key
            self._building = self._begin(key)
        prefix = self._building
        done = len(prefix.key)
        chunk = key[done : done + (tokens or self._chunk) * TOKEN_BYTES]
        started = self._clock()
        self.broken_off = True
        with adapter_rows([adapter_of(key)]):
            self._model(mx.array([tokens_of(chunk)]), cache=prefix.caches)
        mx.eval([cache.state for cache in prefix.caches])
        self.broken_off = False
        mx.clear_cache()
        self.prefill_seconds += self._clock() - started
        self.prefilled_tokens += len(chunk) // TOKEN_BYTES
        prefix.key = key[: done + len(chunk)]
        prefix.computed += len(chunk) // TOKEN_BYTES
        prefix.uncharged += len(chunk) // TOKEN_BYTES
        if prefix.key != key:
            return None
        self._building = None
        self._freeze(prefix)
        prefix.last_used = self._clock()
        self._held[key] = prefix
        self.built += 1
        return prefix

    @property
    def building(self) -> bool:
        """Whether a prefix is in work."""
        return self._building is not None

    @property
    def bytes_in_work(self) -> int:
        """Bytes of the prefix in work, which may have been put aside."""
        caches = [] if self._building is None else self._building.caches
        return sum(int(cache.nbytes) for cache in caches)

    @property
    def reach(self) -> int:
        """Tokens of the prefix in work that are computed."""
        return 0 if self._building is None else self._building.depth

    def abandon(self) -> None:
        """Forgets the prefix in work, whose caches an error may have left half written."""
        self._building, self.broken_off = None, False

    def forget(self, prompt: Key) -> None:
        """Evicts the prefixes that a prompt begins with, and what was built on them.

        Nobody may refer to them.
        """
        below = {prefix for prefix in self if prompt.startswith(prefix.key)}
        for prefix in list(self):
            if not below.isdisjoint(prefix.chain):
                del self._held[prefix.key]
                self.evicted += 1

    def _begin(self, key: Key) -> CachedPrefix:
        parent = self.deepest(key, at_most=len(key) // TOKEN_BYTES - 1)
        if parent is None:
            return CachedPrefix(b"", make_prompt_cache(self._model), 0, self._clock())
        uncharged = parent.uncharged  # where no sequence stands on the parent itself
        self.use(parent, 1)
        below = parent if self.shared else None
        return CachedPrefix(
            parent.key, built_on(parent.caches), 0, self._clock(), below, uncharged=uncharged
        )

    def _freeze(self, prefix: CachedPrefix) -> None:
        """Gives back the slots that a growing cache allocates ahead: a prefix never grows again."""
        if self.shared:
            below = None if prefix.below is None else prefix.below.caches
            prefix.caches, prefix.nbytes = frozen(prefix.caches, below, self._bits)
            return
        for cache in prefix.caches:
            if type(cache) is KVCache:
                keys, values = cache.keys_and_values()
                cache.keys, cache.values = mx.contiguous(keys), mx.contiguous(values)
        mx.eval([cache.state for cache in prefix.caches])
        prefix.nbytes = own_bytes(prefix.caches)

    def evict(
        self,
        nbytes: int,
        *,
        next_use: NextUse = no_use,
        keep_needed: bool = False,
        in_use: Iterable[CachedPrefix] = (),
    ) -> bool:
        """Evicts prefixes until all take at most `nbytes`; says whether they do.

        First go those that no sequence waits for, the least valuable by past use first; then the
        others (never, with `keep_needed`), the one whose `next_use` is the furthest first, which
        has the fewest built again (Belady, 1966). Those that sequences refer to (`in_use`) stay,
        and those below them; nothing is evicted where that cannot be enough.
        """
        if self.nbytes <= nbytes:
            return True
        needed = next_use()
        loose = self._loose(needed if keep_needed else (), in_use)
        excess = self.nbytes - nbytes
        if excess > sum(prefix.nbytes for prefix in loose):
            return False
        now = self._clock()
        while excess > 0:
            referred_to = {prefix.below for prefix in loose}
            tops = [prefix for prefix in loose if prefix not in referred_to]
            least = min(
                tops,
                key=lambda prefix: (-needed.get(prefix.key, math.inf), prefix.value(now)),
            )
            loose.remove(least)
            del self._held[least.key]
            excess -= least.nbytes
            self.evicted += 1
        return True

    def evict_all(self, *, but: Container[Key] = (), in_use: Iterable[CachedPrefix] = ()) -> None:
        """Evicts all prefixes except some, those that sequences refer to, and those below them."""
        for prefix in self._loose(but, in_use):
            del self._held[prefix.key]
            self.evicted += 1

    def _loose(self, keep: Container[Key], in_use: Iterable[CachedPrefix]) -> list[CachedPrefix]:
        """The prefixes that are neither to be kept nor in use, nor below one that is."""
        used = [*in_use, *(prefix for key, prefix in self._held.items() if key in keep)]
        if self._building and self._building.below:
            used.append(self._building.below)
        fixed = set[CachedPrefix]()
        for one in used:
            below: CachedPrefix | None = one
            while below is not None and below not in fixed:  # else so is what is below it
                fixed.add(below)
                below = below.below
        return [prefix for prefix in self._held.values() if prefix not in fixed]
