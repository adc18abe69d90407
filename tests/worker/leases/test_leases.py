"""Leases: who holds a job, when it goes back, and whose answer counts."""

import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, eventually, until_idle
from redis import Redis
from redis.exceptions import ConnectionError
from rq import Queue
from rq.job import Job as RQJob
from rq.registry import StartedJobRegistry

from mlx_rq import Job, JobFailed, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import lost_from
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.options import RECOVERY_RETRIES
from mlx_rq.jobs.queue.payload import SERIALIZER, InertJob
from mlx_rq.worker.leases import keeper
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.leases.recovery import EPOCH, executions_of, reap, recover_expired

HI = [{"role": "user", "content": "Say hi."}]
QUEUE = keys.queue_name("default", "default")


def registry(connection: Redis) -> StartedJobRegistry:
    """RQ's list of the jobs that somebody works on, with the time until which each is held."""
    return StartedJobRegistry(
        QUEUE, connection=connection, serializer=SERIALIZER, job_class=InertJob
    )


def lease_ends(connection: Redis) -> dict[str, float]:
    """When the lease on each job runs out, by the clock of Redis."""
    entries = connection.zrange(registry(connection).key, 0, -1, withscores=True)
    return {entry.decode().partition(":")[0]: end - EPOCH for entry, end in entries}


def let_run_out(connection: Redis, *jobs: Job) -> None:
    """Does what time does to leases that nobody renews, and what RQ does then."""
    for entry in connection.zrange(registry(connection).key, 0, -1):
        if not jobs or entry.decode().partition(":")[0] in {job.id for job in jobs}:
            connection.zadd(registry(connection).key, {entry: 1})
    registry(connection).cleanup()


def _raise(errors: Iterator[Exception]) -> None:
    """Raises the next of some errors, if there is one."""
    if error := next(errors, None):
        raise error


def retries_left(connection: Redis, job: Job) -> int:
    return int(connection.hget(RQJob.key_for(job.id), "retries_left"))


def claims(connection: Redis, name: str = "dead", **options: Any) -> Claims:
    """The claims of a worker of which nothing else is running: one that died."""
    options = {"lease_seconds": 60, "max_wait": 30.0, **options}
    return Claims(connection, name, ["default"], **options)


@pytest.fixture
def holder(start_worker: StartWorker, connection: Redis) -> RunningWorker:
    """A worker that holds what it claims until it is told to answer.

    It recovers nothing by itself so soon: its leases, and its patience, are longer than a test.
    """
    return start_worker(FakeEngine(hold=True), name="holder")


