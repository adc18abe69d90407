"""Speculative decoding, for a sequence that runs alone: a small model drafts what it may say next.

A step of one sequence reads all the weights for a single token; verifying a few drafted ones takes
hardly longer (`verification.py`), and a batch has no such time to spare. So drafts are used while
nobody else runs or waits to join, and only where they are measured to be faster (`DraftRate`).
"""

import logging
from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import GenerationBatch
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from mlx_rq.engine.interface import Totals
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.sampling.draw import draw
from mlx_rq.engine.sampling.params import SamplingParams
from mlx_rq.engine.sampling.sampler import SequenceSampler
from mlx_rq.engine.scheduling.budget import measure_kv
from mlx_rq.engine.scheduling.draft_rate import DraftRate
from mlx_rq.engine.scheduling.generator import SharingBatchGenerator
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequential import SequentialGenerator
from mlx_rq.engine.scheduling.verification import room

logger = logging.getLogger("mlx_rq.engine")

_FIRST, _MOST = 4, 8
"""Tokens that are drafted in a step: at first, and at most."""

_CHUNK = 256
"""Tokens of a prompt that the draft model takes in beside one plain step of the model."""


class Drafter:
    """A draft model, and its KV of the one sequence that it drafts for."""

    def __init__(self, draft: LoadedModel, vocabulary: int) -> None:
        """`vocabulary` is how many tokens the model knows that is drafted for."""
        self._model: Module = draft.model
        self._context = draft.context_length
        self._vocabulary, self._own_vocabulary = vocabulary, draft.vocab_size
        self.cost = measure_kv(draft.model)
        self.forget()

    def forget(self) -> None:
        """Gives the KV back."""
        self._sequence: TokenSequence | None = None
        self._caches = make_prompt_cache(self._model)
        self._known = 0
        """Tokens of the sequence that the KV holds, the guessed ones not counted in."""
        self._guessed: list[int] = []

    def follow(self, sequence: TokenSequence) -> None:
        """Turns to a sequence; keeps those of the guessed tokens that it has said."""
        if sequence is not self._sequence:
            self.forget()
            self._sequence = sequence
        said, true = sequence.tokens_from(self._known), 0
        for guessed, token in zip(self._guessed, said, strict=False):
            if guessed != token:
                break
            true += 1
        if wrong := len(self._guessed) - true:
            trim_prompt_cache(self._caches, wrong)
        self._known += true
        self._guessed = []

    @property
    def room(self) -> int:
        """Counts the tokens that it could draft behind the one that is due."""
        assert self._sequence is not None
        length = self._sequence.length + 1
        left, window = self._context - length, room(self._caches)
        return left if window is None else min(left, window - (length - self._known))

    def catch_up(self) -> bool:
        """Takes in a chunk of what the sequence holds; says whether nothing was left to take in.

        But for a few tokens, which go with the one that is due.
        """
        assert self._sequence is not None
        behind = self._sequence.tokens_from(self._known)
        if len(behind) <= _CHUNK:
            return True
        self._fed(mx.array([behind[:_CHUNK]]))
        mx.eval([cache.state for cache in self._caches])
        self._known += _CHUNK
        return False

    def propose(self, due: int, params: SamplingParams, randoms: Sequence[float]) -> mx.array:
        """Drafts what follows the due token, one token for each number; computes nothing yet.

        It is drawn as the model draws, by the same numbers: so the two agree most often.
        """
        assert self._sequence is not None
        inputs = [*self._sequence.tokens_from(self._known), due]
        self._known += len(inputs)
        logits = self._fed(mx.array([inputs]))
        drafts: list[mx.array] = []
        for random in randoms:
            if drafts:
                logits = self._fed(drafts[-1][None])
            known = logits[:, -1, : self._vocabulary].astype(mx.float32)
            drafts.append(draw(known, [params], [random]).astype(mx.uint32))
        return mx.concatenate(drafts)

    def proposed(self, drafts: Sequence[int]) -> None:
        """Takes note of what the drafts came to; all of them but the last are in the KV."""
        self._guessed = list(drafts[:-1])

    def _fed(self, tokens: mx.array) -> mx.array:
        """Gives the logits behind tokens [1, any]; the last that it knows stands for the others."""
        if self._own_vocabulary < self._vocabulary:
            tokens = mx.minimum(tokens, self._own_vocabulary - 1)
        logits: mx.array = self._model(tokens, cache=self._caches)
        return logits


