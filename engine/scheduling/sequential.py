"""The fall-back for models that cannot be batched: one sequence at a time, the same answers.

Some models have caches that do not merge (chunked attention), or attention that is wrong or fails
over sequences of different lengths; `kv/trial.py` finds out when a model is loaded. Prefixes still
work: a sequence goes on from a copy.
"""

import copy
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import GenerationBatch
from mlx_lm.generate_utils import BatchCounters
from mlx_lm.models.cache import make_prompt_cache

from mlx_rq.engine.kv.layers import Caches
from mlx_rq.engine.models.device import NotFinite, finite_rows
from mlx_rq.engine.sampling.logprobs import Pending, TokenLogprobs, measure, read
from mlx_rq.engine.sampling.sampler import SequenceSampler, choose
from mlx_rq.engine.scheduling.verification import Verification

_MOST_AHEAD = 63
"""Tokens that a step takes in beside the due one, where they have to follow it."""

_CLEAR_STEPS = 256
"""Decode steps after which the buffers are given back that nobody uses: they grow with the KV."""


@dataclass(slots=True)
class _Sequence:
    uid: int
    prompt: list[int]
    sampler: SequenceSampler
    left: int
    end_tokens: frozenset[int]
    caches: list[Any]
    launched: "_Launched | None" = None


@dataclass(frozen=True, slots=True)
class _Launched:
    """A token that is being computed, with its logprob where it is asked for."""

    token: mx.array
    ahead: Sequence[int]
    """The tokens that have to follow it."""
    measured: Pending | None
    finite: mx.array
    """Whether it was chosen by numbers."""


