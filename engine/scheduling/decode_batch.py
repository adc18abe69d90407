"""The sequences of a batch whose prompts are prefilled: a token of each in a step, or several.

Written against mlx-lm 0.32 (`mlx_lm/generate.py`), whose class it extends: see `generator.py`.
"""

from collections.abc import Mapping, Sequence
from operator import add, sub
from types import MappingProxyType
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch

from mlx_rq.engine.kv.adapter_rows import adapter_rows
from mlx_rq.engine.kv.ragged import longest_run, most_ahead, ragged_step
from mlx_rq.engine.models.device import NotFinite, finite_rows
from mlx_rq.engine.sampling.logprobs import Pending, TokenLogprobs, measure, read
from mlx_rq.engine.sampling.sampler import SequenceSampler, choose
from mlx_rq.engine.scheduling.verification import Verification


class DecodeBatch(GenerationBatch):
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
        alone = len(adapters) == 1
        if alone or not forced:
            rows = tokens[None] if alone else tokens[:, None]
            with adapter_rows(adapters):
                return self.model(rows, cache=self.prompt_cache)[:, -1, :]  # type: ignore[no-any-return]
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
        left = map(sub, self.max_tokens, map(add, self._num_tokens, taken))
        rows = zip(self.uids, self.samplers, left, strict=True)
        most = most_ahead(len(self))
        self._ahead = {uid: sampler.ahead(min(most, room - 1)) for uid, sampler, room in rows}
        self._cut_ahead()

    def _cut_ahead(self) -> None:
        """Keeps what one step of all sequences is to take in; the rest is found again then."""
        most = most_ahead(len(self))
        longest = longest_run([len(self._ahead.get(uid, ())) for uid in self.uids])
        self._ahead = {uid: run[: min(most, longest)] for uid, run in self._ahead.items()}

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
        assert isinstance(batch, DecodeBatch)
        self._unchecked += batch._unchecked
        if self.ragged:
            self._cut_ahead()  # to a step of more sequences than they were found for
        else:
            self._ahead = {}  # nothing is lost: they are found again, one by one

    def extract_cache(self, idx: int) -> list[Any]:
        """Gives no cache with a finished sequence: nobody continues it."""
        return []
