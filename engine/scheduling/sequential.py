"""The fall-back for models that cannot be batched: one row at a time, the same answers.

Some models have caches that do not merge (chunked attention), or attention that is wrong or fails
over rows of different lengths. `can_batch` finds out when a model is loaded. Trunks still work: a
row goes on from a copy.
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

from mlx_rq.engine.kv.numerics import disagreement, probe_tokens
from mlx_rq.engine.kv.sharing import Caches
from mlx_rq.engine.sampling.logprobs import measure, read
from mlx_rq.engine.sampling.sampler import RowSampler, choose


def can_batch(model: Module) -> bool:
    """Tells whether rows of different lengths give the same logits together as each alone."""
    try:
        some = probe_tokens(model)
        prompts, last = (some(1, 5), some(1, 3)), some(2, 1)
        caches = [_prefilled(model, prompt) for prompt in prompts]
        merged = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
        together = model(last, cache=merged)
        alone = [model(last[row : row + 1], cache=each) for row, each in enumerate(caches)]
        return disagreement(together, mx.concatenate(alone)) < 1
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return False


def _prefilled(model: Module, prompt: mx.array) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    model(prompt, cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


@dataclass(slots=True)
class _SoloRow:
    uid: int
    prompt: list[int]
    sampler: RowSampler
    left: int
    end_tokens: frozenset[int]
    caches: list[Any]


class SoloGenerator:
    """Does what RowGenerator does, with one row at a time."""

    def __init__(self, model: Module, *, prefill_step: int, counters: BatchCounters) -> None:
        self._model = model
        self._prefill_step = prefill_step
        self._rows: deque[_SoloRow] = deque()
        self._uids = 0
        self._counters = counters

    def insert_rows(
        self,
        prompts: Sequence[list[int]],
        *,
        samplers: Sequence[RowSampler],
        max_tokens: Sequence[int],
        end_tokens: Sequence[frozenset[int]],
        caches: Caches | None,
    ) -> list[int]:
        """Adds rows; returns their uids. See RowGenerator."""
        uids = []
        for prompt, sampler, left, ends in zip(
            prompts, samplers, max_tokens, end_tokens, strict=True
        ):
            own = make_prompt_cache(self._model) if caches is None else copy.deepcopy(caches)
            self._rows.append(_SoloRow(self._uids, list(prompt), sampler, left, ends, own))
            uids.append(self._uids)
            self._uids += 1
        return uids

    def close(self) -> None:
        """Ends the generator. Here there is nothing to end."""

    def remove(self, uids: Sequence[int]) -> None:
        """Forgets rows."""
        self._rows = deque(row for row in self._rows if row.uid not in uids)

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of KV that the rows hold."""
        return sum(cache.nbytes for row in self._rows for cache in row.caches)

    @property
    def prefilling(self) -> int:
        """Rows whose first token is not decided yet."""
        return sum(len(row.prompt) > 1 for row in self._rows)

    def next(self) -> tuple[list[Any], list[GenerationBatch.Response]]:
        """Prefills a chunk of the first row's prompt, or decodes one token of it."""
        if not self._rows:
            return [], []
        row, started = self._rows[0], time.perf_counter()
        if len(row.prompt) > 1:
            chunk = row.prompt[: min(self._prefill_step, len(row.prompt) - 1)]
            self._model(mx.array([chunk]), cache=row.caches)
            mx.eval([cache.state for cache in row.caches])
            row.prompt = row.prompt[len(chunk) :]
            self._counters.prompt_time += time.perf_counter() - started
            return [], []
        logits = self._model(mx.array([row.prompt]), cache=row.caches)[:, -1, :]
        chosen = choose(logits, [row.sampler], mx.array(row.prompt))
        (measured,) = read(measure(logits, chosen, [row.sampler]))
        token = int(chosen.item())  # type: ignore[arg-type]
        row.sampler.take(token)  # in a batch, the next step has begun when a token is handed out
        row.prompt, row.left = [token], row.left - 1
        self._counters.decode_time += time.perf_counter() - started
        self._counters.generation_steps += 1
        reason = "stop" if token in row.end_tokens else "length" if row.left <= 0 else None
        if reason is not None:
            self._rows.popleft()
        told: Any = measured  # the stock class has an array there
        return [], [GenerationBatch.Response(row.uid, token, told, reason, None, None)]
