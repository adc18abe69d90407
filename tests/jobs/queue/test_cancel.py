"""Many jobs are cancelled at once: each ends once, and what is left is counted right."""

from pathlib import Path
from typing import Any

import pytest
from batch_helpers import batch_lines, write_jsonl
from fakes import PATIENCE, FakeEngine, StartWorker
from redis import Redis
from rq import Queue

from mlx_rq import Job, JobFailed, as_completed, cancel_many, submit, submit_many
from mlx_rq.jobs.batch.batch import Batch, BatchOptions
from mlx_rq.jobs.batch.files import Outputs
from mlx_rq.jobs.batch.lines import BatchFile
from mlx_rq.jobs.batch.state import open_state, state_of
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import waiting_in
from mlx_rq.jobs.queue.limits import limits_in_use
from mlx_rq.jobs.queue.unfinished import unfinished_jobs
from mlx_rq.worker.leases.claim import Claims

QUEUE = keys.queue_name("default", "default")
LONG = 8_100
"""Jobs in a list that is too long to be searched for each of hundreds."""


def bodies(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Say {number}."} for number in range(count)]


def claims_of(connection: Redis) -> Claims:
    connection.set(keys.worker("w"), "{}")  # it lives
    return Claims(connection, "w", ["default"], lease_seconds=60, max_wait=30)


def in_backlog(connection: Redis) -> int:
    rounds = (f"mlx-rq:backlog:{QUEUE}", f"mlx-rq:backlog-next:{QUEUE}")
    return sum(connection.zcard(name) for name in rounds)


def listed(connection: Redis) -> list[str]:
    return [job_id.decode() for job_id in connection.lrange(f"rq:queue:{QUEUE}", 0, -1)]


@pytest.mark.parametrize("count", [10, LONG])
def test_those_that_were_named_end_and_the_others_wait(
    redis_url: str, connection: Redis, count: int
) -> None:
    jobs = submit_many(bodies(count))
    kept = jobs[::9]
    named = [job for job in jobs if job not in set(kept)]

    assert cancel_many(named) == named

    assert waiting_in(connection, [QUEUE]) == [len(kept)]
    assert limits_in_use(connection)["jobs"]["waiting"] == len(kept)
    assert listed(connection) == [job.id for job in kept]
    assert in_backlog(connection) == len(kept)
    assert connection.hget(keys.backlog_state(QUEUE), "stale") is None
    assert set(as_completed(named[:100] + named[-100:], timeout=PATIENCE)) >= {named[0], named[-1]}
    with pytest.raises(JobFailed, match="The job was cancelled") as ended:
        named[1].result(timeout=0)
    assert ended.value.error["code"] == "cancelled"
    assert (kept[0].status(), kept[-1].status()) == ("queued", "queued")
    canceled = Queue(QUEUE, connection=connection).canceled_job_registry
    assert canceled.get_job_count(cleanup=False) == len(named)
    assert cancel_many(named) == []
    assert cancel_many(kept) == kept
    assert (listed(connection), in_backlog(connection)) == ([], 0)


def test_a_job_whose_status_says_nothing_waits_like_the_others(
    redis_url: str, connection: Redis
) -> None:
    jobs = submit_many(bodies(LONG))
    kept, named = jobs[7], jobs[8]
    for job in (kept, named):
        connection.hset(f"rq:job:{job.id}", "status", "odd")
    cancel_many([*jobs[:7], *jobs[9:]])
    assert set(listed(connection)) == {kept.id, named.id}
    assert cancel_many([named], only_waiting=True) == [named]
    assert (waiting_in(connection, [QUEUE]), in_backlog(connection)) == ([1], 1)


def test_what_waits_stays_counted_right_where_a_worker_takes_from_a_long_backlog(
    redis_url: str, connection: Redis
) -> None:
    jobs = submit_many(bodies(LONG))
    claims = claims_of(connection)
    claimed = {job.id for job in claims.take(256)}
    claims.hand_back(claims.take(100))  # these stand in the list twice
    taken = [job for job in jobs if job.id in claimed]

    ended = cancel_many(jobs[:5000], only_waiting=True)

    assert set(ended) == set(jobs[:5000]) - set(taken)
    assert waiting_in(connection, [QUEUE]) == [LONG - 256 - len(ended)]
    left = []
    while some := claims.take(256):
        left += some
    assert {job.id for job in left} == {job.id for job in jobs} - claimed - {j.id for j in ended}
    assert waiting_in(connection, [QUEUE]) == [0]


def test_no_step_is_longer_than_a_moment(redis_url: str, connection: Redis) -> None:
    """However long the queue is: a step looks at so many jobs and entries, and no more."""
    jobs = submit_many(bodies(LONG))
    connection.config_resetstat()

    cancel_many(jobs)

    calls = connection.info("commandstats")
    steps = calls["cmdstat_evalsha"]["calls"] - calls["cmdstat_evalsha"]["failed_calls"]
    assert steps >= LONG / 250 + LONG / 2000 - 1
    # One search through the list for each piece of it, none for each job.
    assert calls["cmdstat_lrem"]["calls"] <= LONG / 2000 + 1


def test_running_ones_are_ended_and_their_worker_told_unless_only_those_that_wait_are_meant(
    start_worker: StartWorker,
) -> None:
    worker = start_worker(FakeEngine(hold=True), window=2)
    running = submit_many(bodies(2))
    worker.engine.wait_for_tasks(2)
    waiting = submit(prompt="Hi.")

    assert cancel_many([*running, waiting], only_waiting=True) == [waiting]
    assert cancel_many([*running, waiting]) == running

    worker.engine.wait_until(lambda engine: len(engine.cancelled) == 2)


def test_others_jobs_unknown_ones_and_keys_of_another_type_are_passed_by(
    redis_url: str, connection: Redis
) -> None:
    foreign = Queue("emails", connection=connection).enqueue("smtplib.send")
    connection.set("rq:job:odd", "something else")
    job = submit(prompt="Hi.")
    named = [Job(foreign.id), Job("none"), Job("odd"), Job("50% [x]*"), job, Job(job.id)]
    assert cancel_many(named) == [job]
    assert foreign.get_status() == "queued"
    assert cancel_many([]) == []


def test_jobs_of_two_servers_are_refused(redis_url: str) -> None:
    with pytest.raises(ValueError, match="live in 2 Redis servers"):
        cancel_many([Job("a", redis_url), Job("b", "redis://elsewhere:1/0")])


def test_unfinished_ones_are_found_by_model_and_state(
    connection: Redis, start_worker: StartWorker
) -> None:
    worker = start_worker(FakeEngine("a", hold=True), window=1)
    runs = submit(prompt="Hi.", model="a").id
    worker.engine.wait_for_tasks(1)
    waits = submit(prompt="Hi.", model="a").id
    high = submit(prompt="Hi.", model="b", priority="high").id
    ended = submit(prompt="Hi.", model="b")
    ended.cancel()

    def found(**which: Any) -> set[str]:
        return set(unfinished_jobs(connection, **which))

    assert found() == {runs, waits, high}
    assert found(only_waiting=True) == {waits, high}
    assert found(model="a") == {runs, waits}
    assert found(model="a", only_waiting=True) == {waits}
    assert found(model="b") == {high}
    assert found(batch="x") == set()


def test_the_jobs_of_a_batch_are_found_by_its_run(
    redis_url: str, connection: Redis, tmp_path: Path
) -> None:
    submit(prompt="Hi.")
    path = write_jsonl(tmp_path / "in.jsonl", batch_lines(3))
    output = tmp_path / "out.jsonl"
    with open_state(state_of(output), "out.jsonl") as state:
        source = BatchFile(path, path.name, {})
        batch = Batch(source, Outputs(output, None), state, BatchOptions())
        batch.run(Batch.stop)
    found = unfinished_jobs(connection, batch=state.run)
    assert len(found) == 3
    assert len(unfinished_jobs(connection)) == 4
