"""The producer's end of a job: status, result, cancel, fetch, as_completed."""

import json
import math
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, eventually, failure
from pydantic import BaseModel
from redis import Redis
from redis.client import Pipeline
from rq import Queue
from rq.job import Job as RQJob
from rq.registry import CanceledJobRegistry

from mlx_rq import (
    Job,
    JobFailed,
    JobNotFound,
    NotParsed,
    RequestError,
    ResultTimeout,
    as_completed,
    cancel_many,
    fetch,
    submit,
    submit_many,
)
from mlx_rq.jobs.client import job as job_module
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.finish import finish_job
from mlx_rq.jobs.queue.payload import SERIALIZER

HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture
def worker(start_worker: StartWorker) -> RunningWorker:
    """A worker that answers at once."""
    return start_worker()


@pytest.fixture
def held(start_worker: StartWorker) -> RunningWorker:
    """A worker that answers when it is told to."""
    return start_worker(FakeEngine(hold=True, capacity=1000))


ANSWER = {"object": "chat.completion", "choices": [{"message": {}, "finish_reason": "stop"}]}


def finish(connection: Redis, job: Job) -> None:
    """Ends a job as a worker does."""
    finish_job(
        connection,
        connection,
        job_id=job.id,
        queue_name=keys.queue_name("default", "default"),
        ending="finished",
        outcome=ANSWER,
        result_ttl=60,
    )


