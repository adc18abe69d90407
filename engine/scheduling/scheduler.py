"""Which sequences are admitted next: the order of those that wait, by the plan.

All sequences that wait are planned together, again whenever some came or went, so that a late
sequence still joins the others of its prefix. A sequence that has waited too long goes before all
others of its priority, however lonely its prefix is. So do a few that share nothing of their own
with others: nothing is computed twice for it.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_rq.engine.kv.prefix_key import TOKEN_BYTES, Key
from mlx_rq.engine.scheduling.prefix_plan import Urgency, plan
from mlx_rq.engine.scheduling.prefix_tree import PlannedSequence
from mlx_rq.engine.scheduling.sequence import TokenSequence

_FEW = 8
"""Lone sequences go first as long as they are at most this part (1/8) of those that wait."""


@dataclass(slots=True)
class WaitingBatch:
    """Sequences that are admitted together, and the prefixes below them, the shortest first."""

    prefixes: tuple[Key, ...]
    sequences: deque[TokenSequence]
    urgency: Urgency
    lone: bool = False
    """Whether they are a few of many, and share no prefix but those that lead to longer ones."""


class Scheduler:
    """The sequences that wait; one whose answer is another's (the same request) as a duplicate."""

    def __init__(
        self, *, batch_size: int, min_prefix_tokens: int, max_wait: float, pads: bool = True
    ) -> None:
        """Without `pads`, only suffixes of equal length are prefilled together."""
        self._pads = pads
        self._batch_size = batch_size
        self._min_prefix_tokens = min_prefix_tokens
        self._max_wait = max_wait
        self._sequences: dict[TokenSequence, None] = {}  # an ordered set
        self._batches: deque[WaitingBatch] = deque()
        self._duplicates: dict[TokenSequence, list[TokenSequence]] = {}
        self._serving: tuple[Key, ...] = ()  # the prefixes of the last head
        self._plan_again = False
        self._next_overdue = math.inf  # when the next sequence will have waited too long

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences)

    def next_use(self) -> dict[Key, float]:
        """Tells after how many prefill batches each prefix that sequences wait for is needed."""
        uses: dict[Key, float] = {}
        for place, batch in enumerate(self._batches):
            for key in batch.prefixes:
                uses.setdefault(key, place)
        return uses

    @property
    def planned(self) -> Counter[TokenSequence] | None:
        """How often each sequence is in the plan; None where it has to be planned again."""
        if self._plan_again:
            return None
        generated = [sequence for batch in self._batches for sequence in batch.sequences]
        duplicates = [one for sequence in generated for one in self.duplicates_of(sequence)]
        return Counter([*generated, *duplicates])

    def duplicates_of(self, sequence: TokenSequence) -> Sequence[TokenSequence]:
        """The sequences that wait for the answer of one that waits itself, as of the last plan."""
        return self._duplicates.get(sequence, ())

    def add(self, sequence: TokenSequence) -> None:
        """Takes a sequence in."""
        self._sequences[sequence] = None
        self._plan_again = True

    def remove(self, sequence: TokenSequence) -> None:
        """Forgets a sequence."""
        del self._sequences[sequence]
        self._plan_again = True

    def head(self, now: float) -> WaitingBatch | None:
        """Gives the prefill batch that is to be admitted next, as far as it was not taken yet."""
        if self._plan_again or now > self._next_overdue:
            self._plan(now)
        while self._batches and not self._batches[0].sequences:
            self._batches.popleft()
        if not self._batches:
            return None
        prefixes = self._batches[0].prefixes
        if self._serving[: len(prefixes)] != prefixes:  # else it puts nothing aside
            self._serving = prefixes
        return self._batches[0]

    def from_last(self) -> Iterator[tuple[Key, TokenSequence]]:
        """Gives those that wait, as of the last plan, the last first, each with its prefix."""
        for batch in reversed(self._batches):
            prefix = batch.prefixes[-1] if batch.prefixes else b""
            yield from ((prefix, sequence) for sequence in reversed(batch.sequences))

    def take(self, sequence: TokenSequence) -> list[TokenSequence]:
        """Takes out the first sequence of the head; returns its duplicates, out with it."""
        self._batches[0].sequences.remove(sequence)
        duplicates = self._duplicates.pop(sequence, [])
        for taken in (sequence, *duplicates):
            del self._sequences[taken]
        return duplicates

    def _plan(self, now: float) -> None:
        sequences = list(self._sequences)
        patient = [sequence.since for sequence in sequences if not self._overdue(sequence, now)]
        self._next_overdue = min(patient, default=math.inf) + self._max_wait
        wanted = [as_planned(one, overdue=self._overdue(one, now)) for one in sequences]
        planned = plan(
            wanted,
            batch_size=self._batch_size,
            min_prefix_tokens=self._min_prefix_tokens,
            pads=self._pads,
        )
        chains: list[tuple[Key, ...]] = []
        for prefix in planned.prefixes:
            below = () if prefix.parent is None else chains[prefix.parent]
            key = sequences[prefix.sequence].key
            chains.append((*below, key[: prefix.depth * TOKEN_BYTES]))
        batches = [
            WaitingBatch(
                () if batch.prefix is None else chains[batch.prefix],
                deque(sequences[index] for index in batch.sequences),
                batch.urgency,
            )
            for batch in planned.batches
        ]
        self._mark_lone(batches)
        self._batches = deque(sorted(batches, key=self._turn))
        self._duplicates = {}
        for index, original in planned.duplicates.items():
            self._duplicates.setdefault(sequences[original], []).append(sequences[index])
        self._plan_again = False

    @staticmethod
    def _mark_lone(batches: Sequence[WaitingBatch]) -> None:
        """Marks the batches of sequences that share no prefix of their own, where those are few."""
        below = {
            batch.prefixes[:depth] for batch in batches for depth in range(len(batch.prefixes))
        }
        lone = [batch for batch in batches if batch.prefixes in below]
        count = sum(len(batch.sequences) for batch in batches)
        if _FEW * sum(len(batch.sequences) for batch in lone) <= count:
            for batch in lone:
                batch.lone = True

    def _turn(self, batch: WaitingBatch) -> tuple[Urgency, bool, int]:
        """Sorts lone sequences first, then what stands on the prefixes in work.

        So no prefix is put aside half done. The plan's own order, which is depth first, stays among
        the others.
        """
        shared = sum(a == b for a, b in zip(batch.prefixes, self._serving, strict=False))
        return batch.urgency, not batch.lone, -shared

    def _overdue(self, sequence: TokenSequence, now: float) -> bool:
        return now - sequence.since > self._max_wait


def as_planned(sequence: TokenSequence, *, overdue: bool = False) -> PlannedSequence:
    """Gives a sequence as the plan sees it."""
    return PlannedSequence(
        tokens=sequence.tokens,
        max_tokens=sequence.remaining,
        priority=sequence.rank,
        overdue=overdue,
        # One that was preempted asks from what it had said on, which is another's prompt.
        duplicate_key=None if sequence.begun else sequence.duplicate_key,
        packed=sequence.key,
    )
