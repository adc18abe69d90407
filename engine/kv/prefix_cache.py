"""Keeps the KV of shared prefixes: each trunk is prefilled once and then read by all its rows.

A trunk is built in chunks, so that rows go on decoding meanwhile, and on a copy of the deepest
trunk that it begins with, so that nothing is computed twice. A trunk ends exactly where its rows
branch off; it is never trimmed, because rotating and state-space caches cannot be. What is built
stays for later windows until the byte budget needs its place.

Where the model lets rows refer to a trunk (see `shared_trunk`), a longer trunk refers to the one
below it, too, and takes memory only for what it adds.
"""

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_rq.engine.kv.sharing import Caches, built_on, frozen, standing, worth

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
    caches: Caches
    nbytes: int
    """Bytes of its own: those of `below` are not in it."""
    last_used: float
    below: "Trunk | None" = None
    """The trunk whose KV it refers to; it outlives this one."""
    uses: int = 0
    computed: int = 0
    """Tokens that were prefilled for it: its depth, less what a shorter trunk had of it."""
    uncharged: int = 0
    """Of its tokens, those that were computed for no row yet: the first row on it pays for them."""

    @property
    def depth(self) -> int:
        return len(self.key) // _TOKEN_BYTES

    @property
    def chain(self) -> "tuple[Trunk, ...]":
        """The trunks whose KV makes up this one's, the shortest first, itself the last."""
        return (*(self.below.chain if self.below else ()), self)

    @property
    def length(self) -> int:
        """Tokens whose KV it holds itself."""
        return self.depth - (self.below.depth if self.below else 0)

    def caches_for(self, shared: "Trunk | None") -> Caches:
        """Gives the caches of rows on it that refer to the KV of `shared` and copy the rest."""
        return standing(self.caches, 0 if shared is None else len(shared.chain))

    def value(self, now: float) -> float:
        """Says what it is worth to keep: tokens saved for each byte, less as time goes by."""
        age = (now - self.last_used) / _FORGETTING_SECONDS
        return (1 + self.uses) * self.length / max(1, self.nbytes) / (1 + age)


class Trunks:
    """The trunks that this engine holds."""

    def __init__(
        self,
        model: Module,
        *,
        chunk: int,
        share_from: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `share_from`, rows refer to trunks from so many tokens times rows on; else copy."""
        self._model = model
        self._chunk = chunk
        self._share_from = share_from
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
    def shared(self) -> bool:
        """Whether rows may refer to trunks."""
        return self._share_from is not None

    @property
    def nbytes(self) -> int:
        return sum(trunk.nbytes for trunk in self._held.values())

    @property
    def distinct_tokens(self) -> int:
        """Tokens held, those counted once that a longer trunk has from a shorter one."""
        return sum(trunk.computed for trunk in self._held.values())

    def holds(self, key: Key) -> bool:
        """Says whether a trunk is whole."""
        return key in self._held

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
        trunk.uncharged = 0
        trunk.last_used = self._clock()

    def worth_referring(
        self, trunk: Trunk | None, rows: int, in_use: Iterable[Trunk]
    ) -> Trunk | None:
        """Says to how much of a trunk so many new rows had better refer; None: they copy it all.

        `in_use` are the trunks that running rows refer to, one for each row.
        """
        if trunk is None or self._share_from is None:
            return None
        users = Counter(below for used in in_use for below in used.chain)
        chain = [(one.length, rows + users[one]) for one in trunk.chain]
        levels = worth(chain, self._share_from)
        return trunk.chain[levels - 1] if levels else None

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
        trunk.uncharged += len(chunk) // _TOKEN_BYTES
        if trunk.key != key:
            return None
        self._building = None
        self._freeze(trunk)
        trunk.last_used = self._clock()
        self._held[key] = trunk
        return trunk

    def abandon(self) -> None:
        """Forgets the trunk in work, whose caches an error may have left half written."""
        self._building = None

    def _begin(self, key: Key) -> Trunk:
        parent = self.deepest(key, at_most=len(key) // _TOKEN_BYTES - 1)
        if parent is None:
            return Trunk(b"", make_prompt_cache(self._model), 0, self._clock())
        uncharged = parent.uncharged  # where no row stands on the parent itself
        self.use(parent, 1)
        below = parent if self.shared else None
        return Trunk(
            parent.key, built_on(parent.caches), 0, self._clock(), below, uncharged=uncharged
        )

    def _freeze(self, trunk: Trunk) -> None:
        """Gives back the slots that a growing cache allocates ahead: a trunk never grows again."""
        if self.shared:
            below = None if trunk.below is None else trunk.below.caches
            trunk.caches, trunk.nbytes = frozen(trunk.caches, below)
            return
        for cache in trunk.caches:
            if type(cache) is KVCache:
                keys, values = cache.keys_and_values()
                cache.keys, cache.values = mx.contiguous(keys), mx.contiguous(values)
        mx.eval([cache.state for cache in trunk.caches])
        trunk.nbytes = sum(cache.nbytes for cache in trunk.caches)

    def shrink(self, nbytes: int, *, keep: frozenset[Key], in_use: Iterable[Trunk] = ()) -> bool:
        """Evicts the least valuable trunks until all take at most `nbytes`; says whether they do.

        Those that rows wait for (`keep`) or refer to (`in_use`) stay, and those below them; nothing
        is evicted where that cannot be enough.
        """
        used = [*in_use, *(trunk for key, trunk in self._held.items() if key in keep)]
        if self._building and self._building.below:
            used.append(self._building.below)
        fixed = {trunk for one in used for trunk in one.chain}
        loose = [trunk for trunk in self._held.values() if trunk not in fixed]
        excess = self.nbytes - nbytes
        if excess > sum(trunk.nbytes for trunk in loose):
            return False
        now = self._clock()
        while excess > 0:
            referred_to = {trunk.below for trunk in loose}
            tops = [trunk for trunk in loose if trunk not in referred_to]
            least = min(tops, key=lambda trunk: trunk.value(now))
            loose.remove(least)
            del self._held[least.key]
            excess -= least.nbytes
            self.evicted += 1
        return True