class TestResult:
    def test_the_answer_is_returned_when_it_comes(self, worker: RunningWorker) -> None:
        job = submit(messages=HI)
        response = job.result(timeout=PATIENCE)
        assert response["object"] == "chat.completion"
        assert response["choices"][0]["message"]["content"] == f"chat for {job.id}"

    def test_a_waiting_reader_is_woken_by_the_answer(
        self, held: RunningWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # given a reader whose blocking read does not end by itself
        monkeypatch.setattr(job_module, "_LONGEST_BLOCK", 3600.0)
        job = submit(messages=HI)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(job.result)
            held.engine.wait_for_tasks(1)
            # when
            held.engine.release()
            # then it is woken
            assert answer.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"

    def test_a_hundred_and_fifty_threads_may_wait_at_once(self, held: RunningWorker) -> None:
        # redis-py's pool gives out no more than a hundred connections unless it is told otherwise
        jobs = submit_many([{"messages": HI}] * 150)
        with ThreadPoolExecutor(150) as pool:
            answers = [pool.submit(job.result, PATIENCE) for job in jobs]
            held.engine.wait_for_tasks(150)
            held.engine.release()
            ids = [answer.result(PATIENCE)["id"] for answer in answers]
        assert ids == [f"chatcmpl-{job.id}" for job in jobs]

    def test_an_end_between_two_questions_to_redis_is_not_misread(
        self, redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # given a job that ends right after the first answer that its reader gets from Redis
        job = submit(messages=HI)
        ending = iter([lambda: finish(connection, job)])

        def then_end(name: str, owner: Any) -> None:
            ask = getattr(owner, name)

            def ask_then_end(*arguments: Any, **options: Any) -> Any:
                answer = ask(*arguments, **options)
                if end := next(ending, None):
                    end()
                return answer

            monkeypatch.setattr(owner, name, ask_then_end)

        then_end("execute_command", Redis)
        then_end("execute", Pipeline)

        assert job.result(timeout=PATIENCE) == ANSWER

    def test_it_can_be_read_again(self, worker: RunningWorker) -> None:
        job = submit(messages=HI)
        assert job.result(PATIENCE) == job.result(0) == fetch(job.id).result(0)

    def test_any_language_can_poll_the_key(self, worker: RunningWorker, connection: Redis) -> None:
        job = submit(messages=HI)
        response = job.result(PATIENCE)
        assert json.loads(connection.get(f"mlx-rq:result:{job.id}")) == response

    def test_an_error_object_is_raised(self, start_worker: StartWorker) -> None:
        start_worker(FakeEngine(answer_with=lambda task: failure("some_code", "No such luck.")))
        job = submit(messages=HI)
        with pytest.raises(JobFailed) as failed:
            job.result(PATIENCE)
        assert failed.value.job_id == job.id
        assert failed.value.error == {
            "message": "No such luck.",
            "type": "invalid_request_error",
            "param": None,
            "code": "some_code",
        }
        assert str(failed.value) == f"job {job.id}: No such luck."
        assert job.status() == "failed"

    def test_an_answer_that_speaks_of_an_error_is_still_an_answer(
        self, start_worker: StartWorker
    ) -> None:
        # as a Response of OpenAI's does, in its own field
        answer = {"id": "resp_1", "object": "response", "error": None, "output": []}
        answer["status"] = "completed"
        start_worker(FakeEngine(answer_with=lambda task: answer))
        job = submit(messages=HI)
        assert job.result(PATIENCE) == answer
        assert job.status() == "completed"

    def test_no_answer_in_time(self, redis_url: str) -> None:
        job = submit(messages=HI)
        started = time.monotonic()
        with pytest.raises(ResultTimeout) as late:
            job.result(timeout=0.2)
        assert time.monotonic() - started >= 0.2
        assert str(late.value) == (
            f"job {job.id} has no result within 0.2 s: queued (no live worker serves the model "
            "'default': start one with `mlx-rq worker`)"
        )
        assert job.status() == "queued", "the job itself goes on"

    def test_a_timeout_is_a_timeout_error_to_those_who_catch_that(self, redis_url: str) -> None:
        with pytest.raises(TimeoutError):
            submit(messages=HI).result(timeout=0)

    def test_zero_only_looks(self, held: RunningWorker) -> None:
        job = submit(messages=HI)
        held.engine.wait_for_tasks(1)
        with pytest.raises(ResultTimeout, match=r"within 0 s: in_progress$"):
            job.result(timeout=0)

    @pytest.mark.parametrize("timeout", ["5", True, math.nan, [5]])
    def test_what_is_no_length_of_time_is_refused(self, redis_url: str, timeout: Any) -> None:
        job = submit(messages=HI)
        expected = re.escape(
            "Invalid 'timeout': expected seconds, or None for no limit, "
            f"but got {timeout!r} instead."
        )
        for call in (
            job.result,
            job.parsed,
            lambda timeout: [*as_completed([job], timeout=timeout)],
        ):
            with pytest.raises(RequestError, match=expected):
                call(timeout)

    @pytest.mark.parametrize("timeout", [10**400, math.inf], ids=["endless", "infinite"])
    def test_longer_than_anybody_can_wait_is_no_limit(
        self, worker: RunningWorker, timeout: Any
    ) -> None:
        job = submit(messages=HI)
        assert job.result(timeout)["id"] == f"chatcmpl-{job.id}"
        assert list(as_completed([job], timeout=timeout)) == [job]

    def test_several_blocking_reads_make_one_wait(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_module, "_LONGEST_BLOCK", 0.05)
        started = time.monotonic()
        with pytest.raises(ResultTimeout):
            submit(messages=HI).result(timeout=0.2)
        assert time.monotonic() - started >= 0.2

    def test_an_unknown_id(self, redis_url: str) -> None:
        with pytest.raises(JobNotFound) as missing:
            Job("none").result(timeout=1)
        assert missing.value.job_id == "none"
        assert "not found" in str(missing.value)

    def test_a_job_whose_result_has_passed_its_time_to_live(
        self, worker: RunningWorker, connection: Redis
    ) -> None:
        job = submit(messages=HI)
        job.result(PATIENCE)
        connection.delete(keys.result(job.id), RQJob.key_for(job.id))  # as their TTL would
        with pytest.raises(JobNotFound, match="its result has passed its time to live"):
            job.result(timeout=1)

    @pytest.mark.parametrize("how", ["failed", "canceled", "stopped"])
    def test_a_job_that_rq_ended_without_us_has_still_one_visible_end(
        self, redis_url: str, connection: Redis, how: str
    ) -> None:
        job = submit(messages=HI)
        connection.hset(RQJob.key_for(job.id), "status", how)
        with pytest.raises(JobFailed, match="ended by RQ itself") as failed:
            job.result(timeout=PATIENCE)
        assert failed.value.error["code"] == "abandoned"
        assert failed.value.error["type"] == "server_error"
        assert list(failed.value.error) == ["message", "type", "param", "code"]

    def test_a_result_that_redis_has_lost_is_told(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        start_worker()
        job = submit(messages=HI)
        job.result(PATIENCE)
        connection.delete(keys.result(job.id))
        with pytest.raises(JobFailed, match="The result of the job is gone from Redis") as failed:
            job.result(timeout=PATIENCE)
        assert failed.value.error["code"] == "job_lost"


class TestParsed:
    class Person(BaseModel):
        name: str
        age: int

    @pytest.fixture
    def answering(self, start_worker: StartWorker) -> Iterator[list[str]]:
        """A list of one: the text that the worker answers with."""
        texts = ["{}"]

        def answer(task: Any) -> dict[str, Any]:
            message = {"role": "assistant", "content": texts[0]}
            return {
                "object": "chat.completion",
                "choices": [{"message": message, "finish_reason": "stop"}],
            }

        start_worker(FakeEngine(answer_with=answer))
        return iter([texts])  # type: ignore[return-value]

    def test_a_class_gives_an_instance(self, answering: Iterator[list[str]]) -> None:
        next(answering)[0] = '{"name": "Ada", "age": 36}'
        job = Job(submit(messages=HI).id, schema=self.Person)
        assert job.parsed(PATIENCE) == self.Person(name="Ada", age=36)

    def test_a_json_schema_gives_the_plain_value(self, answering: Iterator[list[str]]) -> None:
        next(answering)[0] = '{"name": "Ada"}'
        job = Job(submit(messages=HI).id, schema={"type": "object"})
        assert job.parsed(PATIENCE) == {"name": "Ada"}

    def test_a_text_that_does_not_fit_is_an_error_that_carries_it(
        self, answering: Iterator[list[str]]
    ) -> None:
        next(answering)[0] = '{"name": "Ada"}'
        job = Job(submit(messages=HI).id, schema=self.Person)
        with pytest.raises(NotParsed, match="age") as fault:
            job.parsed(PATIENCE)
        assert fault.value.text == '{"name": "Ada"}'


class TestStatus:
    def test_a_job_passes_from_queued_to_in_progress_to_completed(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI)
        assert job.status() == "queued"
        worker = start_worker(FakeEngine(hold=True))
        worker.engine.wait_for_tasks(1)
        assert job.status() == "in_progress"
        worker.engine.release()
        job.result(PATIENCE)
        assert job.status() == "completed"

    def test_all_that_is_known(self, redis_url: str, start_worker: StartWorker) -> None:
        job = submit(messages=HI, model="fake", priority="high")
        info = job.info()
        created = info.pop("created_at")
        assert created.startswith("20")
        assert info == {
            "id": job.id,
            "status": "queued",
            "model": "fake",
            "priority": "high",
            "started_at": None,
            "ended_at": None,
            "worker": None,
            "note": "no live worker serves the model 'fake': "
            "start one with `mlx-rq worker --model fake`",
        }
        worker = start_worker(FakeEngine(hold=True), name="mac-1")
        worker.engine.wait_for_tasks(1)
        info = job.info()
        assert (info["status"], info["worker"], info["note"]) == ("in_progress", "mac-1", None)
        assert info["started_at"] >= created
        assert info["ended_at"] is None
        worker.engine.release()
        job.result(PATIENCE)
        info = job.info()
        assert info["status"] == "completed"
        assert info["ended_at"] >= info["started_at"]

    def test_a_job_that_waits_for_a_busy_worker_needs_no_note(
        self, start_worker: StartWorker
    ) -> None:
        worker = start_worker(FakeEngine(hold=True), window=1)
        submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        waiting = submit(messages=HI)
        assert waiting.info()["status"] == "queued"
        assert waiting.info()["note"] is None

    def test_an_unknown_id(self, redis_url: str) -> None:
        for ask in (Job("none").status, Job("none").info, lambda: fetch("none")):
            with pytest.raises(JobNotFound):
                ask()

    def test_another_programs_job_in_the_same_redis_is_not_one_of_ours(
        self, redis_url: str, connection: Redis
    ) -> None:
        foreign = Queue("emails", connection=connection).enqueue("smtplib.send")
        job = Job(foreign.id)
        for ask in (job.info, lambda: fetch(foreign.id).info(), job.cancel, job.delete):
            with pytest.raises(JobNotFound):
                ask()
        assert foreign.get_status() == "queued"

    @pytest.mark.parametrize("status", ["scheduled", "deferred", "created", "rate_limited"])
    def test_rqs_other_states_mean_that_the_job_waits(
        self, redis_url: str, connection: Redis, status: str
    ) -> None:
        job = submit(messages=HI)
        connection.hset(RQJob.key_for(job.id), "status", status)
        assert job.status() == "queued"

    def test_an_id_that_redis_cannot_be_asked_for_is_not_found(self, redis_url: str) -> None:
        with pytest.raises(JobNotFound, match=r"job '\\udcff' not found"):
            fetch("\udcff")

    @pytest.mark.parametrize("job_id", [3, None, b"a"])
    def test_what_is_no_text_is_no_id(self, redis_url: str, job_id: Any) -> None:
        with pytest.raises(TypeError, match="expected the id of a job, a text, but got "):
            fetch(job_id)

    def test_jobs_are_equal_where_they_name_the_same_job(self, redis_url: str) -> None:
        job = submit(messages=HI)
        assert fetch(job.id) == job
        assert len({job, fetch(job.id), submit(messages=HI)}) == 2
        assert job != job.id
        assert repr(job) == f"Job('{job.id}')"


CANCELLED = {
    "message": "The job was cancelled.",
    "type": "cancelled",
    "param": None,
    "code": "cancelled",
}


class TestCancel:
    def test_a_queued_job_ends_and_leaves_the_queue(
        self, redis_url: str, connection: Redis
    ) -> None:
        job, other = submit_many([{"messages": HI}] * 2)

        assert job.cancel() is True

        assert job.status() == "cancelled"
        with pytest.raises(JobFailed) as failed:
            job.result(timeout=0)
        assert failed.value.error == CANCELLED
        queue = Queue(keys.queue_name("default", "default"), connection=connection)
        assert queue.job_ids == [other.id]
        registry = CanceledJobRegistry(queue.name, connection=connection, serializer=SERIALIZER)
        assert registry.get_job_ids() == [job.id]

    def test_a_cancelled_job_is_never_generated(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        job, other = submit_many([{"messages": HI}] * 2)
        job.cancel()
        worker = start_worker()
        other.result(PATIENCE)
        assert [task.id for task in worker.engine.added] == [other.id]

    def test_a_running_job_ends_at_once_and_the_engine_forgets_it(
        self, held: RunningWorker
    ) -> None:
        job = submit(messages=HI)
        held.engine.wait_for_tasks(1)

        assert job.cancel() is True

        assert job.status() == "cancelled"
        with pytest.raises(JobFailed) as failed:
            job.result(timeout=0)
        assert failed.value.error == CANCELLED
        held.engine.wait_until(lambda engine: engine.cancelled == [job.id])

    def test_a_finished_job_keeps_its_answer(self, worker: RunningWorker) -> None:
        job = submit(messages=HI)
        response = job.result(PATIENCE)
        assert job.cancel() is False
        assert job.result(0) == response
        assert job.status() == "completed"

    def test_cancelling_twice_says_that_it_had_ended(self, redis_url: str) -> None:
        job = submit(messages=HI)
        assert [job.cancel(), job.cancel()] == [True, False]

    def test_an_unknown_id(self, redis_url: str, connection: Redis) -> None:
        with pytest.raises(JobNotFound):
            Job("none").cancel()
        assert connection.dbsize() == 0

    def test_who_waits_for_the_result_is_woken(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_module, "_LONGEST_BLOCK", 3600.0)
        job = submit(messages=HI)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(job.result)
            job.cancel()
            with pytest.raises(JobFailed, match="cancelled"):
                waiting.result(PATIENCE)

    def test_the_end_is_kept_as_long_as_the_job_asked_for(
        self, redis_url: str, connection: Redis
    ) -> None:
        job = submit(messages=HI, result_ttl=77)
        job.cancel()
        for key in (keys.result(job.id), RQJob.key_for(job.id)):
            assert 70 < connection.ttl(key) <= 77


class TestAsCompleted:
    def test_jobs_come_as_they_end_not_as_they_were_submitted(self, held: RunningWorker) -> None:
        jobs = submit_many([{"messages": HI}] * 4)
        held.engine.wait_for_tasks(4)
        ending = as_completed(jobs, timeout=PATIENCE)
        order = []
        for position in (2, 0, 3, 1):
            held.engine.release(jobs[position].id)
            order.append(next(ending))
        assert order == [jobs[2], jobs[0], jobs[3], jobs[1]]
        assert list(ending) == []

    def test_jobs_that_had_ended_before_come_at_once(self, held: RunningWorker) -> None:
        done, open_ = submit_many([{"messages": HI}] * 2)
        held.engine.wait_for_tasks(2)
        held.engine.release(done.id)
        done.result(PATIENCE)
        ending = as_completed([open_, done], timeout=PATIENCE)
        assert next(ending) == done
        held.engine.release()
        assert next(ending) == open_

    def test_failed_cancelled_and_unknown_jobs_end_too(self, start_worker: StartWorker) -> None:
        failed, cancelled = submit_many([{"messages": HI}] * 2)
        cancelled.cancel()
        start_worker(FakeEngine(answer_with=lambda task: failure("no")))
        ended = list(as_completed([failed, cancelled, Job("none")], timeout=PATIENCE))
        assert set(ended) == {failed, cancelled, Job("none")}
        assert failed.status() == "failed"

    def test_a_job_that_is_named_twice_comes_once(self, worker: RunningWorker) -> None:
        job = submit(messages=HI)
        assert list(as_completed([job, fetch(job.id)], timeout=PATIENCE)) == [job]

    def test_thousands_of_jobs(self, redis_url: str, connection: Redis) -> None:
        jobs = submit_many([{"prompt": str(number)} for number in range(2500)])
        cancel_many(jobs[:1200])
        ending = as_completed(jobs, timeout=PATIENCE)
        before = {next(ending) for _ in range(1200)}
        cancel_many(jobs[1200:])
        assert before == set(jobs[:1200])
        assert set(ending) == set(jobs[1200:])

    def test_nothing_to_wait_for(self) -> None:
        assert list(as_completed([])) == []

    def test_some_that_do_not_end_in_time(self, held: RunningWorker) -> None:
        jobs = submit_many([{"messages": HI}] * 3)
        held.engine.wait_for_tasks(3)
        held.engine.release(jobs[1].id)
        jobs[1].result(PATIENCE)
        ending = as_completed(jobs, timeout=0.3)
        assert next(ending) == jobs[1]
        with pytest.raises(ResultTimeout, match=r"2 jobs have not ended within 0\.3 s"):
            next(ending)

    def test_an_end_that_the_stream_did_not_tell_is_seen_a_little_later(
        self, redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_module, "_LONGEST_BLOCK", 0.05)
        job = submit(messages=HI)
        ending = as_completed([job], timeout=PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(next, ending)
            connection.hset(RQJob.key_for(job.id), "status", "failed")  # as RQ's own clean-up does
            assert ended.result(PATIENCE) == job

    def test_a_job_that_vanishes_is_seen_while_others_go_on_ending(
        self, redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Given a stream that is never silent for as long as one blocking read."""
        monkeypatch.setattr(job_module, "_LONGEST_BLOCK", 0.3)
        job = submit(messages=HI)
        ending = as_completed([job], timeout=PATIENCE)
        over = threading.Event()

        def tell_of_others() -> None:
            while not over.wait(0.02):
                connection.xadd(keys.COMPLETIONS, {"job": "another", "status": "finished"})

        with ThreadPoolExecutor(2) as pool:
            ended = pool.submit(next, ending)
            eventually(lambda: any(c["cmd"] == "xread" for c in connection.client_list()))
            pool.submit(tell_of_others)
            connection.delete(RQJob.key_for(job.id))
            try:
                assert ended.result(PATIENCE) == job
            finally:
                over.set()

    def test_ids_are_no_jobs(self, redis_url: str) -> None:
        job = submit(messages=HI)
        ids: list[Any] = [job, job.id]
        for call in (lambda: list(as_completed(ids)), lambda: cancel_many(ids)):
            with pytest.raises(TypeError, match=f"expected jobs, .* but got '{job.id}'"):
                call()
        assert job.status() == "queued"

    def test_jobs_of_two_servers_are_refused(self, redis_url: str) -> None:
        with pytest.raises(ValueError, match="live in 2 Redis servers"):
            list(as_completed([Job("a", redis_url), Job("b", "redis://elsewhere:1/0")]))
