"""Whether and when a prefix is held once for all its sequences, instead of copied into each.

Whether: full-attention layers with a plain KV cache can share, others keep a copy in each sequence
(sliding windows, state spaces). Some models attend in ways of their own, and a few would be wrong
without a word; so when a model is loaded, sequences on a shared prefix are compared with sequences
that hold copies of it (`Sharing`). When: for so many sequences on so many tokens that it is no
slower (`worth`).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_rq.engine.kv.arrangement import Chain, depth
from mlx_rq.engine.kv.layers import Caches, apart, can_share, each, of_several
from mlx_rq.engine.kv.numerics import probe_tokens
from mlx_rq.engine.kv.segment import (
    KVSegment,
    LatentSegment,
    QuantizedLatentSegment,
    QuantizedSegment,
    WholeSegment,
    group,
)
from mlx_rq.engine.kv.shared_attention import Installation
from mlx_rq.engine.kv.shared_cache import SharedKVCache
from mlx_rq.engine.kv.trial import ASSUMED, FAILURES, Batching, Trial, Verdict, objection

MIN_SEQUENCES = 2
"""One sequence alone has nobody to share with, and loses up to 4 % by one more product."""

_OPERATIONS, _PART_OPERATIONS = 6, 3
"""What is launched in a layer beyond one fused kernel (`bench/shared_prefix.py` counts it)."""

_ALLOWED = 0.5
"""Of what rounding may do to a batch: with scores in float32, the largest seen was 0.14, and the
least of a model that is wrong 1.3.
"""

_TRIED, _SEQUENCES_TRIED = 256, 8
"""Tokens of a prefix that is tried in few bits, and the sequences on it."""


def sequence_caches(model: Module, *, share: bool) -> Caches:
    """Gives a sequence empty caches; with `share`, of the kind that sequences on prefixes have."""
    caches = make_prompt_cache(model)
    return each(caches, lambda c: SharedKVCache() if share and can_share(c) else c)


def frozen(
    built: Caches, below: Caches | None = None, bits: int | None = None
) -> tuple[Caches, int]:
    """Makes the caches of a prefix from those that it was built in; gives their bytes, too.

    Of what is in the caches of the prefix `below`, the parts are referred to; the tokens beyond it
    become a part of their own, in so many `bits` where they can be quantised. The bytes are those
    that came with this prefix.
    """
    parts_below, several = iter(apart(below or ())), of_several(built)

    def froze(cache: Any) -> Any:
        beneath = next(parts_below, None)
        if not can_share(cache):
            mx.eval(cache.state)
            return cache
        chain = () if beneath is None else beneath.chain
        whole = any(cache is one for one in several)
        part = _part(cache, start=depth(chain), bits=bits, whole=whole)
        mx.eval(part.arrays)
        return SharedKVCache((*chain, part))

    prefix = each(built, froze)
    return prefix, own_bytes(prefix)


def own_bytes(prefix: Caches) -> int:
    """Counts the bytes of a prefix's caches, without those of the prefix that it refers to."""
    caches = apart(prefix)
    shared = (cache.chain[-1].nbytes for cache in caches if isinstance(cache, SharedKVCache))
    return sum((*shared, *(int(cache.nbytes) for cache in caches)))


def _part(cache: KVCache, *, start: int, bits: int | None, whole: bool) -> KVSegment:
    keys, values = (array[:, :, start:] for array in cache.keys_and_values())
    if whole:
        return WholeSegment(keys, values)
    latent = LatentSegment.fits(keys, values)
    if bits and group(keys.shape[-1]) and (latent or group(values.shape[-1])):
        return (QuantizedLatentSegment if latent else QuantizedSegment)(keys, values, bits)
    return (LatentSegment if latent else KVSegment)(keys, values)


