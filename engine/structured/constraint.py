"""Constraints on what sequences may write: the seam to an engine for them, one masking op a batch.

A grammar is compiled off the MLX thread while its sequence waits (`Compilers`). Each sequence then
has a `Constraint` of its own, which takes in the tokens that the sequence chose and marks those
that may come next. The engine behind the seam is `llguidance_backend.py`; another one needs
`compile` and the two protocols.
"""

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_rq.engine.structured.json_schema import Check

Masks = NDArray[np.int32]
"""One sequence of bits for each sequence of the batch, 32 tokens a word; all ones where a
sequence is free.
"""


class Constraint(Protocol):
    """What one sequence may write next."""

    @property
    def beginning(self) -> Sequence[int]:
        """The tokens that every text begins with: at each of them, the mask allows no other.

        The one that would complete the text is never among them.
        """

    @property
    def vocabulary(self) -> int:
        """How many tokens its masks have a bit for; the logits may be for fewer."""

    @property
    def taken(self) -> int:
        """How many tokens it has taken in."""

    @property
    def done(self) -> bool:
        """Whether the text is complete, so that no token may follow."""

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""

    @property
    def fault(self) -> str | None:
        """Why the engine gave the sequence up; its tokens mean nothing then."""

    @property
    def cut(self) -> bool:
        """Whether the text was steered to its end because the budget ran out."""

    @property
    def captures(self) -> list[dict[str, str]]:
        """The named parts of the text, in order: `name` and `text` of each."""

    def accept(self, token: int) -> None:
        """Takes in the token that the sequence chose."""

    def cut_to(self, tokens: Sequence[int], rest: str) -> None:
        """Goes back to a shorter text, that of some tokens and a rest; nothing follows it."""

    def ahead(self, most: int) -> Sequence[int]:
        """Gives the tokens that have to follow the next one, at most so many.

        At each of them, the mask would allow no other. Never the one that completes the text.
        """

    def fill(self, others: Sequence["tuple[Constraint, int]"], masks: Masks) -> None:
        """Marks what this constraint and `others` (with their places in the batch) allow next."""


class Compiled(Protocol):
    """A grammar, ready to be used by any number of sequences."""

    checks: Sequence[Check | None]
    """Validates what each part of the grammar describes, where that is JSON."""
    warnings: Sequence[str]
    shortest: Sequence[int] | None
    """The tokens of a short text that fits the grammar; None where none was found."""

    def start(self, budget: int, *, close: bool) -> Constraint | None:
        """Gives a sequence's constraint, None where all is allowed.

        With `close`, the text is steered to its end before its budget of tokens runs out.
        """


class GrammarFault(ValueError):
    """A grammar does not compile: which of its parts is to blame, and why."""

    def __init__(self, part: int, message: str) -> None:
        super().__init__(message)
        self.part = part


@mx.compile
def _masked(logits: mx.array, words: mx.array) -> mx.array:
    bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]].astype(mx.bool_)
    return mx.where(allowed, logits, -mx.inf)


def mask(logits: mx.array, constraints: Sequence[Constraint | None]) -> mx.array:
    """Sets to -inf what the sequences' constraints forbid in logits [sequences, vocabulary].

    Sequences without a constraint, and sequences that are done or given up, stay exactly as they
    are.
    """
    live = [
        (constraint, index)
        for index, constraint in enumerate(constraints)
        if constraint is not None and not constraint.done
    ]
    if not live:
        return logits
    # A tokenizer may have more tokens than the model: `_masked` leaves those out.
    width = max(logits.shape[1], live[0][0].vocabulary)
    masks = np.full((len(constraints), (width + 31) // 32), -1, np.int32)
    live[0][0].fill(live, masks)
    return _masked(logits, mx.array(masks.view(np.uint32)))
