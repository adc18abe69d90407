"""The sequences that are being generated: the batch, the prefixes that they stand on, and their
memory.

The engine decides which sequences come in, and when; here is whether there is room for them, on
what they stand, and what a step makes of them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import finalize

from mlx.nn.layers.base import Module
from mlx_lm.generate_utils import BatchCounters

from mlx_rq.engine.interface import Totals
from mlx_rq.engine.kv.prefix_cache import CachedPrefix, Key, PrefixCache, key_of
from mlx_rq.engine.kv.sharing import Sharing
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.budget import KVBudget, referred_to
from mlx_rq.engine.scheduling.generator import SharingBatchGenerator
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequential import SequentialGenerator


class RunningBatch:
    """Sequences in the order in which they came in. What they compute is added to `totals`."""

    def __init__(
        self,
        model: Module,
        options: EngineOptions,
        totals: Totals,
        *,
        batches: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `batches`, sequences are generated one after the other."""
        self._model = model
        self._options = options
        self._totals = totals
        self._batches = batches
        self._sequences: dict[int, TokenSequence] = {}  # by the generator's uid
        self.memory = KVBudget(model, options.kv_bytes, options.reserve)
        off = "" if options.share_prefixes else "switched off"
        self.sharing = Sharing(model, off=off if batches else "sequences are not batched")
        finalize(self, self.sharing.remove)
        share_from = options.share_from if self.sharing.on else None
        self.prefix_cache = PrefixCache(
            model, chunk=options.chunk, share_from=share_from, clock=clock
        )
        self.counters = BatchCounters()  # they outlive a generator that an error ended
        self._generator = self._new_generator()

    def _new_generator(self) -> SharingBatchGenerator | SequentialGenerator:
        options = self._options
        if self._batches:
            return SharingBatchGenerator(
                self._model,
                batch_size=options.batch_size,
                prefill_step=options.chunk,
                counters=self.counters,
                share=self.sharing.on,
            )
        return SequentialGenerator(self._model, prefill_step=options.chunk, counters=self.counters)

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences.values())

    @property
    def takes_sequences(self) -> bool:
        """Whether those that came in before are prefilled, so that others may follow."""
        return not self._generator.prefilling

    def kv_in_use(self) -> tuple[int, int]:
        """Bytes of KV held now, and the least that would do: each token of prefixes and
        sequences once.
        """
        sequences = sum(len(sequence.tokens) - sequence.depth for sequence in self)
        least = self.memory.cost.bytes(1, sequences + self.prefix_cache.distinct_tokens)
        return self.prefix_cache.nbytes + self._generator.prompt_cache_nbytes, least

    def room_for(
        self, sequences: Sequence[TokenSequence], prefix: CachedPrefix | None, keep: frozenset[Key]
    ) -> tuple[int, CachedPrefix | None]:
        """Counts the sequences for which there is memory; says to what of their prefix they are to
        refer.

        Prefixes are evicted for them, except those to `keep`.
        """
        running = self._sequences.values()
        shared = self._worth_referring(prefix, len(sequences))
        room = self.memory.fitting(running, sequences, self.prefix_cache, keep, shared)
        if room < len(sequences) and shared is not prefix and self.sharing.on:
            shared = prefix  # slower than copies, but more sequences at once
            room = self.memory.fitting(running, sequences, self.prefix_cache, keep, shared)
        return room, shared

    def held_for(
        self, sequences: Sequence[TokenSequence]
    ) -> tuple[CachedPrefix | None, CachedPrefix | None]:
        """A prefix of an earlier window that a lone sequence begins with, and what of it to
        refer to.
        """
        if len(sequences) != 1:
            return None, None
        tokens = sequences[0].tokens
        prefix = self.prefix_cache.deepest(key_of(tokens), at_most=len(tokens) - 1)
        return prefix, self._worth_referring(prefix, 1)

    def _worth_referring(self, prefix: CachedPrefix | None, sequences: int) -> CachedPrefix | None:
        return self.prefix_cache.worth_referring(prefix, sequences, referred_to(self))

    def add(
        self,
        sequences: Sequence[TokenSequence],
        prefix: CachedPrefix | None,
        shared: CachedPrefix | None = None,
    ) -> None:
        """Takes sequences in that stand on `prefix`; of its KV, they refer to that of `shared`."""
        depth = 0 if prefix is None else prefix.depth
        suffixes = [sequence.tokens[depth:] for sequence in sequences]
        for sequence in sequences:
            sequence.depth, sequence.shared = depth, shared
            sequence.cached_tokens = min(depth, len(sequence.prompt))
        if prefix is not None:
            # The first to use a new prefix is the one that it was computed for.
            sequences[0].cached_tokens = max(0, sequences[0].cached_tokens - prefix.uncharged)
            self.prefix_cache.use(prefix, len(sequences))
        uids = self._generator.insert_sequences(
            suffixes,
            samplers=[sequence.sampler for sequence in sequences],
            max_tokens=[sequence.remaining for sequence in sequences],
            end_tokens=[sequence.end_tokens for sequence in sequences],
            caches=None if prefix is None else prefix.caches_for(shared),
        )
        self._sequences.update(zip(uids, sequences, strict=True))
        totals = self._totals
        totals.sequences_sharing += 0 if shared is None else len(sequences)
        totals.prompt_tokens += sum(
            len(one.prompt) for sequence in sequences for one in (sequence, *sequence.duplicates)
        )
        totals.prefilled_tokens += sum(map(len, suffixes))
        totals.positions_computed += len(sequences) * max(map(len, suffixes))

    def keep(self, asked_for: Callable[[TokenSequence], bool]) -> None:
        """Takes out the sequences whose answer nobody asks for, neither for itself nor for a
        duplicate.
        """
        for sequence in self:
            sequence.duplicates = [
                duplicate for duplicate in sequence.duplicates if asked_for(duplicate)
            ]
        gone = [
            uid
            for uid, sequence in self._sequences.items()
            if not sequence.duplicates and not asked_for(sequence)
        ]
        self._take_out(gone)

    def _take_out(self, uids: Sequence[int]) -> list[TokenSequence]:
        if uids:
            self._generator.remove(uids)
        return self._let_go(uids)

    def _let_go(self, uids: Sequence[int]) -> list[TokenSequence]:
        sequences = [self._sequences.pop(uid) for uid in uids]
        for sequence in sequences:
            sequence.shared = None  # else the prefix's memory would be held as long as the task
        return sequences

    def make_room(self) -> list[TokenSequence]:
        """Takes out the sequences that the memory is too small for by now, the newest first."""
        out = []
        while self.memory.outgrown(self._sequences.values(), self.prefix_cache):
            (sequence,) = self._take_out([max(self._sequences)])
            sequence.sampler.rewind(sequence.text.tokens)
            out.append(sequence)
        self._totals.sequences_preempted += len(out)
        return out

    def decode(self) -> list[TokenSequence]:
        """Does one decode step, beside a piece of prefill; returns the sequences that ended by
        it.
        """
        _, responses = self._generator.next()
        finished: list[int] = []
        stopped: list[int] = []
        for response in responses:
            sequence = self._sequences[response.uid]
            self._totals.decoded_tokens += 1
            sequence.finish_reason = response.finish_reason
            measured: Any = response.logprobs  # ours: TokenLogprobs, or None
            # A stop token is not part of the text; the last token of a spent budget is.
            if response.finish_reason != "stop" and sequence.add(response.token, measured):
                sequence.finish_reason = "stop"
                if response.finish_reason is None:
                    stopped.append(response.uid)
                    continue
            if sequence.finish_reason is not None:
                finished.append(response.uid)
        return self._let_go(finished) + self._take_out(stopped)

    def give_up(self) -> None:
        """Forgets all sequences, with the KV that an error may have left half written."""
        self._let_go(list(self._sequences))
        self._generator.close()  # first: it puts back the wired limit that the next one sets
        self._generator = self._new_generator()
        self.prefix_cache.abandon()