def built_on(base: Caches) -> Caches:
    """Gives caches to build a longer prefix in: a copy, so that writing does not touch `base`.

    mlx-lm's own attention reads all that is below in one piece.
    """

    def copied(cache: Any) -> Any:
        return _copied(cache.chain) if isinstance(cache, SharedKVCache) else copy.deepcopy(cache)

    return each(base, copied)


def referring(prefix: Caches, levels: int) -> Caches:
    """Gives the caches of sequences that refer to the first parts of a prefix and copy the rest.

    Sequences may be given the same ones: merging only reads them.
    """

    def referred(cache: Any) -> Any:
        if not isinstance(cache, SharedKVCache):
            return cache
        return SharedKVCache(cache.chain[:levels], _copied(cache.chain[levels:]))

    return each(prefix, referred)


def _copied(chain: Chain) -> KVCache:
    cache = KVCache()
    if chain:
        cache.keys = mx.concatenate([part.keys for part in chain], axis=2)
        cache.values = mx.concatenate([part.values for part in chain], axis=2)
        cache.offset = cache.keys.shape[2]
    return cache


@dataclass(frozen=True, slots=True)
class SharingCost:
    """What sharing costs at every step, as tokens of copies that could be read in that time.

    Operations are launched for it: `once` for a batch in which any sequences share, and so many for
    each `part` that they refer to.
    """

    once: int
    part: int

    @classmethod
    def of(cls, share_from: int) -> Self:
        """Divides the cost of one part alone, by the operations that are launched."""
        part = round(share_from * _PART_OPERATIONS / (_OPERATIONS + _PART_OPERATIONS))
        return cls(share_from - part, part)


def worth(chain: Sequence[tuple[int, int]], cost: SharingCost, *, begun: bool = False) -> int:
    """Says how many parts of a chain, from the first on, sequences are to refer to.

    For each part, `chain` has its tokens and the sequences that would refer to it, this or that
    way: it is read once instead of once for each of them. A short part still pays where a longer
    one below it does. `begun`, others in the batch share already.
    """
    best = best_gain = 0
    gain = 0 if begun else -cost.once
    for level, (tokens, sequences) in enumerate(chain, start=1):
        if sequences < MIN_SEQUENCES:
            break
        gain += tokens * (sequences - 1) - cost.part
        if gain > best_gain:
            best, best_gain = level, gain
    return best


class Sharing:
    """Sharing of prefixes for one model: installed at once, tried, and taken out if it fails.

    `on` says whether prefixes are held once; `why`, in a few words, the reason either way;
    `ragged`, whether sequences may take in unequal numbers of tokens in a step; `slow`, whether
    steps take longer than on copies, because each copies rows for every layer. `bits` are what a
    prefix's numbers are to take.
    """

    def __init__(
        self,
        model: Module,
        *,
        verdict: Verdict = ASSUMED,
        off: str = "",
        bits: int | None = None,
    ) -> None:
        """`verdict` is how the model may be batched; `off`, a reason not to try."""
        self.on, self.why, self.bits = False, off, bits
        self.ragged = self.slow = False
        self._quantized = "" if bits is None else f"; not in {bits} bits"
        if off:
            return
        self._installation = Installation(model)
        try:
            on, self.why = _tried(model, verdict, self._installation)
            self.ragged = on and _takes_ragged_steps(model, verdict)
            self.slow = on and bool(of_several(make_prompt_cache(model)))
            if on and bits is not None:
                self._quantized = _told(bits, *quantized(model, bits))
            self.on = on  # last: where the device fails at any of it, nothing stays installed
        finally:
            if not self.on:
                self._installation.remove()

    def __str__(self) -> str:
        way = "held once" if self.on else "copied into each sequence"
        if self.slow:
            way = (
                "copied into each sequence, which is quicker; held once where there is no memory "
                "for that"
            )
        return f"{way} ({self.why}){self._quantized}"

    def remove(self) -> None:
        """Puts mlx-lm's own attention back; sequences on shared prefixes cannot go on then."""
        if self.on:
            self.on, self.why = False, "removed"
            self._installation.remove()