class SequentialGenerator:
    """Does what SharingBatchGenerator does, with one sequence at a time."""

    stream: Any = None
    """What it computes on: the default."""

    def __init__(self, model: Module, *, counters: BatchCounters) -> None:
        self._model = model
        self._sequences: deque[_Sequence] = deque()
        self._uids = 0
        self._counters = counters

    def insert_sequences(
        self,
        prompts: Sequence[list[int]],
        *,
        samplers: Sequence[SequenceSampler],
        max_tokens: Sequence[int],
        end_tokens: Sequence[frozenset[int]],
        caches: Caches | None,
    ) -> list[int]:
        """Adds sequences; returns their uids. See SharingBatchGenerator."""
        uids = []
        for prompt, sampler, left, ends in zip(
            prompts, samplers, max_tokens, end_tokens, strict=True
        ):
            own = make_prompt_cache(self._model) if caches is None else copy.deepcopy(caches)
            self._sequences.append(_Sequence(self._uids, list(prompt), sampler, left, ends, own))
            uids.append(self._uids)
            self._uids += 1
        return uids

    def remove(self, uids: Sequence[int]) -> None:
        """Forgets sequences."""
        self._sequences = deque(
            sequence for sequence in self._sequences if sequence.uid not in uids
        )

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of KV that the sequences hold."""
        return sum(cache.nbytes for sequence in self._sequences for cache in sequence.caches)

    @property
    def sequence_uids(self) -> list[int]:
        """The sequences by their uids."""
        return [sequence.uid for sequence in self._sequences]

    @property
    def cached_sequences(self) -> set[int]:
        """How many sequences there are caches of."""
        return {len(self._sequences)}

    @property
    def prefilling(self) -> int:
        """Sequences whose first token is not decided yet."""
        return sum(len(sequence.prompt) > 1 for sequence in self._sequences)

    @property
    def decoding(self) -> int:
        """Sequences whose first token is decided, or decided next."""
        return sum(len(sequence.prompt) == 1 for sequence in self._sequences)

    @property
    def due(self) -> mx.array | None:
        """The first sequence's token [1] that is decided and comes next; None before its first."""
        launched = self._sequences[0].launched if self._sequences else None
        return None if launched is None else launched.token

    @property
    def caches(self) -> list[Any]:
        """The KV of the first sequence."""
        return self._sequences[0].caches

    def verify(self, drafts: mx.array) -> list[GenerationBatch.Response]:
        """Decodes what is due of the first sequence, and those of `drafts` that it accepts."""
        sequence, started = self._sequences[0], time.perf_counter()
        this = sequence.launched
        assert this is not None, "nothing is due yet"
        launched = Verification(self._model, sequence.caches, this.token, drafts, sequence.sampler)
        if not this.finite.item():
            raise NotFinite([sequence.uid])
        tokens, due, finite = launched.read()
        sequence.launched = _Launched(due, (), None, finite)
        responses = self._hand_out(sequence, tokens, None)
        self._took_step(started, responses)
        return responses

    def step(self, prefill_tokens: int) -> tuple[list[Any], list[GenerationBatch.Response]]:
        """Prefills some of the first sequence's prompt, or decodes one token of it."""
        if not self._sequences:
            return [], []
        sequence, started = self._sequences[0], time.perf_counter()
        if len(sequence.prompt) > 1:
            chunk = sequence.prompt[: min(max(1, prefill_tokens), len(sequence.prompt) - 1)]
            self._model(mx.array([chunk]), cache=sequence.caches)
            mx.eval([cache.state for cache in sequence.caches])
            mx.clear_cache()
            sequence.prompt = sequence.prompt[len(chunk) :]
            self._counters.prompt_time += time.perf_counter() - started
            self._counters.prompt_tokens += len(chunk)
            return [], []
        responses = self._decoded(sequence)
        self._took_step(started, responses)
        return [], responses

    def _took_step(self, started: float, responses: list[GenerationBatch.Response]) -> None:
        """Counts a decode step, and lets go of the sequence that ends by it."""
        self._counters.decode_time += time.perf_counter() - started
        self._counters.generation_steps += 1
        if self._counters.generation_steps % _CLEAR_STEPS == 0:
            mx.clear_cache()
        if responses[-1].finish_reason is not None:
            self._sequences.popleft()

    def _decoded(self, sequence: _Sequence) -> list[GenerationBatch.Response]:
        """Launches the next token, then reads this one while that runs."""
        sampler = sequence.sampler
        this = sequence.launched or self._launch(sequence, mx.array(sequence.prompt))
        left = sequence.left - 1 - len(this.ahead)
        sequence.launched = None
        if left > 0:
            sequence.launched = self._launch(sequence, this.token, this.ahead, left)
        token = int(this.token.item())  # type: ignore[arg-type]
        if not this.finite.item():
            raise NotFinite([sequence.uid])
        if sequence.launched is None:  # else the next token's choice has taken them in
            sampler.take(token)
            sampler.take_ahead(this.ahead)
        return self._hand_out(sequence, [token, *this.ahead], read([this.measured])[0])

    def _hand_out(
        self, sequence: _Sequence, tokens: Sequence[int], logprobs: TokenLogprobs | None
    ) -> list[GenerationBatch.Response]:
        """Says what tokens are to their sequence, up to the one that ends it."""
        told: Any = logprobs  # the stock class has an array there
        responses = []
        for token in tokens:
            sequence.left -= 1
            sequence.prompt = [token]
            reason = "length" if sequence.left <= 0 else None
            if token in sequence.end_tokens:
                reason = "stop"
            responses.append(
                GenerationBatch.Response(sequence.uid, token, told, reason, None, None)
            )
            if reason is not None:
                break
        return responses

    def _launch(
        self, sequence: _Sequence, last: mx.array, forced: Sequence[int] = (), left: int = 0
    ) -> _Launched:
        """Launches the token that follows the last one [1], which may not be computed yet.

        `forced` had to follow that; `left` tokens may be generated, the launched one counted in.
        """
        inputs = mx.concatenate([last, mx.array(list(forced), last.dtype)]) if forced else last
        logits = self._model(inputs[None], cache=sequence.caches)[:, -1, :]
        token = choose(logits, [sequence.sampler], last, [forced])
        finite = finite_rows(logits)
        mx.async_eval(token, finite)
        (measured,) = measure(logits, token, [sequence.sampler])
        ahead = sequence.sampler.ahead(min(_MOST_AHEAD, left - 1))
        return _Launched(token, ahead, measured, finite)
