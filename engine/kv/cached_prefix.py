"""A prefix that is held: its KV, what it stands on, and what it is worth."""

from dataclasses import dataclass

from mlx_rq.engine.kv.layers import Caches
from mlx_rq.engine.kv.prefix_key import TOKEN_BYTES, Key
from mlx_rq.engine.kv.sharing import referring

_FORGETTING_SECONDS = 3600.0
"""A prefix that was not used for this long counts half."""


@dataclass(eq=False, slots=True)
class CachedPrefix:
    """The frozen cache of a prefix, one entry a layer. Read it, copy it, never write to it."""

    key: Key
    caches: Caches
    nbytes: int
    """Bytes of its own: those of `below` are not in it."""
    last_used: float
    below: "CachedPrefix | None" = None
    """The prefix whose KV it refers to; it outlives this one."""
    uses: int = 0
    computed: int = 0
    """Tokens that were prefilled for it: its depth, less what a shorter prefix had of it."""
    uncharged: int = 0
    """Tokens of it that were computed for no sequence yet: the first one on it pays for them."""
    first_task: str = ""
    """The task of that sequence."""

    @property
    def depth(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def chain(self) -> "tuple[CachedPrefix, ...]":
        """The prefixes whose KV makes up this one's, the shortest first, itself the last."""
        chain, below = [self], self.below
        while below is not None:  # there may be more than Python lets functions call themselves
            chain.append(below)
            below = below.below
        return tuple(reversed(chain))

    @property
    def length(self) -> int:
        """Tokens whose KV it holds itself."""
        return self.depth - (self.below.depth if self.below else 0)

    def caches_for(self, shared: "CachedPrefix | None") -> Caches:
        """Gives caches for sequences on it: they refer to the KV of `shared`, and copy the rest."""
        return referring(self.caches, 0 if shared is None else len(shared.chain))

    def value(self, now: float) -> float:
        """Says what it is worth to keep: tokens saved for each byte, less as time goes by."""
        age = (now - self.last_used) / _FORGETTING_SECONDS
        return (1 + self.uses) * self.length / max(1, self.nbytes) / (1 + age)
