"""mlx-lm's BatchGenerator with some things of our own.

- All sequences are sampled in one call (`sampling.choose`), each by its own parameters. The stock
  step calls one sampler a sequence and normalises logits that nobody reads.
- Logprobs are of the model's own distribution, for the sequences that ask.
- Sequences may be constrained: one masking op for all of them, made while the forward pass runs.
  What a constraint decides beyond the next token goes with the next step (`kv/ragged.py`).
- A finished sequence gives up its KV at once: the stock response carries the sequence's cache, and
  keeping such responses keeps every prefix that they were copied from.
- Sequences may refer to a prefix whose KV the batch then holds once (`shared_cache`); all sequences
  of a batch have caches of that kind then, also those on no prefix.
- It says when it could take a prefill batch, so that the loop admits sequences together, not one by
  one.
- A forward pass prefills so many tokens over all sequences; the stock one takes as many of each.
- Drafted tokens are verified, where a sequence is alone (`verification.py`).
- Logits that are not finite raise NotFinite before anybody is given a token that they chose.
- Each row may have an adapter of its own (`kv/adapter_rows.py`).
- It does not wire all memory that the system recommends: kernels panicked under that (mlx#3186).

Written against mlx-lm 0.32 (`mlx_lm/generate.py`), whose class names and attributes it extends.
"""

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import (
    BatchGenerator,
    GenerationBatch,
    PromptProcessingBatch,
    StopSequences,
)
from mlx_lm.generate_utils import BatchCounters
from mlx_lm.models.cache import CacheList
from mlx_lm.sample_utils import greedy_sampler

from mlx_rq.engine.kv.adapter_rows import adapter_rows
from mlx_rq.engine.kv.layers import Caches
from mlx_rq.engine.kv.sharing import sequence_caches
from mlx_rq.engine.sampling.sampler import SequenceSampler
from mlx_rq.engine.scheduling.decode_batch import DecodeBatch

_ONE_PASS = 2**30
"""Tokens of a prompt: more than any has."""

_CLEAR_STEPS = 512
"""Decode steps after which buffers are given back that nobody uses, as the stock step does."""


class _PromptBatch(PromptProcessingBatch):
    """Sequences whose prompts are being prefilled; they go on as a DecodeBatch."""

    samplers: list[Any]
    """SequenceSamplers."""

    def prompt(self, tokens: list[list[int]]) -> None:
        with adapter_rows([sampler.adapter for sampler in self.samplers]):
            super().prompt(tokens)

    def generate(self, tokens: list[list[int]]) -> DecodeBatch:
        if any(len(sequence) > 1 for sequence in tokens):
            self.prompt([sequence[:-1] for sequence in tokens])
        batch = DecodeBatch(
            self.model,
            self.uids,
            mx.array([sequence[-1] for sequence in tokens], dtype=mx.uint32),
            self.prompt_cache,
            self.tokens,
            self.samplers,
            self.fallback_sampler,
            self.logits_processors,
            self.stop_sequences,
            self.max_tokens,
        )
        self.uids, self.prompt_cache, self.tokens = [], [], []
        self.samplers, self.logits_processors = [], []
        self.stop_sequences, self.max_tokens = [], []
        return batch


