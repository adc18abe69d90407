"""How much memory KV takes, and how much of it there is."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from mlx_rq.engine.kv.cached_prefix import CachedPrefix
from mlx_rq.engine.kv.layers import apart, can_share
from mlx_rq.engine.kv.prefix_cache import NextUse, PrefixCache, no_use
from mlx_rq.engine.kv.ragged import most_lag
from mlx_rq.engine.kv.shared_cache import BLOCK
from mlx_rq.engine.models.device import Device, weight_bytes
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.jobs.openai.errors import RequestError

_SHARE = 0.8
"""The part of what the weights leave free that KV may take; the rest is for activations."""

_CPU_SHARE = 0.5
"""Without a ceiling (on a CPU), KV and weights together take at most half of all memory."""


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of layers that are alike."""

    per_token: int
    """Bytes of a token in all of them."""
    window: int | None = None
    """Tokens that a sequence holds at most; None for all of them."""
    shareable: bool = False
    """Whether sequences hold nothing of a prefix that they share."""

    def bytes(self, tokens: int, own: int) -> int:
        """Says what a sequence of so many tokens holds, `own` of them no shared prefix's."""
        held = own if self.shareable else tokens
        return self.per_token * (held if self.window is None else min(held, self.window))


@dataclass(frozen=True, slots=True)
class KVCost:
    """What one sequence costs, in bytes: for the tokens that it holds, and however short it is."""

    layers: tuple[LayerKV, ...]
    per_sequence: int = 0

    @property
    def per_token(self) -> int:
        """Bytes of a token that is in all layers."""
        return sum(layer.per_token for layer in self.layers)

    @property
    def shareable(self) -> int:
        """The part of `per_token` that tokens of a shared prefix do not cost a sequence."""
        return sum(layer.per_token for layer in self.layers if layer.shareable)

    def bytes(self, sequences: int, tokens: int, own: int | None = None) -> int:
        """Says what sequences of `tokens` tokens cost, of which `own` are no shared prefix's."""
        own = tokens if own is None else own
        held = sum(layer.bytes(tokens, own) for layer in self.layers)
        return sequences * (self.per_sequence + held)


