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

from mlx_rq.engine.kv.sharing import Caches
from mlx_rq.engine.sampling.logprobs import measure, read
from mlx_rq.engine.sampling.sampler import SequenceSampler, choose


@dataclass(slots=True)
class _Sequence:
    uid: int
    prompt: list[int]
    sampler: SequenceSampler
    left: int
    end_tokens: frozenset[int]
    caches: list[Any]


class SequentialGenerator:
    """Does what SharingBatchGenerator does, with one sequence at a time."""

    def __init__(self, model: Module, *, prefill_step: int, counters: BatchCounters) -> None:
        self._model = model
        self._prefill_step = prefill_step
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

    def close(self) -> None:
        """Ends the generator. Here there is nothing to end."""

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

    def next(self) -> tuple[list[Any], list[GenerationBatch.Response]]:
        """Prefills a chunk of the first sequence's prompt, or decodes one token of it."""
        if not self._sequences:
            return [], []
        sequence, started = self._sequences[0], time.perf_counter()
        if len(sequence.prompt) > 1:
            chunk = sequence.prompt[: min(self._prefill_step, len(sequence.prompt) - 1)]
            self._model(mx.array([chunk]), cache=sequence.caches)
            mx.eval([cache.state for cache in sequence.caches])
            sequence.prompt = sequence.prompt[len(chunk) :]
            self._counters.prompt_time += time.perf_counter() - started
            return [], []
        logits = self._model(mx.array([sequence.prompt]), cache=sequence.caches)[:, -1, :]
        chosen = choose(logits, [sequence.sampler], mx.array(sequence.prompt))
        (measured,) = read(measure(logits, chosen, [sequence.sampler]))
        token = int(chosen.item())  # type: ignore[arg-type]
        sequence.sampler.take(
            token
        )  # in a batch, the next step has begun when a token is handed out
        sequence.prompt, sequence.left = [token], sequence.left - 1
        self._counters.decode_time += time.perf_counter() - started
        self._counters.generation_steps += 1
        reason = (
            "stop" if token in sequence.end_tokens else "length" if sequence.left <= 0 else None
        )
        if reason is not None:
            self._sequences.popleft()
        told: Any = measured  # the stock class has an array there
        return [], [GenerationBatch.Response(sequence.uid, token, told, reason, None, None)]
