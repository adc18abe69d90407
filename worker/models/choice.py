"""Which of its models a worker should have loaded: decided from what waits, and nothing else.

A model goes on until nothing is left for it: that takes the fewest changes. It has to make way
before, once it had its turn, for another one

- of which a job has waited `max_wait` seconds, counted from when it was first seen to wait here;
- for which more urgent jobs wait;
- or for which so many more jobs wait that those here count for little.

A turn lasts a multiple of the time that two changes take, there and back again: the more jobs wait
here for each one there, the larger a multiple, between `LEAST_TURN` and `LONGEST_TURN`. So loading
takes a small part of the time, however jobs come; a thousand are not kept waiting for the sake of
one; and how long a model waits has a bound: `max_wait` and the turns of the others.

What another worker has loaded is left to that one, until it has waited for as long as two changes
take, or `max_wait` seconds.

Models of the same base, as a model and its adapters, take each other's place at little cost. So
where one has no more work, those of its base come before the others; and what waits for the others
is weighed against all that there is to do for its base, the turn of which began with the first.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mlx_rq.jobs.openai.words import counted

LEAST_TURN, LONGEST_TURN = 8, 32
"""How many times as long as two changes a model stays, at least, while there is work for it."""

FAR_MORE = 16
"""So many times as many jobs count for more than what is here."""

FIRST_LOAD_SECONDS = 5.0
"""What loading is taken to cost before it was ever measured."""

ADAPT_SECONDS = 1.0
"""What putting on an adapter is taken to cost, at least: what runs is drained for it, too."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """What there is to do for one model: how many jobs of each rank, the most urgent first."""

    ranks: tuple[int, ...]

    @classmethod
    def of_all(cls, backlogs: Iterable["Backlog"]) -> "Backlog":
        """Adds up what there is to do for several models."""
        return cls(tuple(map(sum, zip(*(backlog.ranks for backlog in backlogs), strict=True))))

    @property
    def jobs(self) -> int:
        return sum(self.ranks)

    @property
    def rank(self) -> int:
        """That of the most urgent job."""
        return next(rank for rank, jobs in enumerate(self.ranks) if jobs)


@dataclass(frozen=True, slots=True)
class Change:
    """The model that is to come next, and why; `due` says whether now."""

    model: str
    why: str
    due: bool = True


class Choice:
    """Decides for one worker, of which at most one model is loaded."""

    def __init__(
        self,
        max_wait: float,
        *,
        bases: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bases` names the model whose weights another one has, where that is not its own."""
        self._max_wait = max_wait
        self._bases = bases
        self._clock = clock
        self._loaded: str | None = None
        self._loaded_at = self._base_loaded_at = 0.0
        self._next: Change | None = None
        self._waits_since: dict[str, float] = {}
        self._load_seconds: dict[str, float] = {}
        self._adapt_seconds: dict[str, float] = {}
        self._passed_over: dict[str, float] = {}
        self._elsewhere: Collection[str] = ()

    def loaded(self, model: str, seconds: float) -> None:
        """Takes note that a model is there, and how long that took."""
        base, self._loaded_at = self._base(model), self._clock()
        if self._same_base(model):
            self._adapt_seconds[base] = seconds
        else:
            self._load_seconds[base], self._base_loaded_at = seconds, self._loaded_at
        self._loaded, self._next = model, None
        self._waits_since.pop(model, None)

    def unloaded(self) -> None:
        """Takes note that no model is there."""
        self._loaded = self._next = None

    def claimed(self, jobs: int) -> None:
        """Takes note of what a claim brought; what brings none is left to other workers.

        It does not count for a while.
        """
        if self._loaded is None:
            return
        self._passed_over.pop(self._loaded, None)
        if not jobs:
            self._passed_over[self._loaded] = self._clock() + self._max_wait

    def next(
        self, backlogs: Mapping[str, Backlog], elsewhere: Collection[str] = ()
    ) -> Change | None:
        """Says which model is to come next, if any: a decision stands for as long as jobs wait.

        The backlog of the loaded model is what waits for it and what it has begun; models that
        other workers have loaded are `elsewhere`.
        """
        now, self._elsewhere = self._clock(), elsewhere
        work = {
            model: backlog
            for model, backlog in backlogs.items()
            if backlog.jobs and self._passed_over.get(model, now) <= now
        }
        here = None if self._loaded is None else work.pop(self._loaded, None)
        self._waits_since = {model: self._waits_since.get(model, now) for model in work}
        if self._next is None or self._next.model not in work:
            self._next = None
            change = self._best(work, here)
            if change is None or not change.due:
                return change
            self._next = change
        return self._next

    def _best(self, work: Mapping[str, Backlog], here: Backlog | None) -> Change | None:
        """Picks what was overdue first, else the most urgent, else what waited longest."""
        if not work:
            return None
        of_base = [there for model, there in work.items() if self._same_base(model)]
        of_base += [] if here is None else [here]
        beside = Backlog.of_all(of_base) if of_base else None
        changes = {
            model: self._weighed(model, there, here if self._same_base(model) else beside)
            for model, there in work.items()
        }

        def claim(model: str) -> tuple[bool, bool, int, bool, float, int]:
            overdue, backlog = self._waited(model) >= self._max_wait, work[model]
            rank = 0 if overdue else backlog.rank
            far = not overdue and not self._same_base(model)
            since = self._waits_since[model]
            return not changes[model].due, not overdue, rank, far, since, -backlog.jobs

        return changes[min(work, key=claim)]

    def _weighed(self, model: str, there: Backlog, here: Backlog | None) -> Change:
        """Weighs what waits for a model against what there is to do for the loaded one."""
        waited, jobs = (
            self._waited(model),
            counted(there.jobs, "job waits for it", "jobs wait for it"),
        )
        changes, loaded_at = self._seconds_for_changes(model)
        if model in self._elsewhere and waited < min(changes, self._max_wait):
            return Change(model, f"{jobs}, and another worker has it loaded", due=False)
        if here is None:
            nothing = "nothing is loaded" if self._loaded is None else "the loaded one has no work"
            return Change(model, f"{jobs}, and {nothing}")
        more_urgent = there.rank < here.rank
        if waited >= self._max_wait:
            why = f"{jobs}, since {waited:.0f} s"
        elif more_urgent:
            why = f"{jobs}, of which some are more urgent"
        elif there.jobs >= FAR_MORE * here.jobs and there.rank == here.rank and waited >= changes:
            why = f"{jobs}, and only {here.jobs:,} for the loaded one"
        else:
            return Change(model, f"{jobs}: when the loaded one has no more work", due=False)
        times = LEAST_TURN if more_urgent else here.jobs / there.jobs
        turn = changes * min(LONGEST_TURN, max(LEAST_TURN, times))
        left = loaded_at + turn - self._clock()
        if left > 0:
            return Change(model, f"{why}; the loaded one stays {left:.0f} s more", due=False)
        return Change(model, why)

    def _waited(self, model: str) -> float:
        return self._clock() - self._waits_since[model]

    def _base(self, model: str) -> str:
        return self._bases.get(model, model)

    def _same_base(self, model: str) -> bool:
        return self._loaded is not None and self._base(self._loaded) == self._base(model)

    def _seconds_for_changes(self, model: str) -> tuple[float, float]:
        """Says what changing to a model and back takes, and when the turn began that it ends."""
        base = self._base(model)
        if self._same_base(model):
            return 2 * max(ADAPT_SECONDS, self._adapt_seconds.get(base, 0.0)), self._loaded_at
        there = self._seconds_to_load(base)
        here = None if self._loaded is None else self._base(self._loaded)
        return there + self._seconds_to_load(here), self._base_loaded_at

    def _seconds_to_load(self, base: str | None) -> float:
        known = self._load_seconds
        if base is not None and base in known:
            return known[base]
        return max(known.values(), default=FIRST_LOAD_SECONDS)
