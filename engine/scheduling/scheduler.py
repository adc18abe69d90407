"""Which rows are admitted next: keeps the rows that wait in the order of the plan.

All rows that wait are planned together, again whenever some came or went, so that a late row still
joins the others of its prefix. A row that has waited too long goes before all others of its
priority, however lonely its prefix is.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_rq.engine.kv.prefix_cache import Key, key_of
from mlx_rq.engine.scheduling.prefix_plan import PlanRow, distinct_tokens, plan
from mlx_rq.engine.scheduling.sequence import Row


@dataclass(slots=True)
class Cohort:
    """Rows that are admitted together, and the trunks that they stand on, the shortest first."""

    trunks: tuple[Key, ...]
    rows: deque[Row]


class Schedule:
    """The rows that wait. A row whose answer is another's (the same request) waits as its twin."""

    def __init__(self, *, cohort_rows: int, min_trunk_tokens: int, max_wait: float) -> None:
        self._cohort_rows = cohort_rows
        self._min_trunk_tokens = min_trunk_tokens
        self._max_wait = max_wait
        self._rows: dict[Row, None] = {}  # an ordered set
        self._cohorts: deque[Cohort] = deque()
        self._plan_again = False
        self._next_overdue = math.inf  # when the next row will have waited too long
        self.distinct_tokens = 0
        """Distinct tokens of all that was ever planned; those of later windows count anew."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def prefixes(self) -> frozenset[Key]:
        """The trunks that rows wait for."""
        return frozenset(key for cohort in self._cohorts for key in cohort.trunks)

    def add(self, rows: Iterable[Row]) -> None:
        """Takes rows in."""
        self._rows.update(dict.fromkeys(rows))
        self._plan_again = True

    def remove(self, rows: Iterable[Row]) -> None:
        """Forgets rows; those that are not here are passed by."""
        for row in rows:
            if row in self._rows:
                del self._rows[row]
                self._plan_again = True

    def head(self, now: float) -> Cohort | None:
        """Gives the cohort that is to be admitted next, as far as it was not taken yet."""
        if self._plan_again or now > self._next_overdue:
            self._plan(now)
        while self._cohorts and not self._cohorts[0].rows:
            self._cohorts.popleft()
        return self._cohorts[0] if self._cohorts else None

    def take(self, count: int) -> list[Row]:
        """Takes up to `count` rows of the head out, their twins with them."""
        cohort = self._cohorts[0]
        rows = [cohort.rows.popleft() for _ in range(min(count, len(cohort.rows)))]
        for row in rows:
            for taken in (row, *row.twins):
                self._rows.pop(taken, None)
        return rows

    def _plan(self, now: float) -> None:
        rows = list(self._rows)
        for row in rows:
            row.twins.clear()
        patient = [row.since for row in rows if not self._overdue(row, now)]
        self._next_overdue = min(patient, default=math.inf) + self._max_wait
        wanted = [self._plan_row(row, now) for row in rows]
        planned = plan(
            wanted, cohort_rows=self._cohort_rows, min_trunk_tokens=self._min_trunk_tokens
        )
        chains: list[tuple[Key, ...]] = []
        for trunk in planned.trunks:
            below = () if trunk.parent is None else chains[trunk.parent]
            chains.append((*below, key_of(rows[trunk.row].tokens[: trunk.depth])))
        self._cohorts = deque(
            Cohort(
                () if cohort.trunk is None else chains[cohort.trunk],
                deque(rows[index] for index in cohort.rows),
            )
            for cohort in planned.cohorts
        )
        for index, original in planned.duplicates.items():
            rows[original].twins.append(rows[index])
        self._plan_again = False
        # Only what is new adds to the count; rows that were planned before are in it already.
        known = distinct_tokens([w for w, row in zip(wanted, rows, strict=True) if row.counted])
        self.distinct_tokens += planned.distinct_tokens - known
        for row in rows:
            row.counted = True

    def _overdue(self, row: Row, now: float) -> bool:
        return now - row.since > self._max_wait

    def _plan_row(self, row: Row, now: float) -> PlanRow:
        return PlanRow(
            tokens=row.tokens,
            max_tokens=row.remaining,
            priority=2 * row.rank - self._overdue(row, now),
            # One that was put back asks from what it had said on, which is another's prompt.
            duplicate_key=None if row.text.tokens else row.duplicate_key,
        )
