"""When a worker changes its model: rules one by one, then beside the best that could be done."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import pytest

from mlx_rq.worker.models.choice import (
    ADAPT_SECONDS,
    LEAST_TURN,
    LONGEST_TURN,
    Backlog,
    Change,
    Choice,
)

MAX_WAIT = 30.0
LOAD = 2.0


class Desk:
    """A choice between models that take two seconds to load, and a clock."""

    def __init__(
        self,
        loaded: str | None = None,
        max_wait: float = MAX_WAIT,
        bases: Mapping[str, str] | None = None,
    ) -> None:
        self.now = 1000.0
        self.elsewhere: set[str] = set()
        self.choice = Choice(max_wait, bases=bases or {}, clock=lambda: self.now)
        if loaded is not None:
            self.choice.loaded(loaded, LOAD)

    def next(self, **jobs: int | tuple[int, ...]) -> Change | None:
        """Asks with so many jobs of each model; a number means jobs of the usual priority."""
        ranks = {m: (0, n, 0) if isinstance(n, int) else n for m, n in jobs.items()}
        backlogs = {model: Backlog(of) for model, of in ranks.items()}
        return self.choice.next(backlogs, self.elsewhere)

    def due(self, **jobs: int | tuple[int, ...]) -> str | None:
        change = self.next(**jobs)
        return change.model if change is not None and change.due else None

    def due_after(self, limit: float, **jobs: int | tuple[int, ...]) -> float | None:
        """Asks every second until a change is due; says after how many seconds it was."""
        started = self.now
        while self.due(**jobs) is None:
            self.now += 1
            if self.now - started > limit:
                return None
        return self.now - started


def test_the_first_model_is_that_of_which_most_jobs_wait() -> None:
    assert Desk().due(a=3, b=5) == "b"
    assert Desk().due() is None


def test_a_model_goes_on_until_nothing_is_left_for_it() -> None:
    desk = Desk("a", max_wait=1e9)
    assert desk.due_after(10_000, a=1, b=1) is None
    assert desk.due(b=1) == "b"


def test_more_urgent_jobs_come_first_where_nothing_is_loaded() -> None:
    assert Desk().due(a=5, b=(1, 0, 0)) == "b"


def test_of_those_that_waited_too_long_the_oldest_comes_first() -> None:
    desk = Desk("a")
    desk.next(a=1, c=1)
    desk.now += 1
    desk.next(a=1, b=(9, 0, 0), c=1)
    desk.now += MAX_WAIT
    assert desk.due(b=(9, 0, 0), c=1) == "c"


def test_after_max_wait_a_model_has_to_make_way_once_it_had_its_turn() -> None:
    turn = LEAST_TURN * 2 * LOAD
    assert Desk("a", max_wait=100).due_after(1000, a=50, b=50) == 100
    assert Desk("a", max_wait=1).due_after(1000, a=50, b=50) == turn


def test_a_thousand_are_not_kept_waiting_for_the_sake_of_one() -> None:
    longest = LONGEST_TURN * 2 * LOAD
    assert Desk("a").due_after(1000, a=1000, b=1) == longest
    assert Desk("a").due_after(1000, a=20 * 50, b=50) == 20 * 2 * LOAD


def test_more_urgent_jobs_wait_for_the_least_turn_only() -> None:
    assert Desk("a").due_after(1000, a=1000, b=(1, 0, 0)) == LEAST_TURN * 2 * LOAD
    assert Desk("a").due_after(29, a=1000, b=(0, 0, 1)) is None
    assert Desk("a").due_after(29, a=(1, 0, 0), b=(0, 999, 0)) is None


def test_a_trickle_does_not_hold_up_a_flood() -> None:
    assert Desk("a", max_wait=1e9).due_after(1000, a=1, b=16) == LEAST_TURN * 2 * LOAD
    assert Desk("a", max_wait=1e9).due_after(1000, a=1, b=15) is None


def test_a_decision_stands_while_what_runs_comes_to_its_end() -> None:
    desk = Desk("a")
    assert desk.due_after(1000, a=9, b=9) is not None
    assert desk.due(a=9_999, b=1, c=(9, 0, 0)) == "b"
    assert desk.due(a=9_999) is None  # others have taken it
    assert desk.due(a=9_999, b=1) is None


def test_jobs_that_are_left_to_other_workers_do_not_count_for_a_while() -> None:
    desk = Desk("b")
    desk.choice.claimed(0)
    assert desk.due(a=1, b=1) == "a"
    desk.choice.loaded("a", LOAD)
    assert desk.due(b=1) is None
    desk.now += MAX_WAIT
    assert desk.due(b=1) == "b"


def test_what_is_measured_counts() -> None:
    desk = Desk("a")
    desk.choice.loaded("b", 10.0)
    assert desk.due_after(1000, a=50, b=50) == LEAST_TURN * (10 + LOAD)


def test_it_says_why() -> None:
    desk = Desk("a")
    assert desk.next(a=9, b=2) == Change(
        "b", "2 jobs wait for it: when the loaded one has no more work", due=False
    )
    desk.now += 30
    assert desk.next(a=9, b=2) == Change(
        "b", "2 jobs wait for it, since 30 s; the loaded one stays 2 s more", due=False
    )
    desk.now += 2
    assert desk.next(a=9, b=2) == Change("b", "2 jobs wait for it, since 32 s")


# A model and its adapters.


BASES = {"a1": "a", "a2": "a", "a3": "a"}


def test_an_adapter_goes_on_until_nothing_is_left_for_it_then_the_next_of_its_base() -> None:
    desk = Desk("a", max_wait=1e9, bases=BASES)
    assert desk.due_after(1000, a=1, a1=9, b=15) is None
    desk.now += 1
    assert desk.due(b=15, a1=1) == "a1"  # though more wait for the other one, and for longer
    desk.choice.loaded("a1", 0.1)
    assert desk.due(b=15, a2=1) == "a2"
    assert desk.due(b=15) == "b"


def test_an_adapter_has_a_short_turn_and_its_base_a_long_one() -> None:
    jobs = {"a1": 50, "a2": 50, "b": 100}
    desk = Desk("a", max_wait=1, bases=BASES)
    desk.choice.loaded("a1", 0.01)
    assert desk.due_after(1000, **jobs) == LEAST_TURN * 2 * ADAPT_SECONDS
    desk.choice.loaded("a2", 0.01)
    assert desk.due(**jobs) is None
    left = LEAST_TURN * 2 * LOAD - LEAST_TURN * 2 * ADAPT_SECONDS  # of the base since its loading
    assert desk.due_after(1000, **jobs) == left
    assert desk.due(**jobs) == "b"  # which waited the longest


def test_an_adapter_that_is_slow_to_put_on_has_a_longer_turn() -> None:
    desk = Desk("a", max_wait=1, bases=BASES)
    desk.choice.loaded("a1", 3.0)
    assert desk.due_after(1000, a1=5, a2=5) == LEAST_TURN * 2 * 3.0


def test_adapters_that_wait_do_not_keep_another_model_waiting_for_ever() -> None:
    """However many jobs come for each of them."""
    desk = Desk("a", max_wait=10, bases=BASES)
    started, adapters = desk.now, ["a", "a1", "a2", "a3"]
    while (change := desk.next(**dict.fromkeys([*adapters, "b"], 50))) is None or (
        change.model != "b" or not change.due
    ):
        if change is not None and change.due:
            desk.choice.loaded(change.model, 0.1)
        desk.now += 1
        assert desk.now < started + 1000
    longest = LEAST_TURN * 2 * LOAD
    assert desk.now - started <= max(10, longest) + LEAST_TURN * 2 * ADAPT_SECONDS


# Several workers.


def test_what_another_worker_has_loaded_is_left_to_it_for_as_long_as_changing_would_take() -> None:
    desk = Desk("a")
    desk.elsewhere = {"b"}
    assert desk.next(b=(9, 0, 0)) == Change(
        "b", "9 jobs wait for it, and another worker has it loaded", due=False
    )
    assert desk.due(b=9, c=1) == "c"
    desk = Desk("a")
    desk.elsewhere = {"b"}
    assert desk.due_after(1000, b=9) == 2 * LOAD
    desk = Desk("a", max_wait=1)
    desk.elsewhere = {"b"}
    assert desk.due_after(1000, b=9) == 1


def test_workers_with_overlapping_lists_settle_and_nobody_starves() -> None:
    """A second a job, a hundred seconds of jobs that come evenly for three models."""
    now = 0.0
    lists = {"one": "ab", "two": "bc", "three": "abc"}
    choices = {worker: Choice(MAX_WAIT, clock=lambda: now) for worker in lists}
    loaded: dict[str, str] = {}
    busy_until = dict.fromkeys(lists, 0.0)
    waiting: dict[str, list[float]] = {"a": [], "b": [], "c": []}
    loads, longest = 0, 0.0
    while now < 100 or any(waiting.values()):
        if now < 100 and now % 2 == 0:
            for came in waiting.values():
                came.append(now)
        for worker, models in lists.items():
            if busy_until[worker] > now:
                continue
            backlogs = {model: Backlog((len(waiting[model]),)) for model in models}
            elsewhere = {model for other, model in loaded.items() if other != worker}
            change = choices[worker].next(backlogs, elsewhere)
            if change is not None and change.due:
                loaded[worker], loads = change.model, loads + 1
                choices[worker].loaded(change.model, LOAD)
                busy_until[worker] = now + LOAD
            elif worker in loaded and waiting[loaded[worker]]:
                longest = max(longest, now - waiting[loaded[worker]].pop(0))
                busy_until[worker] = now + 1
        now += 1
        assert now < 200
    assert loads <= 4
    assert longest <= 2 * LOAD + 2


# Beside the best that could be done.


@dataclass(frozen=True)
class Case:
    """Jobs as (second in which they come, model); each takes a second, and a load so many.

    Some of the models are adapters of a, which take `adapt` seconds to put on or to take off.
    """

    jobs: tuple[tuple[int, str], ...]
    load: float = LOAD
    adapters: str = ""
    adapt: float = 0.25

    @property
    def bases(self) -> dict[str, str]:
        return dict.fromkeys(self.adapters, "a")

    def seconds(self, loaded: str | None, model: str) -> float:
        """What it takes to have a model in the place of another."""
        base = self.bases.get(model, model)
        if loaded is not None and base == self.bases.get(loaded, loaded):
            return self.adapt
        return self.load + self.adapt * (base != model)

    def waiting(self, now: float, done: Mapping[str, int]) -> dict[str, list[int]]:
        """Seconds in which the jobs came that wait now, the oldest first, of each model."""
        came: dict[str, list[int]] = {}
        for at, model in sorted(self.jobs):
            if at <= now:
                came.setdefault(model, []).append(at)
        return {m: ats[done.get(m, 0) :] for m, ats in came.items() if ats[done.get(m, 0) :]}

    def next_at(self, now: float) -> int | None:
        return min((at for at, _ in self.jobs if at > now), default=None)


def ours(case: Case, max_wait: float) -> tuple[float, float]:
    """Lets the choice work through a case: what its changes cost, and how long a job waits at most.

    A load costs 1, and an adapter as much less as it takes less time.
    """
    now, cost, longest, loaded = 0.0, 0.0, 0.0, None
    done: dict[str, int] = {}
    choice = Choice(max_wait, bases=case.bases, clock=lambda: now)
    while sum(done.values()) < len(case.jobs):
        waiting = case.waiting(now, done)
        change = choice.next({model: Backlog((len(ats),)) for model, ats in waiting.items()})
        if change is not None and change.due:
            seconds = case.seconds(loaded, change.model)
            now, cost, loaded = now + seconds, cost + seconds / case.load, change.model
            choice.loaded(loaded, seconds)
        elif loaded in waiting:
            longest = max(longest, now - waiting[loaded][0])
            done[loaded] = done.get(loaded, 0) + 1
            now += 1
        else:
            at = case.next_at(now)
            assert at is not None, "jobs wait and nothing is done"
            now = float(at)
    return cost, longest


def least(case: Case, longest: float) -> float:
    """The least cost of any schedule that is never idle and keeps no job waiting longer."""
    models = sorted({model for _, model in case.jobs})

    @cache
    def best(now: float, loaded: str | None, served: tuple[int, ...]) -> float:
        done = dict(zip(models, served, strict=True))
        waiting = case.waiting(now, done)
        if any(now - ats[0] > longest for ats in waiting.values()):
            return float("inf")
        if not waiting:
            at = case.next_at(now)
            return 0 if at is None else best(float(at), loaded, served)
        ways = []
        for model in waiting.keys() - {loaded}:
            seconds = case.seconds(loaded, model)
            ways.append(seconds / case.load + best(now + seconds, model, served))
        if loaded in waiting:
            more = tuple(n + (m == loaded) for m, n in zip(models, served, strict=True))
            ways.append(best(now + 1, loaded, more))
        return min(ways)

    return best(0.0, None, (0,) * len(models))


def cases(load: float = LOAD, adapters: str = "") -> Iterator[Case]:
    draw = random.Random(18)
    for number in range(60 if adapters else 200):
        spread = (0, 10, 40, 120)[number % 4]
        models = "ab" + (adapters or "c"[: number % 2])
        jobs = ((draw.randint(0, spread), draw.choice(models)) for _ in range(8))
        yield Case(tuple(jobs), load, adapters)


@pytest.mark.parametrize(
    ("max_wait", "load", "adapters", "share", "extra"),
    [
        (1e9, LOAD, "", 0.02, 1),
        (5.0, LOAD, "", 0.02, 1),
        (2.0, 0.125, "", 0.2, 3),
        (1e9, LOAD, "x", 0.02, 1),
        (2.0, 0.5, "x", 0.05, 1.5),
    ],
)
def test_changes_cost_little_beside_the_least_that_is_possible(
    max_wait: float, load: float, adapters: str, share: float, extra: float
) -> None:
    """All schedules are tried that never idle and let no job wait longer than ours did.

    They know what comes, as nobody can.
    """
    cost = fewest = most_extra = 0.0
    for case in cases(load, adapters):
        here, longest = ours(case, max_wait)
        best = least(case, longest)
        cost, fewest, most_extra = cost + here, fewest + best, max(most_extra, here - best)
    assert cost <= (1 + share) * fewest
    assert most_extra <= extra


def test_where_all_jobs_are_there_each_model_is_loaded_once() -> None:
    for case in cases():
        together = Case(tuple((0, model) for _, model in case.jobs))
        loads, _ = ours(together, 1e9)
        assert loads == len({model for _, model in case.jobs})


def test_where_all_jobs_are_there_each_base_is_loaded_once_and_each_adapter_put_on_once() -> None:
    for case in cases(adapters="xy"):
        together = Case(tuple((0, model) for _, model in case.jobs), adapters="xy")
        models = {model for _, model in case.jobs}
        bases = {together.bases.get(model, model) for model in models}
        adapters = models & {*"xy"}
        # The base alone is one more, where others come first; what comes first was loaded for it.
        fewest = len(bases) + len(adapters) * together.adapt / LOAD
        cost, _ = ours(together, 1e9)
        assert cost in (fewest, fewest + ("a" in models and bool(adapters)) * together.adapt / LOAD)


def test_the_wait_for_a_model_is_bounded_however_many_jobs_come_for_another() -> None:
    flood = [(second, "a") for second in range(300) for _ in range(2)]
    case = Case((*flood, (50, "b"), (300, "b"), (305, "b")))
    loads, _ = ours(case, 10.0)
    assert loads == 5  # there and back for each of the two times that b waits


def test_under_load_on_two_models_most_of_the_time_is_spent_on_jobs() -> None:
    case = Case(tuple((second, "ab"[second % 2]) for second in range(400)))
    loads, longest = ours(case, 1.0)
    assert loads * LOAD <= 400 / (LEAST_TURN + 1) + LOAD
    assert longest <= 1.0 + 2 * (LEAST_TURN * 2 * LOAD + LOAD) + 400 / LEAST_TURN
