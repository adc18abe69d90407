"""Which sequences are admitted next: the order of those that wait, by the plan.

All sequences that wait are planned together (`rolling_plan.py`): one that comes late still joins
the others of its prefix. A sequence that has waited too long goes before all others of its
priority, however lonely its prefix is. So do a few that share nothing of their own with others:
nothing is computed twice for it. They go before those that waited too long, too: of a large window,
that is nearly all.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from mlx_rq.engine.kv.prefix_key import Key
from mlx_rq.engine.scheduling.prefix_tree import PlannedSequence, Urgency
from mlx_rq.engine.scheduling.rolling_plan import RollingPlan
from mlx_rq.engine.scheduling.sequence import TokenSequence

_FEW = 8
"""Lone sequences go first as long as they are at most this part (1/8) of those that wait; before
those that are overdue, as long as they are at most this part of those that are taken."""
_CREDIT = 8 * _FEW
"""For that, each that is taken gives one credit, up to so many, and a lone one costs `_FEW`."""


@dataclass(slots=True)
class WaitingBatch:
    """Sequences that are admitted together, and the prefixes below them, the shortest first."""

    prefixes: tuple[Key, ...]
    sequences: deque[TokenSequence]
    urgency: Urgency
    lone: bool = False
    """Whether they are a few of many, and share no prefix but those that lead to longer ones, also
    with what is to come."""
    first: bool = False
    """Whether they go before others that are overdue, and are not so themselves."""


class Scheduler:
    """The sequences that wait; one whose answer is another's (the same request) as a duplicate."""

    def __init__(
        self, *, batch_size: int, min_prefix_tokens: int, max_wait: float, pads: bool = True
    ) -> None:
        """Without `pads`, only suffixes of equal length are prefilled together."""
        self._rolling = RollingPlan(
            batch_size=batch_size, min_prefix_tokens=min_prefix_tokens, pads=pads
        )
        self._max_wait = max_wait
        self._count = 0
        self._numbers: dict[TokenSequence, int] = {}  # in the order of arrival
        self._sequences: dict[int, TokenSequence] = {}  # by their numbers
        self._batches: deque[WaitingBatch] = deque()
        self._serving: tuple[Key, ...] = ()  # the prefixes of the last head
        self._plan_again = False
        self._credit = 0  # below that, lone sequences go after those that are overdue
        self._patient: list[tuple[float, int]] = []  # a heap: since when they wait, the numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._numbers)

    def next_use(self) -> dict[Key, float]:
        """Tells after how many prefill batches each prefix that sequences wait for is needed."""
        uses: dict[Key, float] = {}
        for place, batch in enumerate(self._batches):
            for key in reversed(batch.prefixes):
                if key in uses:
                    break  # then so are those below it
                uses[key] = place
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
        """The sequences that wait for the answer of one that waits itself."""
        number = self._numbers.get(sequence)
        return () if number is None else self._named(self._rolling.duplicates_of(number))

    def add(self, sequence: TokenSequence) -> None:
        """Takes a sequence in."""
        number = self._count = self._count + 1
        self._numbers[sequence], self._sequences[number] = number, sequence
        self._rolling.add(number, as_planned(sequence))
        heappush(self._patient, (sequence.since, number))
        self._plan_again = True

    def remove(self, sequence: TokenSequence) -> None:
        """Forgets a sequence."""
        number = self._numbers.pop(sequence)
        del self._sequences[number]
        self._rolling.remove(number)
        self._plan_again = True

    def head(self, now: float) -> WaitingBatch | None:
        """Gives the prefill batch that is to be admitted next, as far as it was not taken yet."""
        self._note_overdue(now)
        if self._plan_again:
            self._plan()
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
        cost = _FEW if self._batches[0].first else 0
        self._credit = max(-_CREDIT, min(self._credit + 1 - cost, _CREDIT))
        duplicates = self._named(self._rolling.take(self._numbers[sequence]))
        for taken in (sequence, *duplicates):
            del self._sequences[self._numbers.pop(taken)]
        return duplicates

    def _named(self, numbers: Iterable[int]) -> list[TokenSequence]:
        return [self._sequences[number] for number in numbers]

    def _plan(self) -> None:
        batches = [
            WaitingBatch(
                batch.prefixes,
                deque(self._sequences[number] for number in batch.sequences),
                batch.urgency,
            )
            for batch in self._rolling.order()
        ]
        self._mark_lone(batches)
        self._mark_first(batches)
        self._batches = deque(sorted(batches, key=self._turn))
        self._plan_again = False

    def _note_overdue(self, now: float) -> None:
        """Has those go first that have waited too long by now."""
        while self._patient and now - self._patient[0][0] > self._max_wait:
            _, number = heappop(self._patient)
            if number in self._sequences:
                self._rolling.is_overdue(number)
                self._plan_again = True

    @staticmethod
    def _mark_lone(batches: Sequence[WaitingBatch]) -> None:
        """Marks the batches of sequences that share no prefix of their own, where those are few."""
        below = {key for batch in batches for key in batch.prefixes[:-1]}
        if any(batch.prefixes for batch in batches):
            below.add(b"")  # stands for no prefix at all
        lone = [batch for batch in batches if (batch.prefixes or (b"",))[-1] in below]
        count = sum(len(batch.sequences) for batch in batches)
        if _FEW * sum(len(batch.sequences) for batch in lone) <= count:
            for batch in lone:
                batch.lone = not any(sequence.others_follow for sequence in batch.sequences)

    def _mark_first(self, batches: Sequence[WaitingBatch]) -> None:
        """Marks the lone batches that go before what is overdue, as many as there is credit for."""
        in_time = [batch for batch in batches if batch.urgency[1]]
        credit = self._credit
        for batch in in_time if len(in_time) < len(batches) else ():
            if batch.lone and credit >= 0:
                batch.first = True
                credit -= (_FEW - 1) * len(batch.sequences)

    def _turn(self, batch: WaitingBatch) -> tuple[int, bool, bool, bool, int]:
        """Sorts lone sequences first, then what stands on the prefixes in work.

        So no prefix is put aside half done. The plan's own order, which is depth first, stays among
        the others.
        """
        shared = sum(a == b for a, b in zip(batch.prefixes, self._serving, strict=False))
        priority, in_time = batch.urgency
        return priority, not batch.first, in_time, not batch.lone, -shared


def as_planned(sequence: TokenSequence) -> PlannedSequence:
    """Gives a sequence as the plan sees it."""
    return PlannedSequence(
        tokens=sequence.tokens,
        max_tokens=sequence.remaining,
        priority=sequence.rank,
        # One that was preempted asks from what it had said on, which is another's prompt.
        duplicate_key=None if sequence.begun else sequence.duplicate_key,
        packed=sequence.key,
    )