class SharingBatchGenerator(BatchGenerator):
    """Generates up to `batch_size` sequences at once; the module says what is not stock."""

    def __init__(
        self,
        model: Module,
        *,
        batch_size: int,
        counters: BatchCounters,
        share: bool = False,
        ragged: bool = False,
    ) -> None:
        """With `share`, sequences may refer to prefixes that they stand on (`kv/sharing.py`).

        With `ragged`, they may take in what constraints decide side by side (`kv/ragged.py`).
        """
        super().__init__(model, completion_batch_size=batch_size, prefill_batch_size=batch_size)
        if self._old_wired_limit is not None:
            mx.set_wired_limit(self._old_wired_limit)
            self._old_wired_limit = None
        self._counters = counters  # the caller's: seconds and steps
        self._share = share
        # A pass is cut to its size in `step`, and not once more in the batch.
        self._prompt_batch = _PromptBatch.empty(model, greedy_sampler, _ONE_PASS)
        self._generation_batch = DecodeBatch.empty(model, greedy_sampler)
        self._generation_batch.looks_ahead = True
        self._generation_batch.ragged = ragged

    def insert_sequences(
        self,
        prompts: Sequence[list[int]],
        *,
        samplers: Sequence[SequenceSampler],
        max_tokens: Sequence[int],
        end_tokens: Sequence[frozenset[int]],
        caches: Caches | None,
    ) -> list[int]:
        """Adds sequences that are to be prefilled together; returns their uids.

        `prompts` are the tokens that `caches` do not hold yet, at least one each. All sequences go
        on from the same ones, which are only read.
        """
        if (
            caches is None
        ):  # all sequences of a batch have caches of one kind, else they do not merge
            caches = sequence_caches(self.model, share=self._share)
        stops = {ends: StopSequences([(token,) for token in ends]) for ends in {*end_tokens}}
        uids: list[int] = self.insert(
            list(prompts),
            max_tokens=list(max_tokens),
            caches=[caches] * len(prompts),
            samplers=list(samplers),  # type: ignore[arg-type]
            stop_sequences=[stops[ends] for ends in end_tokens],
        )
        return uids

    def step(self, prefill_tokens: int) -> tuple[list[Any], list[GenerationBatch.Response]]:
        """Decodes a token of each sequence, and prefills so many tokens, all sequences together.

        Each sequence that is prefilled gets one token on, at least.
        """
        self.prefill_step_size = max(1, prefill_tokens // max(1, self.prefilling))
        told: tuple[list[Any], list[GenerationBatch.Response]] = self.next()  # type: ignore[no-untyped-call]
        return told

    @property
    def due(self) -> mx.array | None:
        """The token [1] of the one sequence that is decided and comes next; None before its first.

        It may not be computed yet.
        """
        tokens: mx.array | None = self._generation_batch._next_tokens
        return tokens if len(self._generation_batch) == 1 else None

    @property
    def caches(self) -> list[Any]:
        """The KV of the sequences that decode."""
        caches: list[Any] = self._generation_batch.prompt_cache
        return caches

    def verify(self, drafts: mx.array) -> list[GenerationBatch.Response]:
        """Decodes what is due of the one sequence, and those of `drafts` [any] that it accepts."""
        started = time.perf_counter()
        batch: Any = self._generation_batch
        responses: list[GenerationBatch.Response] = batch.verify(drafts)
        self._counters.decode_time += time.perf_counter() - started
        self._counters.generation_tokens += len(responses)
        self._counters.generation_steps += 1
        if self._counters.generation_steps % _CLEAR_STEPS == 0:
            mx.clear_cache()
        return responses

    @property
    def sequence_uids(self) -> list[int]:
        """The sequences by their uids, whether they are to be prefilled yet or decode."""
        unprocessed = [sequence[0] for sequence in self._unprocessed_sequences]
        return [*unprocessed, *self._prompt_batch.uids, *self._generation_batch.uids]

    @property
    def cached_sequences(self) -> set[int]:
        """How many sequences the layers' caches hold, those counted in that bring their own."""
        prefilling = {_sequences_in(cache) for cache in self._prompt_batch.prompt_cache} or {0}
        decoding = {_sequences_in(cache) for cache in self._generation_batch.prompt_cache} or {0}
        unprocessed = len(self._unprocessed_sequences)
        return {unprocessed + some + more for some in prefilling for more in decoding}

    @property
    def decoding(self) -> int:
        """Sequences whose first token is decided."""
        return len(self._generation_batch)

    @property
    def prefilling(self) -> int:
        """Sequences inserted whose first token is not decided yet."""
        return len(self._unprocessed_sequences) + len(self._prompt_batch)


def _sequences_in(cache: Any) -> int:
    """Counts the sequences in one layer's cache."""
    if isinstance(cache, CacheList):
        cache = cache.caches[0]
    offset = getattr(cache, "offset", None)
    return offset.shape[0] if isinstance(offset, mx.array) else int(cache.batch_size)
