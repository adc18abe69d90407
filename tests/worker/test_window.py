"""How much a worker claims, and what it leaves to others."""

from fakes import PATIENCE, FakeEngine, StartWorker, eventually
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import submit_many
from mlx_rq.engine.interface import Task
from mlx_rq.jobs.openai.validation import validate
from mlx_rq.jobs.queue import keys
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.window import Window

BODY = {"prompt": "Once", "max_tokens": 4}


def task(number: int) -> Task:
    return Task(str(number), validate("completion", BODY))


class Desk:
    """A window, the engine that it looks at, and a clock."""

    def __init__(self, *, holds: int = 0, **options: int) -> None:
        self.engine = FakeEngine(capacity=4, hold=True)
        self.now = 100.0
        self.window = Window(self.engine, WorkerOptions(**options), clock=lambda: self.now)
        self.held = 0
        self.take(holds)

    def take(self, count: int) -> None:
        first = len(self.engine.added)
        self.engine.add([task(first + number) for number in range(count)])
        self.held += count

    def next(self, *, alone: bool = True) -> int:
        return self.window.next_piece(self.held, alone=alone).jobs

    def fill(self, *, alone: bool = True) -> list[int]:
        """Claims from an endless queue, until the window wants no more."""
        pieces = []
        while (jobs := self.next(alone=alone)) > 0:
            pieces.append(jobs)
            self.take(jobs)
            self.window.claimed(jobs)
        return pieces


def test_an_idle_worker_claims_much_at_once_and_fills_up_beside_decoding() -> None:
    desk = Desk(window=300)
    assert desk.fill() == [256, 16, 16, 12]


def test_the_prompts_that_wait_bound_the_window() -> None:
    desk = Desk(window=300, window_tokens=2800)  # 10 tokens each, and 4 sequences run
    assert sum(desk.fill()) == 256 + 2 * 16


def test_a_full_window_is_filled_up_only_where_many_places_are_free() -> None:
    desk = Desk(window=300)
    desk.fill()
    desk.held -= 63
    assert desk.fill() == []
    desk.held -= 1
    assert desk.fill() == [16, 16, 16, 16]


def test_claims_in_vain_take_a_small_part_of_the_time_beside_what_runs() -> None:
    desk = Desk()
    for holds in (0, 2):  # less than a batch waits
        desk.take(holds)
        desk.next()
        desk.now += 0.1
        desk.window.claimed(0)
        assert (desk.next() > 0) == (holds == 0)
    desk.now += 0.89
    assert desk.next() == 0
    desk.now += 0.02
    assert desk.next() > 0


def test_a_redis_that_was_slow_once_keeps_no_job_waiting() -> None:
    desk = Desk()
    desk.take(2)
    desk.next()
    desk.now += 4.0
    desk.window.claimed(0)
    assert desk.next() == 0
    desk.now += 1.01
    assert desk.next() > 0


def test_a_piece_takes_about_as_long_as_a_step() -> None:
    desk = Desk(window=1000)
    desk.take(desk.next())  # all at once: nothing runs yet
    pieces = []
    for seconds_of_a_job in [0.1] * 5 + [0.001] * 7:
        desk.now += 1.0  # a step
        pieces.append(desk.next())
        desk.take(pieces[-1])
        desk.now += seconds_of_a_job * pieces[-1]
        desk.window.claimed(pieces[-1])
    assert pieces[:5] == [16, 8, 8, 8, 8]
    assert pieces[5:] == [8, 16, 32, 64, 64, 64, 64]


def test_an_empty_queue_is_not_asked_at_every_step_where_enough_waits() -> None:
    desk = Desk(holds=10)
    assert desk.next() == 16
    desk.window.claimed(0)
    assert desk.next() == 0
    desk.now += 1.0
    assert desk.next() == 16


def test_a_worker_with_free_places_asks_at_every_step() -> None:
    desk = Desk(holds=2)
    for _ in range(3):
        assert desk.next() == 16
        desk.window.claimed(0)


def test_where_others_share_the_queues_a_worker_claims_only_what_it_needs_soon() -> None:
    assert Desk().fill(alone=False) == [64]  # what comes in between waits for all of it
    desk = Desk(holds=6)  # 4 run
    assert desk.next(alone=False) == 16
    desk.take(2)
    assert desk.next(alone=False) == 0


def test_what_waits_beyond_free_places_is_shared_once_a_second() -> None:
    desk = Desk(holds=4)
    assert desk.window.to_give_back() == 0
    desk.take(5)
    assert desk.window.to_give_back() == 3
    assert desk.window.to_give_back() == 0
    desk.now += 1.0
    assert desk.window.to_give_back() == 3


def test_who_gave_back_takes_nothing_for_a_while_unless_nothing_waits() -> None:
    desk = Desk(holds=6)
    desk.window.gave_back()
    assert desk.next() == 0
    assert Desk(holds=4).next() == 16
    desk.now += 2.0
    assert desk.next() == 16


def test_an_idle_worker_gets_part_of_what_waits_in_another(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    busy = start_worker(FakeEngine(capacity=2, hold=True))
    busy.engine.spares = True
    jobs = submit_many([BODY] * 10)
    busy.engine.wait_for_tasks(10)

    idle = start_worker(FakeEngine(capacity=16, hold=True))

    idle.engine.wait_for_tasks(4)
    given = {task.id for task in idle.engine.added}
    assert given <= {job.id for job in jobs[2:]}  # not those that run
    eventually(lambda: not any(job_id in busy.engine.task_ids for job_id in given), "letting go")
    assert not connection.exists(keys.idle("fake"))  # it is busy now, and says so
    for worker in (busy, idle):
        worker.engine.release()
    for job in jobs:
        assert job.result(PATIENCE)["choices"][0]["text"] == f"text for {job.id}"
    left = {connection.hget(RQJob.key_for(job.id), "retries_left") for job in jobs}
    assert len(left) == 1  # it was an attempt for none


def test_what_says_for_ever_that_a_worker_is_idle_is_deleted(connection: Redis) -> None:
    mine = Claims(connection, "mine", ["a", "b", "c"], lease_seconds=60, max_wait=30.0)
    connection.set(keys.idle("a"), "gone")
    connection.set(keys.idle("b"), "gone", ex=60)
    connection.set(keys.idle("c"), "mine", ex=60)
    assert mine.idle_models() == {"b"}
    assert not connection.exists(keys.idle("a"))
    assert connection.exists(keys.idle("b"), keys.idle("c")) == 2
