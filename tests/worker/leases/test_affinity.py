"""Several workers on one queue: jobs that begin alike go to the worker that computed it."""

from collections.abc import Sequence
from typing import Any

from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, eventually
from redis import Redis

from mlx_rq import submit, submit_many
from mlx_rq.engine.interface import Task
from mlx_rq.jobs.queue.affinity import affinity_of
from mlx_rq.worker.leases.claim import Claims

LONG = "You know this document by heart. " * 20


def body(document: str, number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": LONG + document},
            {"role": "user", "content": f"Question {number}"},
        ]
    }


def documents(tasks: Sequence[Task]) -> list[str]:
    return [task.request.messages[0].content[-1] for task in tasks]  # type: ignore[union-attr]


def two_workers(start_worker: StartWorker, **options: Any) -> tuple[RunningWorker, RunningWorker]:
    """Two workers that know of each other and are idle."""
    engines = FakeEngine(capacity=4, hold=True), FakeEngine(capacity=4, hold=True)
    first, second = (start_worker(engine, lease=8, **options) for engine in engines)
    for running in (first, second):
        eventually(lambda r=running: not r.worker._leases.alone, "hearing of the other worker")  # type: ignore[misc]
        # A claim may be on its way that was begun before: two more turns of its loop.
        steps = running.engine.steps
        running.ring()
        running.engine.wait_until(lambda engine, at=steps: engine.steps >= at + 2)  # type: ignore[misc]
    return first, second


def test_each_document_goes_to_one_worker(redis_url: str, start_worker: StartWorker) -> None:
    first, second = two_workers(start_worker)

    submit_many([body("AB"[number % 2], number) for number in range(40)])

    eventually(lambda: len(first.engine.added) + len(second.engine.added) == 40, "claiming all")
    shares = {frozenset(documents(worker.engine.added)) for worker in (first, second)}
    assert shares == {frozenset("A"), frozenset("B")}


def test_later_jobs_go_to_who_has_their_beginning(
    redis_url: str, start_worker: StartWorker
) -> None:
    first, second = two_workers(start_worker)
    submit_many([body("AB"[number % 2], number) for number in range(20)])
    eventually(lambda: len(first.engine.added) + len(second.engine.added) == 20, "claiming all")
    owner = {documents(worker.engine.added)[0]: worker for worker in (first, second)}
    for worker in (first, second):
        worker.engine.release()

    jobs = submit_many([body("A", number) for number in range(100, 103)])

    for job in jobs:
        job.result(timeout=PATIENCE)
    assert {task.id for task in owner["A"].engine.added} >= {job.id for job in jobs}


def test_an_idle_worker_takes_a_batch_full_from_another(
    redis_url: str, start_worker: StartWorker
) -> None:
    first, second = two_workers(start_worker)
    submit_many([body("A", number) for number in range(8)])
    eventually(lambda: first.engine.added or second.engine.added, "a claim")  # type: ignore[arg-type,return-value]
    owner, other = (first, second) if first.engine.added else (second, first)
    eventually(lambda: owner.engine.waiting >= owner.engine.capacity, "a full owner")

    submit_many([body("A", number) for number in range(100, 108)])

    other.engine.wait_for_tasks(8)
    assert documents(other.engine.added) == ["A"] * 8


def test_a_job_that_waited_too_long_is_taken_by_anybody(
    redis_url: str, start_worker: StartWorker
) -> None:
    first, second = two_workers(start_worker, max_wait=0.5)
    submit_many([body("A", number) for number in range(8)])
    eventually(lambda: first.engine.added or second.engine.added, "a claim")  # type: ignore[arg-type,return-value]
    owner, other = (first, second) if first.engine.added else (second, first)
    eventually(lambda: owner.engine.waiting >= owner.engine.capacity, "a full owner")

    submit_many([body("A", 100)])  # one alone is not worth a second prefill, but it must not starve

    other.engine.wait_for_tasks(1)
    assert other.engine.added[0].id not in {task.id for task in owner.engine.added}


def test_jobs_without_a_long_beginning_are_divided(
    redis_url: str, start_worker: StartWorker
) -> None:
    first, second = two_workers(start_worker)
    submit_many([{"prompt": f"Say {number}"} for number in range(16)])

    eventually(lambda: len(first.engine.added) + len(second.engine.added) == 16, "claiming all")
    assert min(len(first.engine.added), len(second.engine.added)) >= 4


def test_what_counts_as_a_beginning() -> None:
    assert affinity_of(body("A", 1)) == affinity_of(body("A", 2)) != affinity_of(body("B", 1))
    assert affinity_of({"messages": [{"role": "user", "content": "short"}]}) == ""
    prompt = "x" * 1000
    assert affinity_of({"prompt": prompt + "a"}) == affinity_of({"prompt": prompt + "b"}) != ""
    assert (
        affinity_of({"prompt": [1, 2, 3] * 200}) == affinity_of({"prompt": [1, 2, 3] * 300}) != ""
    )
    named = [{}, {"model": "m"}, {"model": "n"}, {"model": "m", "adapters": "x"}]
    assert len({affinity_of({**body("A", 1), **one}) for one in named}) == len(named)
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": "A"}]
    assert affinity_of({"messages": [{"role": "system", "content": parts}]}) == affinity_of(
        {"messages": [{"role": "system", "content": LONG + "A"}]}
    )


def test_a_worker_that_was_alone_keeps_its_beginnings_when_another_comes(
    redis_url: str, start_worker: StartWorker
) -> None:
    first = start_worker(FakeEngine(capacity=4), lease=8)
    for job in submit_many([body("A", number) for number in range(3)]):
        job.result(timeout=PATIENCE)
    second = start_worker(FakeEngine(capacity=4), lease=8)
    for running in (first, second):
        eventually(lambda r=running: not r.worker._leases.alone, "hearing of the other worker")  # type: ignore[misc]

    for job in submit_many([body("A", number) for number in range(100, 103)]):
        job.result(timeout=PATIENCE)

    assert not second.engine.added


def test_a_lone_job_does_not_wait_for_all_that_a_worker_has_computed_the_beginning_of(
    redis_url: str, connection: Redis
) -> None:
    first, second = (
        Claims(connection, name, ["default"], lease_seconds=60, max_wait=30.0)
        for name in ("first", "second")
    )

    def taken(claims: Claims) -> list[str]:
        return [job.id for job in claims.take(40, enough=8, alone=False)]

    submit(**body("B", 0))
    assert len(taken(second)) == 1
    submit_many([body("A", number) for number in range(200)])
    assert len(taken(first)) == 40
    lone = [submit(prompt=f"What is {number}?").id for number in range(12)]
    of_the_second = submit(**body("B", 1)).id

    claims = [taken(first), taken(first)]

    assert [[id for id in some if id in lone] for some in claims] == [lone[:5], lone[5:10]]
    assert [len(some) for some in claims] == [40, 40]
    assert taken(second)[:3] == [*lone[10:], of_the_second]


def test_few_that_begin_alike_stay_together(redis_url: str, connection: Redis) -> None:
    claims = Claims(connection, "first", ["default"], lease_seconds=60, max_wait=30.0)
    few = [submit(**body("A", number)).id for number in range(8)]
    taken = [job.id for job in claims.take(40, enough=2, alone=False)]
    assert taken == few