def measure_kv(model: Module) -> KVCost:
    """Measures a model's KV by computing one token with it."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    kinds = Counter[tuple[int | None, bool]]()
    per_sequence, one_by_one = 0, apart(caches)
    for cache in _leaves(caches):
        keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
        if isinstance(keys, mx.array) and isinstance(values, mx.array):
            shared = can_share(cache) and cache in one_by_one
            kind = getattr(cache, "max_size", None), shared
            # A cache allocates many slots at once.
            kinds[kind] += (keys.nbytes + values.nbytes) // keys.shape[2]
        else:
            per_sequence += cache.nbytes
    layers = (LayerKV(nbytes, window, shared) for (window, shared), nbytes in kinds.items())
    return KVCost(tuple(layers), per_sequence)


def _leaves(caches: Iterable[Any]) -> Iterable[Any]:
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is None:
            yield cache
        else:
            yield from _leaves(inner)


def default_kv_bytes(model: Module, device: Device, *beside: Module) -> int:
    """Says how many bytes of KV there is room for on a device, beside the weights.

    `beside` are other models that are in memory with it.
    """
    weights = sum(map(weight_bytes, (model, *beside)))
    if device.ceiling is None:
        room = _CPU_SHARE * device.physical - weights
    else:
        room = _SHARE * (device.ceiling - weights)
    return max(int(room), 64 * 1024**2)


class KVBudget:
    """Says which sequences fit: all KV, of prefixes too, stays within a number of bytes.

    Without one, it is what the machine has room for. `reserve` tokens of a sequence's answer count
    at its admission.
    """

    def __init__(
        self,
        model: Module,
        nbytes: int | None,
        reserve: int,
        device: Device,
        beside: Sequence[Module] = (),
    ) -> None:
        """`beside` are other models that are in memory with this one."""
        self.cost = measure_kv(model)
        self.nbytes = nbytes or default_kv_bytes(model, device, *beside)
        self.share = 1.0
        """The part of the bytes that is used, by sequences that could also wait."""
        self.ragged = False
        """Whether sequences take in unequal numbers of tokens in a step, by what grammars decide.
        """
        self._reserve = reserve

    def has_room(self, nbytes: int, sequence: TokenSequence, prefix_cache: PrefixCache) -> bool:
        """Says whether there are so many bytes left beside a sequence that runs alone."""
        held = self.cost.bytes(1, sequence.length) + prefix_cache.nbytes
        return held + nbytes <= int(self.share * self.nbytes)

    def check(self, sequences: Iterable[TokenSequence]) -> None:
        """Raises RequestError for a sequence whose prompt alone is too large."""
        for sequence in sequences:
            least = self.cost.bytes(1, len(sequence.prompt) + 1)
            if least > self.nbytes:
                raise RequestError(
                    f"The KV of the prompt's {len(sequence.prompt)} tokens takes {least:,} bytes; "
                    f"this worker keeps {self.nbytes:,} (--kv-budget). Reduce the prompt.",
                    code="context_length_exceeded",
                )

    def fitting(
        self,
        running: Collection[TokenSequence],
        more: Iterable[TokenSequence],
        prefix_cache: PrefixCache,
        next_use: NextUse,
        shared: CachedPrefix | None = None,
    ) -> int:
        """Counts the sequences for which there is memory beside those that run.

        They are to refer to the prefix `shared`. Prefixes that no sequence refers to or waits for
        are evicted for them.
        """
        sizes = [(self._reserved(sequence), sequence.shared_tokens) for sequence in running]
        shared_tokens = 0 if shared is None else shared.depth
        count, together = 0, list(running)
        for sequence in more:
            sizes.append((self._reserved(sequence), shared_tokens))
            together.append(sequence)
            needed = self._needed(sizes, self._lag(together)) + prefix_cache.bytes_in_work
            room = int(self.share * self.nbytes) - needed
            if not prefix_cache.evict(
                room, next_use=next_use, keep_needed=True, in_use=referred_to(running)
            ):
                break
            count += 1
        return count

    def may_build(
        self,
        tokens: int,
        running: Collection[TokenSequence],
        prefix_cache: PrefixCache,
        next_use: NextUse,
    ) -> bool:
        """Says whether there is memory for a prefix of so many tokens beside those that run.

        Prefixes that no sequence refers to or waits for are evicted for it.
        """
        if not running:
            return True
        sizes = [(self._reserved(sequence), sequence.shared_tokens) for sequence in running]
        own = self.cost.bytes(1, tokens + KVCache.step - 1)
        needed = self._needed(sizes, self._lag(running))
        room = int(self.share * self.nbytes) - needed - own
        in_use = referred_to(running)
        return prefix_cache.evict(room, next_use=next_use, keep_needed=True, in_use=in_use)

    def _reserved(self, sequence: TokenSequence) -> int:
        return len(sequence.tokens) + min(sequence.remaining, self._reserve)

    def _lag(self, sequences: Collection[TokenSequence]) -> int:
        """Slots that the longest sequence may lag behind one whose grammar decides many tokens."""
        constrained = self.ragged and any(one.constraint is not None for one in sequences)
        return most_lag(len(sequences)) if constrained else 0

    def _needed(self, sizes: Sequence[tuple[int, int]], lag: int = 0) -> int:
        """Says what sequences cost; each is given as its tokens, and how many of them it shares.

        The slots are counted that a batch has behind its longest sequence: `lag`, and those that
        are allocated ahead.
        """
        sharing = any(shared for _, shared in sizes)
        longest = max(tokens for tokens, _ in sizes) + lag + BatchKVCache.step - 1
        own = max(tokens - shared for tokens, shared in sizes) + lag
        own += (BLOCK if sharing else BatchKVCache.step) - 1
        return self.cost.bytes(len(sizes), longest, own)

    def outgrown(
        self,
        running: Collection[TokenSequence],
        prefix_cache: PrefixCache,
        next_use: NextUse = no_use,
    ) -> bool:
        """Tells whether sequences that run have to make room, though every prefix were evicted.

        One alone may always go on.
        """
        if len(running) <= 1:
            return False
        sizes = [
            (len(sequence.prompt) + len(sequence.text.tokens) + 1, sequence.shared_tokens)
            for sequence in running
        ]
        room = int(self.share * self.nbytes) - self._needed(sizes, self._lag(running))
        return not prefix_cache.evict(room, next_use=next_use, in_use=referred_to(running))


def referred_to(sequences: Iterable[TokenSequence]) -> list[CachedPrefix]:
    """Gives the prefixes whose KV sequences refer to, one for each sequence that does."""
    return [sequence.shared for sequence in sequences if sequence.shared is not None]