class Drafting:
    """Decodes the sequence that is alone, with drafts or without, as is faster."""

    def __init__(
        self,
        draft: LoadedModel,
        vocabulary: int,
        totals: Totals,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.model = draft.model
        self._name = draft.model_id
        self._drafter = Drafter(draft, vocabulary)
        self._totals = totals
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Measures anew: the model has changed."""
        self._rate, self._ahead = DraftRate(), _FIRST
        self.forget()

    def forget(self) -> None:
        """There is no sequence that is alone: its KV is given back."""
        self._drafter.forget()
        self._rate.interrupt()

    def __str__(self) -> str:
        drafted, gain = self._totals.drafted_tokens, self._rate.gain
        accepted = f"{self._totals.accepted_tokens / max(1, drafted):.0%} accepted"
        if gain is None:
            return f"by {self._name} (not measured yet)"
        used = "" if self._rate.chosen is not False else ", not used"
        return f"by {self._name} ({accepted}, {gain:.2g} times as fast{used})"

    def bytes(self, sequence: TokenSequence) -> int:
        """Says what a sequence's KV takes in the draft model."""
        return self._drafter.cost.bytes(1, sequence.length + _MOST)

    def step(
        self,
        generator: SharingBatchGenerator | SequentialGenerator,
        sequence: TokenSequence,
        prefill_tokens: int,
    ) -> list[GenerationBatch.Response]:
        """Does a step of the one sequence that the generator has."""
        rate, chosen = self._rate, self._rate.chosen
        self._drafter.follow(sequence)
        most = self._most(generator, sequence)
        if not most or (rate.drafts and not self._drafter.catch_up()):
            rate.interrupt()
            return generator.step(prefill_tokens)[1]
        started = self._clock()
        if rate.drafts:
            responses = self._drafted(generator, sequence.sampler, min(self._ahead, most))
        else:
            responses = generator.step(prefill_tokens)[1]
        rate.took(self._clock() - started, len(responses))
        if rate.chosen is not chosen:
            logger.info("drafts %s", self)
        return responses

    def _most(
        self, generator: SharingBatchGenerator | SequentialGenerator, sequence: TokenSequence
    ) -> int:
        """Counts the tokens that may be drafted for a sequence; none where it has to go by steps.

        What remembers its tokens, as a grammar or a penalty does, is not chosen ahead; nor are
        logprobs told of what was computed together.
        """
        sampler = sequence.sampler
        if sampler.remembers or sampler.top_logprobs is not None or generator.due is None:
            return 0
        most = min(sequence.remaining - 1, self._drafter.room)
        window = room(generator.caches)
        return max(0, most if window is None else min(most, window - 1))

    def _drafted(
        self,
        generator: SharingBatchGenerator | SequentialGenerator,
        sampler: SequenceSampler,
        count: int,
    ) -> list[GenerationBatch.Response]:
        assert generator.due is not None
        due = int(generator.due.item())  # type: ignore[arg-type]
        with mx.stream(generator.stream or mx.default_stream(mx.default_device())):
            drafts = self._drafter.propose(due, sampler.params, sampler.upcoming(count))
            responses = generator.verify(drafts)
        self._drafter.proposed(drafts.tolist())  # type: ignore[arg-type]
        accepted = len(responses) - 1
        self._totals.drafted_tokens += count
        self._totals.accepted_tokens += accepted
        if accepted == count:
            self._ahead = min(_MOST, self._ahead + 2)
        elif count == self._ahead:
            self._ahead = max(1, self._ahead - 1)
        return responses
