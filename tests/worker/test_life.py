"""A job's whole way, with a real Valkey and an engine that answers as it is told."""

import base64
import json
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from fakes import (
    PATIENCE,
    FakeEngine,
    RunningWorker,
    StartWorker,
    eventually,
    failure,
    until_idle,
)
from openai import OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion
from redis import Redis
from rq.command import send_stop_execution_command, send_stop_job_command
from rq.job import Job as RQJob
from rq.suspension import resume, suspend
from rq.worker import BaseWorker

from mlx_rq import Job, JobFailed, as_completed, submit, submit_many
from mlx_rq.engine.interface import DeviceExhausted
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.overview import overview
from mlx_rq.jobs.queue.payload import SERIALIZER
from mlx_rq.jobs.queue.workers import live_workers, workers_for

HI = [{"role": "user", "content": "Say hi."}]
BODY = {"messages": HI}

RunWorker = Callable[..., AbstractContextManager[RunningWorker]]


def client(response: dict[str, Any]) -> OpenAI:
    """OpenAI's own client, in strict validation, talking to a server that answers this."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=response))
    return OpenAI(
        api_key="none",
        base_url="http://localhost/v1",
        http_client=httpx.Client(transport=transport),
        _strict_response_validation=True,
    )


class TestAnswers:
    def test_a_chat_answer_is_what_openais_client_takes(self, start_worker: StartWorker) -> None:
        start_worker()
        job = submit(messages=HI)
        response = job.result(PATIENCE)

        chat = client(response).chat.completions.create(model="m", messages=HI)  # type: ignore[arg-type]

        assert isinstance(chat, ChatCompletion)
        assert chat.choices[0].message.content == f"chat for {job.id}"
        assert chat.choices[0].finish_reason == "stop"
        assert chat.usage is not None
        assert chat.usage.total_tokens == 5

    def test_a_completion_is_what_openais_client_takes(self, start_worker: StartWorker) -> None:
        start_worker()
        job = submit(prompt="Once")
        response = job.result(PATIENCE)

        completion = client(response).completions.create(model="m", prompt="Once")

        assert isinstance(completion, Completion)
        assert completion.choices[0].text == f"text for {job.id}"
        assert completion.choices[0].finish_reason == "length"

    def test_the_engine_gets_the_request_as_it_was_sent(self, start_worker: StartWorker) -> None:
        worker = start_worker()
        submit(messages=HI, temperature=0.5, seed=7, stop="x").result(PATIENCE)
        (task,) = worker.engine.added
        assert task.request.model_dump(exclude_unset=True) == {
            "messages": HI,
            "temperature": 0.5,
            "seed": 7,
            "stop": "x",
        }

    def test_every_job_is_committed_when_it_is_finished_not_at_the_end_of_the_window(
        self, start_worker: StartWorker
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        jobs = submit_many([BODY] * 3)
        worker.engine.wait_for_tasks(3)
        worker.engine.release(jobs[1].id)
        assert jobs[1].result(PATIENCE)["id"] == f"chatcmpl-{jobs[1].id}"
        assert [job.status() for job in jobs] == ["in_progress", "completed", "in_progress"]

    def test_an_error_of_the_engine_fails_its_job_alone(self, start_worker: StartWorker) -> None:
        def refuse(task: Any) -> dict[str, Any] | None:
            too_long = len(task.request.prompt) > 10
            return failure("context_length_exceeded", "Too long.") if too_long else None

        start_worker(FakeEngine(refuse=refuse))
        good, bad, other = submit_many([{"prompt": "a"}, {"prompt": "a" * 11}, {"prompt": "b"}])

        with pytest.raises(JobFailed) as failed:
            bad.result(PATIENCE)
        assert failed.value.error["code"] == "context_length_exceeded"
        assert good.result(PATIENCE)["object"] == "text_completion"
        assert other.result(PATIENCE)["object"] == "text_completion"

    def test_text_that_utf8_cannot_say_ends_the_job_not_the_worker(
        self, start_worker: StartWorker
    ) -> None:
        # half of a surrogate pair, as a model may write with a JSON escape
        choice = {"text": "\ud83d", "finish_reason": "stop"}
        answer = {"object": "text_completion", "choices": [choice]}
        texts = iter([answer, failure("odd", "\ud83d")])
        worker = start_worker(FakeEngine(answer_with=lambda task: next(texts)))
        assert submit(messages=HI).result(PATIENCE) == {
            "object": "text_completion",
            "choices": [{"text": "?", "finish_reason": "stop"}],
        }
        with pytest.raises(JobFailed) as failed:
            submit(messages=HI).result(PATIENCE)
        assert failed.value.error["message"] == "?"
        assert worker.stop() == 2


class TestOrder:
    def test_more_urgent_jobs_are_claimed_first_then_older_ones(
        self, redis_url: str, running_worker: RunWorker
    ) -> None:
        submitted = [
            submit(messages=HI, priority=priority)  # type: ignore[arg-type]
            for priority in ("low", "default", "high", "low", "high", "default")
        ]
        with running_worker(burst=True) as worker:
            worker.join()
        low, default, high, low_2, high_2, default_2 = (job.id for job in submitted)
        order = [high, high_2, default, default_2, low, low_2]
        assert [task.id for task in worker.engine.added] == order
        assert [task.rank for task in worker.engine.added] == [0, 0, 1, 1, 2, 2]

    def test_a_worker_claims_no_more_than_its_window(self, start_worker: StartWorker) -> None:
        worker = start_worker(FakeEngine(hold=True), window=3)
        jobs = submit_many([BODY] * 5)
        first = worker.engine.wait_for_tasks(3)
        assert first == [job.id for job in jobs[:3]]
        assert [job.status() for job in jobs[3:]] == ["queued"] * 2
        # and as soon as one has ended it claims the next, so that the batch stays full
        worker.engine.release(first[1])
        assert worker.engine.wait_for_tasks(4)[3] == jobs[3].id

    def test_a_worker_claims_nothing_while_a_full_batch_waits(
        self, start_worker: StartWorker
    ) -> None:
        worker = start_worker(FakeEngine(hold=True, capacity=2), window=100)
        submit_many([BODY] * 4)
        worker.engine.wait_for_tasks(4)
        late = submit(messages=HI)
        worker.ring()
        worker.engine.release(*[task.id for task in worker.engine.added[:1]])
        worker.engine.wait_for_tasks(5)
        assert late.status() == "in_progress"


class TestNames:
    def test_a_worker_serves_its_model_its_other_names_and_default(
        self, start_worker: StartWorker
    ) -> None:
        worker = start_worker(FakeEngine("org/model"), served_names=["short", "gpt-4o"])
        names = ["org/model", "short", "gpt-4o", "default", None]
        jobs = [submit(messages=HI, model=name) for name in names]
        assert [job.result(PATIENCE)["object"] for job in jobs] == ["chat.completion"] * 5
        assert worker.worker.models == ["org/model", "short", "gpt-4o", "default"]

    def test_a_job_for_another_model_waits_for_its_worker(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        start_worker(FakeEngine("a"))
        for_b = submit(messages=HI, model="b")
        submit(messages=HI, model="a").result(PATIENCE)
        assert for_b.status() == "queued"
        assert for_b.info()["note"] is not None
        start_worker(FakeEngine("b"))
        assert for_b.result(PATIENCE)["id"] == f"chatcmpl-{for_b.id}"

    def test_two_workers_of_one_model_share_the_work_and_no_job_is_done_twice(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        first = start_worker(FakeEngine("m", hold=True, capacity=4), window=4)
        second = start_worker(FakeEngine("m", hold=True, capacity=4), window=4)
        jobs = submit_many([{**BODY, "model": "m"} for _ in range(40)])
        for worker in (first, second):
            worker.ring()
            worker.engine.wait_for_tasks(1)
            worker.engine.release()
        assert set(as_completed(jobs, timeout=PATIENCE)) == set(jobs)
        done = [task.id for worker in (first, second) for task in worker.engine.added]
        assert sorted(done) == sorted(job.id for job in jobs)
        assert first.stop() + second.stop() == 40

    def test_a_name_that_is_taken_by_a_live_worker_is_refused(
        self, start_worker: StartWorker, redis_url: str, running_worker: RunWorker
    ) -> None:
        first = start_worker(name="mac-1")
        submit(messages=HI).result(PATIENCE)
        with running_worker(name="mac-1") as second, pytest.raises(ValueError, match="mac-1"):
            second.join()
        assert submit(messages=HI).result(PATIENCE)["object"] == "chat.completion"
        assert first.stop() == 2


class TestEnds:
    def test_burst_ends_when_the_queues_are_empty(
        self, redis_url: str, running_worker: RunWorker
    ) -> None:
        jobs = submit_many([BODY] * 20)
        with running_worker(burst=True, window=6) as worker:
            assert worker.join() == 20
        assert {job.status() for job in jobs} == {"completed"}

    def test_burst_on_empty_queues_ends_at_once(
        self, redis_url: str, running_worker: RunWorker
    ) -> None:
        with running_worker(burst=True) as worker:
            assert worker.join() == 0

    def test_max_jobs_ends_after_so_many_and_claims_no_more(
        self, redis_url: str, running_worker: RunWorker
    ) -> None:
        jobs = submit_many([BODY] * 5)
        with running_worker(max_jobs=3) as worker:
            assert worker.join() == 3
        statuses = [job.status() for job in jobs]
        assert statuses == ["completed"] * 3 + ["queued"] * 2

    def test_a_stop_finishes_what_runs_and_claims_no_more(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        worker = start_worker(FakeEngine(hold=True), window=1)
        running, waiting = submit_many([BODY] * 2)
        worker.engine.wait_for_tasks(1)

        worker.ask_to_stop()
        worker.engine.release()

        assert worker.join() == 1
        assert (running.status(), waiting.status()) == ("completed", "queued")

    def test_what_is_not_finished_within_the_grace_is_handed_back_in_order(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        jobs = submit_many([BODY] * 5)
        before = rq_fields(connection, jobs[1])
        worker = start_worker(FakeEngine(hold=True), window=4, grace=0.2)
        worker.engine.wait_for_tasks(4)
        worker.engine.release(jobs[2].id)
        jobs[2].result(PATIENCE)

        assert worker.stop() == 1

        queue = worker.worker.claims.queues[3 + 0].name
        assert queue.startswith("mlx-rq:")
        default = f"rq:queue:{keys.queue_name('default', 'default')}"
        waiting = [value.decode() for value in connection.lrange(default, 0, -1)]
        assert waiting == [jobs[0].id, jobs[1].id, jobs[3].id, jobs[4].id]
        assert [job.status() for job in jobs if job is not jobs[2]] == ["queued"] * 4
        # as if it had never been claimed: no attempt is counted, no lease is left
        after = rq_fields(connection, jobs[1])
        assert after["retries_left"] == before["retries_left"]
        for field in ("status", "started_at", "worker_name"):
            assert after[field] == before[field], field
        assert leases(connection) == 0
        # and the next worker does them
        with_next = start_worker()
        assert set(as_completed(jobs, timeout=PATIENCE)) == set(jobs)
        assert [task.id for task in with_next.engine.added] == waiting

    def test_a_second_signal_hands_back_at_once(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        worker = start_worker(FakeEngine(hold=True), grace=1000)
        job = submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        assert worker.stop_at_once() == 0
        assert job.status() == "queued"

    def test_an_engine_that_dies_takes_the_worker_with_it_but_no_job(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        jobs = submit_many([BODY] * 2)
        worker.engine.wait_for_tasks(2)

        worker.engine.fail_next_step(RuntimeError("out of memory"))

        with pytest.raises(RuntimeError, match="out of memory"):
            worker.join()
        assert [job.status() for job in jobs] == ["queued"] * 2
        assert leases(connection) == 0
        assert live_workers(connection) == []
        assert BaseWorker.all_keys(connection) == []
        start_worker()
        assert [job.result(PATIENCE)["object"] for job in jobs] == ["chat.completion"] * 2

    def test_a_device_on_which_nothing_works_is_no_attempt_of_any_job(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI, max_attempts=1)
        for _ in range(2):
            worker = start_worker(FakeEngine(hold=True))
            worker.engine.wait_for_tasks(1)
            worker.engine.fail_next_step(DeviceExhausted("[METAL] Insufficient Memory"))
            with pytest.raises(DeviceExhausted):
                worker.join()
            assert job.status() == "queued"
        start_worker()
        assert job.result(PATIENCE)["object"] == "chat.completion"


def rq_fields(connection: Redis, job: Job) -> dict[str, bytes]:
    fields = connection.hgetall(RQJob.key_for(job.id))
    return {name.decode(): value for name, value in fields.items()}


def leases(connection: Redis) -> int:
    """How many leases are recorded anywhere."""
    patterns = ("rq:wip:*", "rq:execution:*", "rq:executions:*", "rq:worker:*:executions")
    return sum(1 for pattern in patterns for _ in connection.scan_iter(pattern))


class TestSuspension:
    def test_a_suspended_worker_claims_nothing_until_it_is_resumed(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        worker = start_worker()
        until_idle(connection)
        suspend(connection)
        job = submit(messages=HI)
        # the wake-up is answered, twice, and still nothing is claimed
        for _ in range(2):
            eventually(
                lambda: not connection.exists(keys.wake_up("default")), "an answer to the wake-up"
            )
            worker.ring()
        assert job.status() == "queued"

        resume(connection)
        worker.ring()

        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"

    def test_what_runs_is_finished(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        job = submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        suspend(connection)
        worker.engine.release()
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"

    def test_a_suspended_burst_ends_and_leaves_the_jobs(
        self, redis_url: str, running_worker: RunWorker, connection: Redis
    ) -> None:
        suspend(connection)
        job = submit(messages=HI)
        with running_worker(burst=True) as worker:
            assert worker.join() == 0
        assert job.status() == "queued"


class TestCancellation:
    @pytest.mark.parametrize("by", ["its execution", "its id"])
    def test_rqs_own_stop_command_ends_a_running_job(
        self, redis_url: str, start_worker: StartWorker, connection: Redis, by: str
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        job, other = submit_many([BODY] * 2)
        worker.engine.wait_for_tasks(2)
        (execution,) = connection.zrange(f"rq:executions:{job.id}", 0, -1)

        if by == "its execution":
            send_stop_execution_command(connection, job.id, execution.decode())
        else:
            send_stop_job_command(connection, job.id, serializer=SERIALIZER)

        with pytest.raises(JobFailed) as failed:
            job.result(PATIENCE)
        assert failed.value.error == {
            "message": "The job was cancelled.",
            "type": "cancelled",
            "param": None,
            "code": "cancelled",
        }
        assert job.status() == "cancelled"
        assert worker.engine.cancelled == [job.id]
        worker.engine.release()
        assert other.result(PATIENCE)["id"] == f"chatcmpl-{other.id}"

    def test_an_unknown_execution_is_ignored(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        worker = start_worker()
        worker.worker.request_stop_execution("none")
        assert submit(messages=HI).result(PATIENCE)["object"] == "chat.completion"

    @pytest.mark.parametrize(
        "said", [b"\xff", b"{", b"[]", b"{}", b'{"command": 3}', b'{"command": "stop-execution"}']
    )
    def test_is_heard_after_a_command_that_is_none(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, said: bytes
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        job = submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        for command in (said, b'{"command": "kill-horse"}', b'{"command": "stop-job"}'):
            assert connection.publish(f"rq:pubsub:{worker.worker.name}", command) == 1
        assert worker.engine.cancelled == []
        job.cancel()
        eventually(lambda: worker.engine.cancelled == [job.id], "that the engine hears of it")

    def test_an_answer_that_comes_after_the_cancellation_is_discarded(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        job = submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        # given that the worker does not hear of the cancellation
        worker.worker.request_stop_execution = lambda execution_id: None  # type: ignore[method-assign]
        assert job.cancel() is True
        worker.engine.release()
        assert worker.stop() == 0
        assert job.status() == "cancelled"
        with pytest.raises(JobFailed, match="cancelled"):
            job.result(0)
        assert worker.worker.describe()["discarded"] == 1

    def test_a_job_that_takes_too_long_ends_with_request_timeout(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        slow = submit(messages=HI, timeout=0.1)
        patient = submit(messages=HI, timeout=1000)
        with pytest.raises(JobFailed) as failed:
            slow.result(PATIENCE)
        assert failed.value.error == {
            "message": "The job did not finish within its timeout of 0.1 seconds.",
            "type": "server_error",
            "param": "timeout",
            "code": "request_timeout",
        }
        assert slow.status() == "failed"
        assert worker.engine.cancelled == [slow.id]
        worker.engine.release()
        assert patient.result(PATIENCE)["id"] == f"chatcmpl-{patient.id}"

    def test_a_timeout_does_not_count_while_a_job_waits_inside_the_worker(
        self, redis_url: str, start_worker: StartWorker
    ) -> None:
        # given a batch of one row, a job that holds it, and one behind it
        worker = start_worker(FakeEngine(hold=True, capacity=1))
        now = 0.0
        worker.worker._held._cancellations._clock = lambda: now
        first, patient = (submit(messages=HI, timeout=timeout) for timeout in (None, 30))
        worker.engine.wait_for_tasks(2)
        for now, turn in ((1000.0, False), (1001.0, True), (1030.0, True), (1032.0, True)):
            if turn:
                worker.engine.release(first.id)
                first.result(PATIENCE)
            worker.take_turns()
            assert worker.engine.cancelled == ([] if now < 1031 else [patient.id]), now
        with pytest.raises(JobFailed, match="within its timeout of 30"):
            patient.result(PATIENCE)


class TestTimeToLive:
    @pytest.mark.parametrize("code", [None, "no_luck"])
    def test_all_that_is_left_of_a_job_goes_when_its_result_goes(
        self, redis_url: str, start_worker: StartWorker, connection: Redis, code: str | None
    ) -> None:
        start_worker(FakeEngine(refuse=lambda task: failure(code) if code is not None else None))
        job = submit(messages=HI, result_ttl=77)
        eventually(lambda: job.status() in ("completed", "failed"), "the end")
        left = {key.decode() for key in connection.scan_iter(f"*{job.id}*")}
        assert left == {keys.result(job.id), RQJob.key_for(job.id), f"rq:results:{job.id}"}
        for key in left:
            assert 70 < connection.ttl(key) <= 77, key

    def test_a_waiting_job_does_not_expire(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        job = submit(messages=HI, result_ttl=77)
        assert connection.ttl(RQJob.key_for(job.id)) == -1
        start_worker(FakeEngine(hold=True)).engine.wait_for_tasks(1)
        assert connection.ttl(RQJob.key_for(job.id)) == -1


def stored(connection: Redis) -> dict[str, bytes]:
    """Every value in Redis, by where it lies."""
    values: dict[str, bytes] = {}
    for key in connection.scan_iter():
        name = key.decode()
        match connection.type(key).decode():
            case "string":
                values[name] = connection.get(key)
            case "hash":
                values |= {f"{name} {at.decode()}": v for at, v in connection.hgetall(key).items()}
            case "stream":
                for number, (_, entry) in enumerate(connection.xrange(key)):
                    values |= {f"{name} {number} {at.decode()}": v for at, v in entry.items()}
            case "zset":
                values[name] = b" ".join(connection.zrange(key, 0, -1))
            case "list":
                values[name] = b" ".join(connection.lrange(key, 0, -1))
            case "set":
                values[name] = b" ".join(connection.smembers(key))
    return values


def test_nothing_in_redis_is_pickled_and_prompts_lie_only_in_payloads(
    redis_url: str, start_worker: StartWorker, connection: Redis
) -> None:
    secret = [{"role": "user", "content": "a secret " * 100}]
    worker = start_worker(
        FakeEngine(refuse=lambda task: failure("no") if task.request.seed == 1 else None)
    )
    bodies: list[dict[str, Any]] = [{"messages": secret, "seed": number} for number in (1, 2)]
    answered = list(as_completed(submit_many(bodies), timeout=PATIENCE))
    worker.engine.hold()
    running = submit(messages=secret, idempotency_key="a secret key", timeout=1000)
    worker.engine.wait_for_tasks(3)
    cancelled = submit(messages=secret)
    cancelled.cancel()

    values = stored(connection)

    payloads = [where for where in values if where.endswith(" data")]
    assert {where.split()[0] for where in payloads} == {
        RQJob.key_for(job.id) for job in (*answered, running, cancelled)
    }
    for where in payloads:
        function, _, _, arguments = json.loads(zlib.decompress(values.pop(where)))
        assert function.startswith("mlx_rq.")
        assert arguments["body"]["messages"] == secret
    for where in [where for where in values if where.endswith((" return_value", " exc_string"))]:
        value = base64.b64decode(values.pop(where))
        if where.endswith(" return_value"):
            assert set(json.loads(value)) == {"result_key"}
        else:
            assert zlib.decompress(value).decode().partition(":")[0] in ("no", "cancelled")
    for where, value in values.items():
        assert "secret" not in where
        assert b"secret" not in value, where
        assert value.decode().isprintable(), where


class TestRecords:
    def test_a_live_worker_says_what_it_serves_and_has_done(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        worker = start_worker(
            FakeEngine("org/m", hold=True, capacity=7), served_names=["m"], name="mac-1"
        )
        job = submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        (record,) = live_workers(connection)
        assert record["name"] == "mac-1"
        assert record["model"] == "org/m"
        assert record["serves"] == ["org/m", "m", "default"]
        assert record["fingerprint"] == "fp_fake"
        assert record["capacity"] == 7
        assert record["discarded"] == 0
        assert 0 < connection.ttl(keys.worker("mac-1")) <= 2 * 60
        for model in ("org/m", "m", "default"):
            assert [w["name"] for w in workers_for(connection, model)] == ["mac-1"]
        assert workers_for(connection, "other") == []

        worker.engine.release()
        job.result(PATIENCE)
        submit(messages=HI).result(PATIENCE)  # its commit says what was there before it
        (record,) = live_workers(connection)
        assert record["ended"] >= 1
        assert record["running"] == 0

        worker.stop()
        assert live_workers(connection) == []
        assert workers_for(connection, "m") == []
        assert not connection.exists(keys.worker("mac-1"))

    def test_a_worker_that_died_is_no_live_worker(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        start_worker(name="mac-1")
        submit(messages=HI).result(PATIENCE)
        until_idle(connection)  # till then it may write its record once more
        connection.delete(keys.worker("mac-1"))  # as its time to live would
        assert live_workers(connection) == []

    def test_the_overview_counts_every_queue(
        self, redis_url: str, start_worker: StartWorker, connection: Redis
    ) -> None:
        nothing = overview(connection)
        assert nothing.pop("limits").keys() == {"jobs", "bytes"}
        assert nothing == {"queues": [], "workers": [], "notes": []}

        submit(messages=HI, model="b", priority="low")
        submit(messages=HI, model="b", priority="high")
        submit(messages=HI, model="a").cancel()
        worker = start_worker(
            FakeEngine(
                "a", hold=True, refuse=lambda task: failure("no") if task.request.seed else None
            ),
            name="mac-1",
        )
        failed, done, running = submit_many(
            [{**BODY, "model": "a", "seed": 1}, {**BODY, "model": "a"}, {**BODY, "model": "a"}]
        )
        worker.engine.wait_for_tasks(3)
        worker.engine.release(done.id)
        for job in (failed, done):
            eventually(lambda job=job: job.status() in ("completed", "failed"))  # type: ignore[misc]

        seen = overview(connection)

        def counts(model: str, priority: str, *numbers: int) -> dict[str, Any]:
            names = ("queued", "in_progress", "completed", "failed", "cancelled")
            return {"model": model, "priority": priority, **dict(zip(names, numbers, strict=True))}

        assert seen["queues"] == [
            counts("a", "default", 0, 1, 1, 1, 1),
            counts("b", "high", 1, 0, 0, 0, 0),
            counts("b", "low", 1, 0, 0, 0, 0),
        ]
        assert [record["name"] for record in seen["workers"]] == ["mac-1"]
        assert seen["notes"] == ["jobs wait for 'b', which no live worker serves"]
        assert json.dumps(seen)
        assert running.status() == "in_progress"

    def test_foreign_queues_are_left_out_of_the_overview(
        self, redis_url: str, connection: Redis
    ) -> None:
        for name in ("emails", "a:b:c", "mlx-rq:m:urgent", "mlx-rq:m"):
            connection.sadd("rq:queues", f"rq:queue:{name}")
        assert overview(connection)["queues"] == []
