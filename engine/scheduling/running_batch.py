"""The batch: the sequences that are being generated, the prefixes below them, and their memory.

The engine decides which sequences come in, and when; here is whether there is room for them, on
what they stand, and what a step makes of them. Who comes and goes is said by `SequenceTable` alone.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any
from weakref import finalize

from mlx.nn.layers.base import Module
from mlx_lm.generate import GenerationBatch
from mlx_lm.generate_utils import BatchCounters

from mlx_rq.engine.interface import Totals
from mlx_rq.engine.kv.cached_prefix import CachedPrefix
from mlx_rq.engine.kv.prefix_cache import NextUse, PrefixCache, no_use
from mlx_rq.engine.kv.prefix_key import TOKEN_BYTES, Key
from mlx_rq.engine.kv.sharing import Sharing
from mlx_rq.engine.kv.trial import ASSUMED, Batching, Verdict
from mlx_rq.engine.models.device import Device, settle, tried
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.budget import KVBudget, referred_to
from mlx_rq.engine.scheduling.distinct_tokens import DistinctTokens
from mlx_rq.engine.scheduling.drafting import Drafting
from mlx_rq.engine.scheduling.generator import SharingBatchGenerator
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequential import SequentialGenerator

logger = logging.getLogger("mlx_rq.engine")

_NEVER = 2**62
"""Tokens: more than any step could spare."""


class RunningBatch:
    """Sequences in the order in which they came in. What they compute is added to `totals`."""

    def __init__(
        self,
        model: Module,
        options: EngineOptions,
        totals: Totals,
        *,
        device: Device,
        verdict: Verdict = ASSUMED,
        drafting: Drafting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`verdict` says which sequences of the model may be computed together.

        `drafting` decodes a sequence that runs alone.
        """
        self._model = model
        self._options = options
        self._distinct = DistinctTokens()
        self._totals = totals
        self._batches = verdict.batching is not Batching.ALONE
        self._device = device
        self._sequences: dict[int, TokenSequence] = {}  # by the generator's uid
        self.drafting = drafting
        beside = [] if drafting is None else [drafting.model]
        self.memory = KVBudget(model, options.kv_bytes, options.reserve, device, beside)
        off = "" if options.share_prefixes else "switched off"
        off = off if self._batches else "sequences are not batched"
        failed = Sharing(model, off="the device failed when it was tried")
        self.sharing = tried(
            device,
            lambda: Sharing(model, verdict=verdict, off=off, bits=options.kv_bits),
            failed,
            "sharing",
        )
        self.memory.ragged = self.sharing.ragged
        finalize(self, self.sharing.remove)
        if options.kv_bits is not None:
            logger.warning("prefixes are %s", self.sharing)
        share_from = options.share_from if self.sharing.on else None
        if self.sharing.slow:
            share_from = _NEVER  # but where there is no memory for copies
        self.prefix_cache = PrefixCache(
            model, chunk=options.chunk, share_from=share_from, bits=options.kv_bits, clock=clock
        )
        self._clock = clock
        self._origin = 0
        """What `prefilled` was when the latest that came in had no token yet."""
        self.counters = BatchCounters()  # they outlive a generator that an error ended
        self._generator = self._new_generator()

    def _new_generator(self) -> SharingBatchGenerator | SequentialGenerator:
        options = self._options
        if self._batches:
            return SharingBatchGenerator(
                self._model,
                batch_size=options.batch_size,
                counters=self.counters,
                share=self.sharing.on,
                ragged=self.sharing.ragged,
            )
        return SequentialGenerator(self._model, counters=self.counters)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences.values())

    @property
    def uids(self) -> list[int]:
        """The generator's names of the sequences."""
        return list(self._sequences)

    @property
    def generator_uids(self) -> list[int]:
        """The names of the sequences that the generator has by its own account."""
        return self._generator.sequence_uids

    @property
    def cached_sequences(self) -> set[int]:
        """How many sequences the layers' caches hold: the same number in all of them."""
        return self._generator.cached_sequences

    @property
    def takes_sequences(self) -> bool:
        """Whether those that came in before are prefilled, so that others may follow."""
        return not self._generator.prefilling

    @property
    def decoding(self) -> int:
        """Sequences whose prompts are prefilled."""
        return self._generator.decoding

    @property
    def prefilled(self) -> int:
        """Prompt tokens that were computed so far."""
        return self.prefix_cache.prefilled_tokens + self.counters.prompt_tokens

    @property
    def reach(self) -> int:
        """Tokens whose KV is there of what is computed alone: of a prefix, or of one sequence."""
        if self.prefix_cache.broken_off:
            return self.prefix_cache.reach
        if self.decoding:
            return max(sequence.length for sequence in self)
        return self.prefilled - self._origin

    @property
    def computed(self) -> Totals:
        """The totals, with what the prefix cache and the generator count themselves."""
        totals, prefix_cache, counters = self._totals, self.prefix_cache, self.counters
        return replace(
            totals,
            distinct_tokens=self._distinct.count,
            prefilled_tokens=totals.prefilled_tokens + prefix_cache.prefilled_tokens,
            positions_computed=totals.positions_computed + prefix_cache.prefilled_tokens,
            prefill_seconds=counters.prompt_time + prefix_cache.prefill_seconds,
            decode_seconds=counters.decode_time,
            decode_steps=counters.generation_steps,
            prefixes_held=len(prefix_cache),
            prefix_bytes=prefix_cache.nbytes,
            prefixes_evicted=prefix_cache.evicted,
        )

    def kv_in_use(self) -> tuple[int, int]:
        """Bytes of KV held now, and the least that would do: each token held once."""
        sequences = sum(len(sequence.tokens) - sequence.depth for sequence in self)
        least = self.memory.cost.bytes(1, sequences + self.prefix_cache.distinct_tokens)
        return self.prefix_cache.nbytes + self._generator.prompt_cache_nbytes, least

    def room_for(
        self,
        sequences: Sequence[TokenSequence],
        prefix: CachedPrefix | None,
        next_use: NextUse = no_use,
    ) -> tuple[int, CachedPrefix | None]:
        """Counts the sequences that there is memory for; says to what of `prefix` they refer.

        Prefixes are evicted for them, except those of `next_use`.
        """
        running = self._sequences.values()
        shared = self._worth_referring(prefix, len(sequences))
        room = self.memory.fitting(running, sequences, self.prefix_cache, next_use, shared)
        if room < len(sequences) and shared is not prefix and self.sharing.on:
            shared = prefix  # slower than copies, but more sequences at once
            room = self.memory.fitting(running, sequences, self.prefix_cache, next_use, shared)
        return room, shared

    def may_build(self, key: Key, next_use: NextUse) -> bool:
        """Says whether a prefix is held, or there is memory to compute it beside those that run."""
        if self.prefix_cache.holds(key):
            return True
        tokens, running = len(key) // TOKEN_BYTES, self._sequences.values()
        return self.memory.may_build(tokens, running, self.prefix_cache, next_use)

    def held_for(
        self, sequences: Sequence[TokenSequence]
    ) -> tuple[CachedPrefix | None, CachedPrefix | None]:
        """An earlier window's prefix that a lone sequence begins with; what of it to refer to."""
        if len(sequences) != 1:
            return None, None
        key = sequences[0].key
        prefix = self.prefix_cache.deepest(key, at_most=len(key) // TOKEN_BYTES - 1)
        return prefix, self._worth_referring(prefix, 1)

    def _worth_referring(self, prefix: CachedPrefix | None, sequences: int) -> CachedPrefix | None:
        return self.prefix_cache.worth_referring(prefix, sequences, referred_to(self))

    def add(
        self,
        sequences: Sequence[TokenSequence],
        prefix: CachedPrefix | None,
        shared: CachedPrefix | None = None,
    ) -> None:
        """Prefills sequences that stand on `prefix`; of its KV, they refer to that of `shared`."""
        depth = 0 if prefix is None else prefix.depth
        suffixes = [sequence.tokens[depth:] for sequence in sequences]
        uids = self._generator.insert_sequences(
            suffixes,
            samplers=[sequence.sampler for sequence in sequences],
            max_tokens=[sequence.remaining for sequence in sequences],
            end_tokens=[sequence.end_tokens for sequence in sequences],
            caches=None if prefix is None else prefix.caches_for(shared),
        )
        self._sequences.update(zip(uids, sequences, strict=True))
        self._origin = self.prefilled - depth
        now = self._clock()
        for sequence in sequences:
            self._distinct.add(memoryview(sequence.beginning).cast("I"))
            if sequence.admitted_at is None:
                sequence.admitted_at = now
        totals = self._totals
        totals.sequences_sharing += 0 if shared is None else len(sequences)
        totals.prefilled_tokens += sum(map(len, suffixes))
        totals.positions_computed += len(sequences) * max(map(len, suffixes))

    def adapted(self, adapter: str) -> None:
        """Evicts all prefixes, now that the model computes other KV than it did for them."""
        self.prefix_cache.abandon()
        self.prefix_cache.evict_all()
        self._distinct.of = adapter
        if self.drafting is not None:
            self.drafting.restart()

    def remove(self, sequences: Sequence[TokenSequence]) -> None:
        """Takes sequences out of the batch, and their KV out of the memory."""
        uids = [uid for uid, sequence in self._sequences.items() if sequence in sequences]
        if uids:
            self._generator.remove(uids)
        for uid in uids:
            del self._sequences[uid]

    def outgrown(self, next_use: NextUse = no_use) -> bool:
        """Whether sequences have to make room, though every prefix were evicted."""
        return self.memory.outgrown(self._sequences.values(), self.prefix_cache, next_use)

    def evict(self, excess: int, next_use: NextUse) -> bool:
        """Evicts prefixes of so many bytes, or all that no sequence refers to; says if any went."""
        cache, in_use = self.prefix_cache, referred_to(self)
        before = cache.evicted
        if not cache.evict(max(0, cache.nbytes - excess), next_use=next_use, in_use=in_use):
            cache.evict_all(in_use=in_use)
        return cache.evicted > before

    @property
    def newest(self) -> TokenSequence:
        """The sequence that came in last."""
        return self._sequences[max(self._sequences)]

    def named(self, uids: Collection[int]) -> list[TokenSequence]:
        """Gives the sequences that the generator calls so."""
        return [self._sequences[uid] for uid in uids if uid in self._sequences]

    def decode(self, prefill_tokens: int, *, alone: bool = False) -> list[TokenSequence]:
        """Decodes a step, beside a piece of prefill; lets go of the sequences that end by it.

        That is a token of each, and what has to follow it. `alone`: nobody is to join the one
        sequence that runs, if it is one; it may be drafted for.
        """
        finished: list[int] = []  # by the generator, which has let go of them
        stopped: list[int] = []
        for response in self._step(prefill_tokens, alone):
            if response.uid in stopped:
                continue  # at a stop string before it, in what was drafted or had to follow
            self._totals.decoded_tokens += 1
            measured: Any = response.logprobs  # ours: TokenLogprobs, or None
            sequence, reason = self._sequences[response.uid], response.finish_reason
            if sequence.first_token_at is None:
                sequence.first_token_at = self._clock()
            if sequence.add(response.token, measured, reason):
                (stopped if reason is None else finished).append(response.uid)
        if stopped:
            self._generator.remove(stopped)
        return [self._sequences.pop(uid) for uid in finished + stopped]

    def _step(self, prefill_tokens: int, alone: bool) -> list[GenerationBatch.Response]:
        """Computes the tokens that are due, and more of a sequence that is drafted for."""
        drafting = self.drafting
        if drafting is None:
            return self._generator.step(prefill_tokens)[1]
        if alone and len(self) == 1 == self.decoding:
            (sequence,) = self
            if self.memory.has_room(drafting.bytes(sequence), sequence, self.prefix_cache):
                return drafting.step(self._generator, sequence, prefill_tokens)
        drafting.forget()
        return self._generator.step(prefill_tokens)[1]

    def abandon(self) -> None:
        """Forgets all sequences, with the KV that an error may have left half written."""
        self._sequences.clear()
        stream, self._generator = self._generator.stream, self._new_generator()
        self.prefix_cache.abandon()
        if self.drafting is not None:
            self.drafting.forget()
        settle(self._device, stream)
