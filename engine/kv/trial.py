"""Tries a model with a few short sequences, in all that the engine does with sequences.

Some models attend, or keep a state, in ways of their own, and a few would be wrong in a batch
without a word; a few raise. So when a model is loaded, sequences are computed one by one and
together, and their logits are compared: of unequal lengths, on a prefix and on none, with one that
leaves the batch and others that join it.
"""

import copy
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.generate import PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from mlx_rq.engine.kv.numerics import disagreement, probe_tokens
from mlx_rq.engine.kv.ragged import ragged_step

_Caches = list[Any]
"""One cache for each layer."""

FAILURES = (
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""What a model raises that does not take what it is tried with."""

_PREFIX = (2, 1)
"""Tokens of the parts of the prefix: few, since a quantised model on a CPU takes 0.1 s for one."""

_ON_PREFIX, _ON_NONE = (2, 3, 2), (6, 3)
"""Tokens of the sequences that stand on the prefix, behind it, and of those that join later.

The second leaves, the longest; one that joins is longer than those that stay: they are padded then.
"""

_ON_PREFIX_EQUAL, _ON_NONE_EQUAL = (2, 2, 2), (6, 6)

_COUNTS = 1, 3
"""Tokens that two sequences take in at once."""

_UNSEEN = ("mlx_lm.models.minimax_m3_vl",)
"""Modules of models that are wrong in a batch only when it is longer than a trial may be.

MiniMax M3 leaves out blocks of tokens, and takes the padding for some of them.
"""


class Batching(Enum):
    """Which sequences of a model may be computed together."""

    ANY = "sequences of any lengths"
    EQUAL = "prompts of equal length are prefilled together"
    ALONE = "one sequence at a time"


class Verdict(NamedTuple):
    """How a model may be batched, and in a few words why not in an earlier way.

    `logits` are those of a trial in a batch, as far as it was right.
    """

    batching: Batching
    why: str = ""
    logits: Sequence[mx.array] = ()


ASSUMED = Verdict(Batching.ANY)
"""Of a model that nobody tried."""


def verdict_on(model: Module) -> Verdict:
    """Finds the first way of batching in which sequences have the logits that each has alone."""
    if type(model).__module__ in _UNSEEN:
        return Verdict(Batching.ALONE, "it is known to be wrong over many tokens")
    padded, logits = _tried(model, equal=False)
    if not padded:
        return Verdict(Batching.ANY, "", logits)
    equal, logits = _tried(model, equal=True)
    if not equal:
        return Verdict(Batching.EQUAL, f"padded: {padded}", logits)
    return Verdict(Batching.ALONE, equal)


def _tried(model: Module, *, equal: bool) -> tuple[str, Sequence[mx.array]]:
    """Says what speaks against computing sequences together (nothing?), and gives their logits."""
    try:
        trial = Trial(model, equal=equal)
        prefix = trial.prefix()
        got = trial.together([prefix] * trial.on_prefix, make_prompt_cache)
        return objection(trial.disagreement(got, trial.alone(prefix))), got
    except FAILURES as error:
        return f"{type(error).__name__}: {error}", ()


def objection(disagreement: float, allowed: float = 1.0) -> str:
    """Says so, where logits differ by more than that part of what rounding may explain."""
    if disagreement < allowed:
        return ""
    return f"it would change the logits, {disagreement:.2g} times what rounding may"


class Trial:
    """A few sequences, and what a model makes of them. With `equal`, prefilled by equal length."""

    def __init__(self, model: Module, *, equal: bool = False) -> None:
        self._model = model
        some = probe_tokens(model)

        def tokens(length: int) -> list[int]:
            drawn: list[int] = some(1, length)[0].tolist()  # type: ignore[assignment]
            return drawn

        self.parts = [tokens(length) for length in _PREFIX]
        """The parts of the prefix, one below the other."""
        self._on_prefix = [tokens(n) for n in (_ON_PREFIX_EQUAL if equal else _ON_PREFIX)]
        self._on_none = [tokens(n) for n in (_ON_NONE_EQUAL if equal else _ON_NONE)]
        self._answer = tokens(1)  # to each of them

    @property
    def on_prefix(self) -> int:
        """How many sequences stand on the prefix."""
        return len(self._on_prefix)

    def prefix(self) -> _Caches:
        """Computes the prefix."""
        caches = make_prompt_cache(self._model)
        for part in self.parts:
            self._model(mx.array([part]), cache=caches)
        mx.eval([cache.state for cache in caches])
        return caches

    def alone(self, prefix: _Caches) -> list[mx.array]:
        """Gives the logits of each sequence by itself."""
        found = []
        for number, prompt in enumerate((*self._on_prefix, *self._on_none)):
            below = number < self.on_prefix
            caches = copy.deepcopy(prefix) if below else make_prompt_cache(self._model)
            self._model(mx.array([prompt[:-1]]), cache=caches)
            inputs = [prompt[-1]] if number == 1 else [prompt[-1], *self._answer]
            found.append(mx.concatenate([self._step([one], caches) for one in inputs])[:, -1])
        return found

    def together(
        self, on_prefix: Sequence[_Caches], empty: Callable[[Module], _Caches]
    ) -> list[mx.array]:
        """Gives the logits of each sequence in a batch that one leaves and others join.

        Those on the prefix go on from the caches `on_prefix`, the others from `empty` ones.
        """
        batch = self._prefilled(self._on_prefix, on_prefix)
        first, second, third = self._step([one[-1] for one in self._on_prefix], batch.prompt_cache)
        batch.filter([0, 2])
        joining = self._prefilled(self._on_none, [empty(self._model) for _ in self._on_none])
        fourth, fifth = self._step([one[-1] for one in self._on_none], joining.prompt_cache)
        batch.extend(joining)
        last = self._step(self._answer * 4, batch.prompt_cache)
        begun = (first, third, fourth, fifth)
        one, two, *rest = [mx.concatenate(list(pair)) for pair in zip(begun, last, strict=True)]
        return [one, second, two, *rest]

    def ragged(self, on_prefix: Sequence[_Caches]) -> list[mx.array]:
        """Gives the logits of two sequences that take in one token and three, and then one each.

        They go on from the caches `on_prefix`, which take ragged steps.
        """
        prompts = self._on_prefix[:2]
        batch = self._prefilled(prompts, on_prefix).prompt_cache
        with ragged_step(batch, _COUNTS) as step:
            forced = self._answer * (sum(_COUNTS) - 2)
            first = self._step([*(one[-1] for one in prompts), *forced], batch)[step.last]
        return list(mx.concatenate([first, self._step(self._answer * 2, batch)], axis=1))

    def ragged_alone(self, prefix: _Caches) -> list[mx.array]:
        """Gives what those should be."""
        found = []
        for prompt, count in zip(self._on_prefix, _COUNTS, strict=False):
            tokens = [*prompt, *self._answer * count]
            logits: mx.array = self._model(mx.array([tokens]), cache=copy.deepcopy(prefix))
            found.append(logits[0, -2:])
        return found

    def disagreement(self, logits: Sequence[mx.array], expected: Sequence[mx.array]) -> float:
        """Says how far logits of all sequences are from what they should be; 1 is allowed."""
        pairs = zip(logits, expected, strict=True)
        # numpy's maximum of a number and of what is none is no number, either.
        return float(np.max([disagreement(got[None], want[None]) for got, want in pairs]))

    def _prefilled(
        self, prompts: Sequence[list[int]], caches: Sequence[_Caches]
    ) -> PromptProcessingBatch:
        """Prefills sequences up to their last tokens, as mlx-lm's generator does."""
        nothing: list[Any] = [None] * len(prompts)
        batch = PromptProcessingBatch(
            self._model,
            list(range(len(prompts))),
            list(caches),
            samplers=nothing,
            logits_processors=nothing,
        )
        batch.prompt([prompt[:-1] for prompt in prompts])
        split: PromptProcessingBatch = batch.split(list(range(len(prompts))))
        return split

    def _step(self, tokens: Sequence[int], caches: _Caches) -> mx.array:
        logits: mx.array = self._model(mx.array([[one] for one in tokens]), cache=caches)
        return logits