class TestClaim:
    def test_a_claim_is_a_lease_of_the_length_that_was_asked_for(
        self, redis_url: str, connection: Redis
    ) -> None:
        job = submit(messages=HI)
        before = redis_time(connection)
        (claimed,) = claims(connection, lease_seconds=7).take(1)
        assert claimed.id == job.id
        assert before + 7 <= lease_ends(connection)[job.id] <= redis_time(connection) + 7

    def test_a_claimed_job_is_in_no_queue_and_no_other_worker_gets_it(
        self, redis_url: str, connection: Redis
    ) -> None:
        jobs = submit_many([{"messages": HI}] * 3)
        first = claims(connection, "first").take(2)
        second = claims(connection, "second").take(2)
        assert [job.id for job in first + second] == [job.id for job in jobs]
        assert claims(connection, "third").take(2) == []

    @pytest.mark.parametrize("alone", [True, False])
    def test_a_job_that_stands_in_the_queue_twice_is_claimed_once(
        self, redis_url: str, connection: Redis, alone: bool
    ) -> None:
        job, last = submit_many([{"messages": HI}] * 2)
        connection.rpush(f"rq:queue:{QUEUE}", job.id, job.id)
        claimed = claims(connection).take(9, enough=9, alone=alone)
        assert [job.id for job in claimed] == [job.id, last.id]
        assert len(lease_ends(connection)) == connection.zcard(registry(connection).key) == 2

    def test_claims_of_many_threads_at_once_never_overlap(
        self, redis_url: str, connection: Redis
    ) -> None:
        jobs = submit_many([{"prompt": str(number)} for number in range(300)])
        taken: list[str] = []
        lock = threading.Lock()

        def take(name: str) -> None:
            mine = claims(Redis.from_url(redis_url), name)
            while got := mine.take(7):
                with lock:
                    taken.extend(job.id for job in got)

        threads = [threading.Thread(target=take, args=(str(number),)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        assert sorted(taken) == sorted(job.id for job in jobs)

    def test_what_was_claimed_before_redis_went_away_is_not_forgotten(
        self, redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, mine = submit(messages=HI), claims(connection)
        mine.say_idle(1, ["default"])
        away = iter([ConnectionError("away")])
        monkeypatch.setattr(connection, "delete", lambda *names: _raise(away))
        assert [claimed.id for claimed in mine.take(1)] == [job.id]

    def test_nothing_is_claimed_where_nothing_waits(
        self, redis_url: str, connection: Redis
    ) -> None:
        assert claims(connection).take(5) == []
        assert connection.dbsize() == 0


class TestRenewal:
    def test_leases_are_renewed_while_the_worker_works(
        self, holder: RunningWorker, connection: Redis
    ) -> None:
        job = submit(messages=HI)
        holder.engine.wait_for_tasks(1)
        entry = connection.zrange(registry(connection).key, 0, -1)[0]
        connection.zadd(registry(connection).key, {entry: EPOCH + redis_time(connection) + 1})

        holder.worker._leases.renew()

        assert lease_ends(connection)[job.id] > redis_time(connection) + 50

    def test_a_short_lease_outlives_itself_as_long_as_its_worker_lives(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        worker = start_worker(FakeEngine(hold=True), lease=1)
        job = submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        first_end = lease_ends(connection)[job.id]
        eventually(lambda: lease_ends(connection)[job.id] > first_end, "a renewal")
        assert retries_left(connection, job) == 2 + RECOVERY_RETRIES

    def test_a_worker_that_makes_no_progress_renews_nothing(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        stuck = threading.Event()
        step = threading.Event()

        class Stuck(FakeEngine):
            def step(self) -> list[Any]:
                if self.added:
                    stuck.set()
                    step.wait(PATIENCE)
                return super().step()

        worker = start_worker(Stuck(hold=True), lease=1, stall=0.1)
        job = submit(messages=HI)
        assert stuck.wait(PATIENCE)
        # the lease runs out although the process lives, and its own thread gives the job back
        eventually(lambda: job.status() == "queued", "the recovery")
        assert retries_left(connection, job) == 1 + RECOVERY_RETRIES
        step.set()
        worker.engine.release()
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"

    def test_a_lost_lease_is_not_taken_back(self, holder: RunningWorker, connection: Redis) -> None:
        job = submit(messages=HI)
        holder.engine.wait_for_tasks(1)
        holder.claim_no_more()
        let_run_out(connection, job)
        holder.worker._leases.renew()
        assert lease_ends(connection) == {}
        (other,) = claims(connection, "other").take(1)

        holder.worker._leases.renew()

        leases = [entry.decode() for entry in connection.zrange(registry(connection).key, 0, -1)]
        assert leases == [f"{job.id}:{other.lease.execution_id}"]

    @pytest.mark.parametrize("put_there", [None, "x"])
    def test_leases_that_were_lost_with_the_registry_are_taken_again(
        self, holder: RunningWorker, connection: Redis, put_there: str | None
    ) -> None:
        """Else nobody would ever see that the worker died, and give its jobs back."""
        job = submit(messages=HI)
        holder.engine.wait_for_tasks(1)
        held = connection.zrange(registry(connection).key, 0, -1)
        connection.delete(registry(connection).key)
        if put_there is not None:
            connection.set(registry(connection).key, put_there)

        holder.worker._leases.renew()

        assert connection.zrange(registry(connection).key, 0, -1) == held
        assert lease_ends(connection)[job.id] > redis_time(connection)

    def test_renewals_go_on_after_a_record_that_cannot_be_read(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        worker = start_worker(FakeEngine(hold=True), lease=1)
        until_idle(connection)
        records = ["no JSON", "[]", "{}", '{"serves": 5}', "\x00"]
        for number, record in enumerate(records):
            connection.sadd("rq:workers", f"rq:worker:odd{number}")
            connection.set(keys.worker(f"odd{number}"), record)
        # and given something that nobody thought of
        describe = iter([ValueError("odd")])
        worker.worker._leases._describe = lambda: _raise(describe) or worker.worker.describe()
        job = submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        first_end = lease_ends(connection)[job.id]
        eventually(lambda: lease_ends(connection)[job.id] > first_end, "a renewal")

    def test_what_tells_of_a_lease_outlasts_the_record_of_its_worker(
        self, holder: RunningWorker, connection: Redis
    ) -> None:
        """Else nobody could tell what it held, when that record is missed."""
        job = submit(messages=HI)
        holder.engine.wait_for_tasks(1)
        (lease,) = connection.zrange(registry(connection).key, 0, -1)
        executions = executions_of(holder.name)
        for lost in (False, True):
            if lost:
                connection.delete(executions)
            holder.worker._leases.renew()
            assert connection.smembers(executions) == {lease}
            missed_at = connection.ttl(keys.worker(holder.name)) + holder.worker._leases.interval
            told_by = (
                executions,
                keys.in_flight(holder.name),
                f"rq:execution:{lease.decode()}",
                f"rq:executions:{job.id}",
            )
            assert all(connection.ttl(key) > missed_at + 50 for key in told_by)

    def test_ids_of_jobs_in_flight_are_words_as_earlier_versions_read_them(
        self, holder: RunningWorker, connection: Redis
    ) -> None:
        until_idle(connection)
        for in_flight, reading in (["a"], []), (["a", "b"], ["c"]), ([], ["c", "d"]):
            holder.worker._in_flight.say(in_flight, reading)
            said = connection.get(keys.in_flight(holder.name)).decode()
            assert said.split() == [*in_flight, "|", *reading]

    def test_a_data_set_of_which_the_id_is_no_text_ends_nothing(
        self, holder: RunningWorker, connection: Redis
    ) -> None:
        until_idle(connection)
        connection.set(keys.DATA_SET, b"\xff")
        holder.worker._leases.alone = False
        holder.worker._leases.renew()
        assert holder.worker._leases.alone

    def test_what_a_worker_held_that_died_without_a_registry_goes_back(
        self, holder: RunningWorker, connection: Redis, redis_url: str
    ) -> None:
        submit(messages=HI)
        holder.engine.wait_for_tasks(1)
        holder.claim_no_more()
        jobs = submit_many([{"prompt": "a"}, {"prompt": "b"}])
        claims(connection, "dead").take(2)
        # given one whose record ends, while the registry holds the lease on one of its jobs only
        connection.sadd("rq:workers", "rq:worker:dead")
        connection.set(keys.worker("dead"), '{"serves": ["default"]}')
        holder.worker._leases.renew()
        for entry in connection.zrange(registry(connection).key, 0, -1):
            if entry.decode().startswith(jobs[0].id):
                connection.zrem(registry(connection).key, entry)
        holder.worker._leases.renew()
        assert [job.status() for job in jobs] == ["in_progress"] * 2

        connection.delete(keys.worker("dead"))
        holder.worker._leases.renew()

        assert [job.status() for job in jobs] == ["queued", "in_progress"]


class TestRecovery:
    def test_the_jobs_of_a_dead_worker_go_back_and_count_an_attempt(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI)
        claims(connection).take(1)
        let_run_out(connection)
        assert job.status() == "queued"
        assert retries_left(connection, job) == 1 + RECOVERY_RETRIES
        start_worker()
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"

    def test_a_living_worker_recovers_them_by_itself(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI)
        claims(connection).take(1)
        (entry,) = connection.zrange(registry(connection).key, 0, -1)
        connection.zadd(registry(connection).key, {entry: 1})
        start_worker(lease=1)
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
        assert retries_left(connection, job) == 1 + RECOVERY_RETRIES

    @pytest.mark.parametrize("spoil", ["too long", "for ever", "other type"])
    def test_one_worker_at_a_time_recovers(
        self,
        holder: RunningWorker,
        connection: Redis,
        monkeypatch: pytest.MonkeyPatch,
        spoil: str,
    ) -> None:
        monkeypatch.setattr(keeper, "RECOVERY_MILLISECONDS", 60_000)
        job = submit(messages=HI)
        holder.engine.wait_for_tasks(1)
        holder.claim_no_more()
        for entry in connection.zrange(registry(connection).key, 0, -1):
            connection.zadd(registry(connection).key, {entry: 1})

        holder.worker._leases._expired._patience = 0.0
        connection.set(keys.RECOVERY, "another", px=60_000)
        holder.worker._leases._recover_expired()
        assert job.status() == "in_progress"

        # and a record that would stand for longer than it ever should
        if spoil == "too long":  # a clock was set back
            connection.pexpire(keys.RECOVERY, 3_600_000)
        elif spoil == "for ever":
            connection.set(keys.RECOVERY, "[]")
        else:
            connection.delete(keys.RECOVERY)
            connection.sadd(keys.RECOVERY, "x")
        assert job.status() == "in_progress"
        holder.worker._leases._recover_expired()
        assert job.status() == "queued"

    @pytest.mark.parametrize("how", ["ran out", "reaped", "handed back", "reaped, nothing listed"])
    def test_what_is_gone_when_it_has_to_go_back_is_told(
        self, redis_url: str, connection: Redis, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        jobs = submit_many([{"prompt": f"Say {number}."} for number in range(4)])
        dead = claims(connection)
        taken = dead.take(4)
        connection.delete(*(RQJob.key_for(job.id) for job in jobs[:2]))
        jobs[2].delete()  # by its owner: that is no loss

        returned = 0
        if how == "handed back":
            returned = dead.hand_back(taken)
        elif how.startswith("reaped"):
            connection.hset("rq:worker:dead", "queues", f"another,{QUEUE}")
            if "nothing" in how:
                connection.delete(registry(connection).key)
            returned = reap(connection, "dead")
        for lease in connection.zrange(registry(connection).key, 0, -1):
            connection.zadd(registry(connection).key, {lease: EPOCH + 1})
        returned += recover_expired(connection, [Queue(QUEUE, connection=connection)])

        assert returned == 1
        assert connection.lrange(f"rq:queue:{QUEUE}", 0, -1) == [jobs[3].id.encode()]
        (said,) = [message for message in caplog.messages if "gone" in message]
        told, _, named = said.partition(": ")
        assert told == "2 jobs were gone from Redis when they had to be queued again"
        assert sorted(named.split(", ")) == sorted(job.id for job in jobs[:2])
        assert lost_from(connection, [QUEUE])[0].jobs == 2
        assert connection.keys("rq:wip:*") + connection.keys("rq:execution*") == []

    @pytest.mark.parametrize("attempts", [1, 2, 5])
    def test_a_job_that_was_lost_with_its_worker_too_often_ends_with_an_error_object(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, attempts: int
    ) -> None:
        job = submit(messages=HI, max_attempts=attempts)
        for attempt in range(1, attempts + 1):
            (claimed,) = claims(connection).take(1)
            assert claimed.attempt == attempt
            let_run_out(connection)
        worker = start_worker()
        with pytest.raises(JobFailed) as failed:
            job.result(PATIENCE)
        assert failed.value.error["code"] == "max_attempts_exceeded"
        assert f"given up after {attempts} attempts" in str(failed.value.error["message"])
        assert list(failed.value.error) == ["message", "type", "param", "code"]
        assert worker.engine.added == []
        assert job.status() == "failed"

    def test_the_last_attempt_still_counts(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI, max_attempts=2)
        claims(connection).take(1)
        let_run_out(connection)
        start_worker()
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"


class TestWhoseAnswerCounts:
    def test_a_worker_that_lost_its_lease_cannot_answer(
        self, holder: RunningWorker, connection: Redis
    ) -> None:
        # given a job that went back into the queue and was claimed by another worker
        job = submit(messages=HI)
        holder.engine.wait_for_tasks(1)
        holder.claim_no_more()
        let_run_out(connection)
        (taken,) = claims(connection, "second").take(1)
        assert taken.id == job.id

        holder.engine.release()

        assert holder.join() == 0
        assert holder.worker.describe()["discarded"] == 1
        assert not connection.exists(keys.result(job.id))
        assert job.status() == "in_progress"
        assert connection.hget(RQJob.key_for(job.id), "worker_name") == b"second"
        assert job.id in lease_ends(connection), "the second worker's lease stands"

    def test_the_first_valid_result_stands(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        def by(name: str) -> FakeEngine:
            return FakeEngine(hold=True, answer_with=lambda task: {"object": "x", "by": name})

        job = submit(messages=HI)
        slow = start_worker(by("slow"), name="slow")
        slow.engine.wait_for_tasks(1)
        slow.claim_no_more()
        let_run_out(connection)
        quick = start_worker(by("quick"), name="quick")
        quick.engine.wait_for_tasks(1)
        quick.engine.release()
        assert job.result(PATIENCE) == {"object": "x", "by": "quick"}

        slow.engine.release()
        slow.join()

        assert job.result(0) == {"object": "x", "by": "quick"}
        assert slow.worker.describe()["discarded"] == 1
        assert connection.xlen(f"rq:results:{job.id}") == 1

    def test_a_worker_that_gets_its_own_lost_job_again_begins_afresh(
        self, holder: RunningWorker, connection: Redis
    ) -> None:
        job = submit(messages=HI)
        holder.engine.wait_for_tasks(1)
        let_run_out(connection)
        holder.engine.wait_for_tasks(2)
        assert [task.id for task in holder.engine.added] == [job.id, job.id]
        assert holder.engine.cancelled == [job.id]
        holder.engine.release()
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
        assert holder.stop() == 1
        assert lease_ends(connection) == {}

    def test_a_lost_job_is_not_handed_back_twice(
        self, holder: RunningWorker, connection: Redis
    ) -> None:
        job, kept = submit_many([{"messages": HI}] * 2)
        holder.engine.wait_for_tasks(2)
        holder.claim_no_more()
        let_run_out(connection, job)
        assert job.status() == "queued"
        holder.worker.request_stop(15, None)
        holder.join()
        queued = [value.decode() for value in connection.lrange(f"rq:queue:{QUEUE}", 0, -1)]
        assert sorted(queued) == sorted([job.id, kept.id])


@pytest.mark.parametrize("how", ["deleted", "flushed", "evicted", "evicted with all leases"])
def test_a_job_that_was_deleted_is_told_from_one_that_redis_has_lost(
    start_worker: StartWorker,
    connection: Redis,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    lost = how != "deleted"
    caplog.set_level("INFO")
    worker = start_worker(FakeEngine(hold=True), spool=tmp_path)
    job = submit(messages=HI)
    worker.engine.wait_for_tasks(1)
    # given a clock that was set back since: it has no say
    worker.worker.birth_date = datetime.now(UTC) + timedelta(hours=1)
    if how == "flushed":
        connection.flushall()
        worker.worker._leases.renew()
        assert "Redis lost its data" in caplog.text
    elif how.startswith("evicted"):
        leases = [registry(connection).key] if "leases" in how else []
        connection.delete(RQJob.key_for(job.id), *leases)
    else:
        # which is a cancellation first: given that the worker does not hear of that
        worker.worker.request_stop_execution = lambda execution_id: None  # type: ignore[method-assign]
        job.delete()

    worker.engine.release()

    eventually(lambda: worker.worker.describe()["discarded"] == 1, "the answer")
    assert (f"job {job.id}: Redis has lost it; its answer is in" in caplog.text) is lost
    assert (f"job {job.id}: answer discarded (the job was deleted)" in caplog.text) is not lost
    assert (tmp_path / "unplaced" / f"{job.id}.json").exists() is lost
    assert connection.keys("rq:wip:*") + connection.keys("rq:execution*") == []


def test_everything_about_a_lease_can_be_said_in_json(holder: RunningWorker) -> None:
    assert json.loads(json.dumps(holder.worker.describe()))["model"] == "fake"


def test_a_worker_that_died_before_it_was_registered_is_reaped_with_the_rights_of_one(
    connection: Redis, redis_url: str
) -> None:
    keys_of_workers = ["~mlx-rq:*", "~rq:worker:*", "~rq:workers", "~rq:workers:mlx-rq:*"]
    whole = ["reset", "on", ">p", "+@all", *keys_of_workers]
    connection.execute_command("ACL", "SETUSER", "reaper", *whole)
    with Redis.from_url(redis_url.replace("redis://", "redis://reaper:p@")) as limited:
        assert reap(limited, "died-early") == 0
