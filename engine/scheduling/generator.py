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
from collections.abc import Mapping, Sequence
from operator import add, sub
from types import MappingProxyType
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
from mlx_rq.engine.kv.ragged import longest_run, ragged_step
from mlx_rq.engine.kv.sharing import sequence_caches
from mlx_rq.engine.models.device import NotFinite, finite_rows
from mlx_rq.engine.sampling.logprobs import Pending, TokenLogprobs, measure, read
from mlx_rq.engine.sampling.sampler import SequenceSampler, choose
from mlx_rq.engine.scheduling.verification import Verification

_ONE_PASS = 2**30
"""Tokens of a prompt: more than any has."""

_MOST_POSITIONS = 64
"""Tokens of all sequences in a step, as attention sees them: padded to the most of one."""

_CLEAR_STEPS = 512
"""Decode steps after which buffers are given back that nobody uses, as the stock step does."""


class _DecodeBatch(GenerationBatch):
    """Sequences that decode together; their samplers are SequenceSamplers."""

    samplers: list[SequenceSampler]  # type: ignore[assignment]
    _next_logprobs: list[Pending | None]
    _unchecked: tuple[tuple[list[int], mx.array], ...] = ()
    """Uids, and whether the logits were finite by which their next tokens were chosen."""
    looks_ahead = False
    ragged = False
    """Whether it computes several tokens of a sequence in a step: at all; of some among others."""
    _ahead: Mapping[int, Sequence[int]] = MappingProxyType({})
    """By uid: the tokens that have to follow the one that is due."""

    def _step(self) -> tuple[list[list[int]], list[TokenLogprobs | None]]:  # type: ignore[override]
        """Launches the next step, then reads the tokens of this one while it runs."""
        inputs: mx.array = self._next_tokens
        self._current_tokens: Any = inputs
        ahead = [self._ahead.get(uid, ()) for uid in self.uids]
        logits = self._logits(inputs, ahead)
        finite = finite_rows(logits)
        if any(sampler.remembers for sampler in self.samplers):
            mx.async_eval(logits, finite)
            self._check()  # before a constraint takes in a token that logits of no numbers chose
        self._next_tokens = choose(logits, self.samplers, inputs, ahead)
        mx.async_eval(self._next_tokens, finite)
        self._check()
        self._unchecked = ((list(self.uids), finite),)
        measured, self._next_logprobs = (
            self._next_logprobs,
            measure(logits, self._next_tokens, self.samplers),
        )
        due: list[int] = inputs.tolist()  # type: ignore[assignment]
        tokens = [[token, *forced] for token, forced in zip(due, ahead, strict=True)]
        for sequence, more in zip(self.tokens, tokens, strict=True):
            sequence += more
        self._look_ahead([len(more) for more in tokens])
        return tokens, read(measured)

    def _logits(self, inputs: mx.array, ahead: Sequence[Sequence[int]]) -> mx.array:
        """Gives the logits [rows, vocabulary] behind the due tokens [rows] and what has to follow.

        Packed tokens are rows of their own; a row that is alone takes them in one after the other.
        """
        adapters = [sampler.adapter for sampler in self.samplers]
        forced = [token for tokens in ahead for token in tokens]
        tokens = mx.concatenate([inputs, mx.array(forced, mx.uint32)]) if forced else inputs
        if len(adapters) == 1:
            with adapter_rows(adapters):
                return self.model(tokens[None], cache=self.prompt_cache)[:, -1, :]  # type: ignore[no-any-return]
        if not forced:
            with adapter_rows(adapters):
                return self.model(tokens[:, None], cache=self.prompt_cache)[:, -1, :]  # type: ignore[no-any-return]
        counts = [1 + len(tokens) for tokens in ahead]
        for adapter, tokens_ahead in zip(adapters[:], ahead, strict=True):
            adapters += [adapter] * len(tokens_ahead)
        with adapter_rows(adapters), ragged_step(self.prompt_cache, counts) as step:
            return self.model(tokens[:, None], cache=self.prompt_cache)[:, -1, :][step.last]  # type: ignore[no-any-return]

    def _look_ahead(self, taken: Sequence[int]) -> None:
        """Finds the tokens that have to follow those that were chosen just now.

        `taken` tokens of each sequence are about to be handed out.
        """
        self._ahead = {}
        if not self.looks_ahead or (len(self) > 1 and not self.ragged):
            return
        most = _MOST_POSITIONS // len(self) - 1
        left = map(sub, self.max_tokens, map(add, self._num_tokens, taken))
        runs = [
            sampler.ahead(min(most, room - 1))
            for sampler, room in zip(self.samplers, left, strict=True)
        ]
        if longest := longest_run(list(map(len, runs))):
            self._ahead = {uid: run[:longest] for uid, run in zip(self.uids, runs, strict=True)}

    def next(self) -> list[GenerationBatch.Response]:
        """Decodes the token that is due of each sequence, and those that had to follow."""
        if not self.uids:
            return []
        tokens, logprobs = self._step()
        responses = [self._hand_out(row, more, logprobs[row]) for row, more in enumerate(tokens)]
        ended = [row[-1].finish_reason is not None for row in responses]
        if any(ended):
            self.filter([row for row, over in enumerate(ended) if not over])
        return [response for row in responses for response in row]

    def _hand_out(
        self, row: int, tokens: Sequence[int], logprobs: TokenLogprobs | None
    ) -> list[GenerationBatch.Response]:
        """Says what tokens are to their sequence, up to the one that ends it."""
        responses = []
        told: Any = logprobs  # the stock class has an array there
        for token in tokens:
            self._num_tokens[row] += 1
            reason = "length" if self._num_tokens[row] >= self.max_tokens[row] else None
            if self._matchers[row].advance(token):
                reason = "stop"
            responses.append(self.Response(self.uids[row], token, told, reason, None, None))
            if reason is not None:
                break
        return responses

    def _check(self) -> None:
        """Raises NotFinite where the tokens to be handed out next were chosen by no numbers.

        What would have followed the end of a sequence is handed out to nobody.
        """
        unchecked, self._unchecked = self._unchecked, ()
        said = [zip(uids, finite.tolist(), strict=True) for uids, finite in unchecked]  # type: ignore[arg-type]
        bad = {uid for rows in said for uid, is_finite in rows if not is_finite}
        if bad := bad.intersection(self.uids):
            raise NotFinite(sorted(bad))

    def verify(self, drafts: mx.array) -> list[GenerationBatch.Response]:
        """Decodes the one sequence's due token, and the drafted ones that it chooses itself."""
        (sampler,) = self.samplers
        launched = Verification(self.model, self.prompt_cache, self._next_tokens, drafts, sampler)
        self._check()
        tokens, self._next_tokens, finite = launched.read()
        self._unchecked = ((list(self.uids), finite),)
        self.tokens[0] += tokens
        responses = self._hand_out(0, tokens, None)
        if responses[-1].finish_reason is not None:
            self.filter([])
        return responses

    def extend(self, batch: GenerationBatch) -> None:
        super().extend(batch)  # type: ignore[no-untyped-call]
        assert isinstance(batch, _DecodeBatch)
        self._unchecked += batch._unchecked
        if not self.ragged:
            self._ahead = {}  # nothing is lost: they are found again, one by one

    def extract_cache(self, idx: int) -> list[Any]:
        """Gives no cache with a finished sequence: nobody continues it."""
        return []


class _PromptBatch(PromptProcessingBatch):
    """Sequences whose prompts are being prefilled; they go on as a _DecodeBatch."""

    samplers: list[Any]
    """SequenceSamplers."""

    def prompt(self, tokens: list[list[int]]) -> None:
        with adapter_rows([sampler.adapter for sampler in self.samplers]):
            super().prompt(tokens)

    def generate(self, tokens: list[list[int]]) -> _DecodeBatch:
        if any(len(sequence) > 1 for sequence in tokens):
            self.prompt([sequence[:-1] for sequence in tokens])
        batch = _DecodeBatch(
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
        self._generation_batch = _DecodeBatch.empty(model, greedy_sampler)
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