def _told(bits: int, part: float, drift: float) -> str:
    if part >= 1:
        return f"; not in {bits} bits (no layer can be)"
    return (
        f"; in {bits} bits: {part:.0%} of the bytes, and log-probabilities drift by {drift:.2g} in "
        "a trial"
    )


def _tried(model: Module, verdict: Verdict, installation: Installation) -> tuple[bool, str]:
    """Compares sequences on a shared prefix with others on copies; says whether and why not."""
    caches = make_prompt_cache(model)
    sharing = sum(any(map(can_share, apart([cache]))) for cache in caches)
    if not sharing:
        return False, "no layer keeps plain keys and values of all tokens"
    if not installation.modules:
        return False, "the model does not use mlx-lm's attention function"
    try:
        against = objection(_disagreement(model, verdict), allowed=_ALLOWED)
    except FAILURES as error:
        return False, f"{type(error).__name__}: {error}"
    if against:
        return False, against
    return True, f"{sharing} of {len(caches)} layers"


def _takes_ragged_steps(model: Module, verdict: Verdict) -> bool:
    """Compares sequences that take in unequal numbers of tokens in a step with each alone."""
    if not all(can_share(cache) for cache in make_prompt_cache(model)):
        return False
    trial = Trial(model, equal=verdict.batching is Batching.EQUAL)
    prefix = trial.prefix()
    shared, _ = frozen(prefix)
    if any(part.latent for cache in apart(shared) for part in cache.chain):
        return False
    try:
        got = trial.ragged([referring(shared, 1), referring(shared, 0)])
        against = trial.disagreement(got, trial.ragged_alone(prefix))
    except FAILURES:
        return False
    return not objection(against)


def quantized(model: Module, bits: int) -> tuple[float, float]:
    """Says what part of the bytes a prefix takes in so many bits, and what that changes.

    By how much the log-probability of the likeliest token differs, on average: for sequences whose
    next tokens are random, on a prefix of random tokens.
    """
    some = probe_tokens(model)
    prompt, asked = some(1, _TRIED), some(_SEQUENCES_TRIED, 1)

    def tried(bits: int | None) -> tuple[int, mx.array]:
        caches = make_prompt_cache(model)
        model(prompt, cache=caches)
        prefix, nbytes = frozen(caches, bits=bits)
        referred = [referring(prefix, 1)] * _SEQUENCES_TRIED
        merged = [layers[0].merge(list(layers)) for layers in zip(*referred, strict=True)]
        logits = model(asked, cache=merged)[:, -1].astype(mx.float32)
        return nbytes, logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    (whole, exact), (fewer, got) = tried(None), tried(bits)
    likeliest = mx.argmax(exact, axis=-1, keepdims=True)
    drift = mx.abs(mx.take_along_axis(got - exact, likeliest, axis=-1)).mean()
    told: Any = drift.item()
    return fewer / whole, float(told)


def _disagreement(model: Module, verdict: Verdict) -> float:
    """How far logits on shared prefixes are from those on copies, in what is allowed.

    The prefixes are nested: one sequence refers to both, one copies the inner, one copies both.
    """
    trial = Trial(model, equal=verdict.batching is Batching.EQUAL)
    system, document = trial.parts
    upper = make_prompt_cache(model)
    model(mx.array([system]), cache=upper)
    outer, _ = frozen(upper)
    lower = built_on(outer)
    model(mx.array([document]), cache=lower)
    prefix, _ = frozen(lower, outer)
    copies = [built_on(prefix)] * trial.on_prefix
    expected = verdict.logits or trial.together(copies, make_prompt_cache)
    referred = [referring(prefix, levels) for levels in (2, 1, 0)]
    got = trial.together(referred, partial(sequence_caches, share=True))
    return trial.disagreement(got, expected)
