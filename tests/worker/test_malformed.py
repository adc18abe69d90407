"""What somebody put into the queue by hand: it fails alone, is never run; its neighbours live."""

import json
import os
import pickle
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, eventually
from redis import Redis
from rq import Queue
from rq.job import Job as RQJob
from rq.registry import StartedJobRegistry
from rq.webhook import Webhook

from mlx_rq import Job, JobFailed, submit
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.options import RECOVERY_RETRIES
from mlx_rq.jobs.queue.payload import FUNCTION, SERIALIZER, InertJob
from mlx_rq.jobs.queue.workers import live_workers
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.leases.recovery import reap, recover_expired

HI = [{"role": "user", "content": "Say hi."}]
QUEUE = keys.queue_name("default", "default")
GOOD = [FUNCTION, None, [], {"kind": "chat", "body": {"messages": HI}}]


def packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def put(connection: Redis, job_id: str, **fields: Any) -> Job:
    """Puts a job into the queue by hand, with the fields of a good one but for those given."""
    record = {
        "status": "queued",
        "origin": QUEUE,
        "created_at": "2026-01-01T00:00:00.000000Z",
        "enqueued_at": "2026-01-01T00:00:00.000000Z",
        "data": packed(GOOD),
        "timeout": "-1",
        **fields,
    }
    connection.hset(
        RQJob.key_for(job_id),
        mapping={name: value for name, value in record.items() if value is not None},
    )
    connection.rpush(f"rq:queue:{QUEUE}", job_id)
    return Job(job_id)


def claims(connection: Redis) -> Claims:
    """The claims of a worker named w."""
    return Claims(connection, "w", ["default"], lease_seconds=60, max_wait=30.0)


class TouchesAFile:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


PAYLOADS: dict[str, bytes | None] = {
    "no data": None,
    "empty": b"",
    "not compressed": json.dumps(GOOD).encode(),
    "cut off": packed(GOOD)[:-6],
    "bomb": zlib.compress(b'["' + b" " * (64 * 1024 * 1024) + b'"]', 1),
    "not JSON": zlib.compress(b"[1, 2"),
    "nested too deep": zlib.compress(b"[" * 100_000),
    "another function": packed(["os.system", None, ["touch /tmp/x"], {}]),
    "no arguments": packed([FUNCTION, None, [], {}]),
    "no object": packed([FUNCTION, None, [], {"kind": "chat", "body": 5}]),
}
SURROGATE = {"name": "f", "parameters": {"enum": ["\ud800"]}}
BODIES: dict[str, tuple[str, dict[str, Any], str | None, str | None]] = {
    "out of range": ("chat", {"messages": HI, "top_p": 7}, "decimal_above_max_value", "top_p"),
    "no messages": ("chat", {}, "missing_required_parameter", "messages"),
    "unknown kind": ("video", {"messages": HI}, "invalid_value", "kind"),
    "lone surrogate": ("chat", {"messages": HI, "\ud800": 1}, "invalid_value", r"\ud800"),
    "endless number in a schema": (
        "completion",
        {"prompt": "x", "guided_json": {"multipleOf": 10**400}},
        None,
        "guided_json",
    ),
    "lone surrogate in a schema": (
        "chat",
        {"messages": HI, "tools": [{"type": "function", "function": SURROGATE}]},
        "invalid_function_parameters",
        "tools[0].function.parameters",
    ),
    "lone surrogate in a role": (
        "chat",
        {"messages": [{"role": "\ud800", "content": "x"}]},
        "invalid_value",
        "messages[0].role",
    ),
}


def fails_alone(
    connection: Redis, start_worker: StartWorker, job_id: str = "bad", **fields: Any
) -> dict[str, Any]:
    """Puts a job between two good ones; those must be answered. Returns its error object."""
    before = submit(messages=HI)
    bad = put(connection, job_id, **fields)
    after = submit(messages=HI)
    worker = start_worker()
    for job in (before, after):
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
    with pytest.raises(JobFailed) as failed:
        bad.result(PATIENCE)
    assert bad.status() == "failed"
    assert worker.stop() == 3
    assert [task.id for task in worker.engine.added] == [before.id, after.id]
    assert list(failed.value.error) == ["message", "type", "param", "code"]
    return failed.value.error


class TestPayloads:
    @pytest.mark.parametrize("data", PAYLOADS.values(), ids=PAYLOADS.keys())
    def test_a_payload_that_is_none_of_ours_fails_alone(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, data: bytes | None
    ) -> None:
        error = fails_alone(connection, start_worker, data=data)
        assert (error["code"], error["param"]) == ("invalid_payload", None)
        assert error["message"].startswith("The payload is not a job of mlx-rq: ")

    def test_a_pickle_is_not_loaded(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, tmp_path: Path
    ) -> None:
        trap = tmp_path / "trap"
        data = pickle.dumps((FUNCTION, None, (), {"kind": "chat", "body": TouchesAFile(trap)}))
        error = fails_alone(connection, start_worker, data=zlib.compress(data))
        assert error["code"] == "invalid_payload"
        assert not trap.exists()
        pickle.loads(data)
        assert trap.exists(), "it would have been made"

    @pytest.mark.parametrize(("kind", "body", "code", "param"), BODIES.values(), ids=BODIES.keys())
    def test_a_body_is_validated_again(
        self,
        redis_url: str,
        connection: Redis,
        start_worker: StartWorker,
        kind: str,
        body: dict[str, Any],
        code: str | None,
        param: str | None,
    ) -> None:
        data = packed([FUNCTION, None, [], {"kind": kind, "body": body}])
        error = fails_alone(connection, start_worker, data=data)
        assert (error["code"], error["param"]) == (code, param)

    def test_a_job_enqueued_with_rqs_own_means_fails_alone(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        foreign = Queue(QUEUE, connection=connection).enqueue(os.mkdir, "/nowhere/at/all")
        ours = submit(messages=HI)
        start_worker()
        with pytest.raises(JobFailed) as failed:
            Job(foreign.id).result(PATIENCE)
        assert failed.value.error["code"] == "invalid_payload"
        assert ours.result(PATIENCE)["id"] == f"chatcmpl-{ours.id}"


# Fields beside the payload that make no sense; the job itself is good and is answered.
ODD_FIELDS: dict[str, dict[str, Any]] = {
    "ttl for ever": {"result_ttl": "-1"},
    "no ttl": {"result_ttl": "0"},
    "ttl no number": {"result_ttl": "soon"},
    "ttl too long": {"result_ttl": str(10**18)},
    "retries no number": {"retries_left": "many"},
    "retries below zero": {"retries_left": "-5"},
    "meta no JSON": {"meta": b"\x80\x04"},
    "meta no object": {"meta": "[]"},
    "meta too deep": {"meta": "[" * 100_000},
    "attempts no number": {"meta": json.dumps({"max_attempts": "abc"})},
    "attempts an object": {"meta": json.dumps({"max_attempts": {}})},
    "attempts endless": {"meta": '{"max_attempts": 1e999}'},
    "timeout no number": {"meta": json.dumps({"timeout": "abc"})},
    "timeout an array": {"meta": json.dumps({"timeout": [1]})},
    "timeout not a number": {"meta": '{"timeout": NaN}'},
    "prefix no string": {"meta": json.dumps({"prefix": {"a": 1}})},
    "no origin": {"origin": None},
    "dates": {"created_at": "x", "enqueued_at": "y"},
}


class TestRecords:
    @pytest.mark.parametrize("fields", ODD_FIELDS.values(), ids=ODD_FIELDS.keys())
    def test_a_field_that_makes_no_sense_is_read_as_if_it_were_missing(
        self,
        redis_url: str,
        connection: Redis,
        start_worker: StartWorker,
        fields: dict[str, Any],
    ) -> None:
        before = submit(messages=HI)
        odd = put(connection, "odd", **fields)
        after = submit(messages=HI)
        worker = start_worker()
        for job in (before, odd, after):
            assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
        assert worker.stop() == 3
        assert 0 < connection.ttl(keys.result("odd")) <= 7 * 24 * 3600

    @pytest.mark.parametrize("job_id", ["none", b"\xff\xfe", "a:b", ""])
    def test_a_name_without_a_job_is_passed_by(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, job_id: Any
    ) -> None:
        connection.rpush(f"rq:queue:{QUEUE}", job_id)
        job = submit(messages=HI)
        start_worker()
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"

    @pytest.mark.parametrize("job_id", [b"\xff\xfe", b"a:b"])
    def test_a_job_with_a_name_that_rq_gives_to_none_is_passed_by(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, job_id: bytes
    ) -> None:
        connection.hset(b"rq:job:" + job_id, mapping={"status": "queued", "data": packed(GOOD)})
        connection.rpush(f"rq:queue:{QUEUE}", job_id)
        job = submit(messages=HI)
        worker = start_worker()
        assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
        assert worker.stop() == 1

    def test_a_job_that_stands_in_the_queue_twice_is_done_once(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI)
        connection.rpush(f"rq:queue:{QUEUE}", job.id)
        last = submit(messages=HI)
        worker = start_worker()
        last.result(PATIENCE)
        assert worker.stop() == 2
        assert [task.id for task in worker.engine.added] == [job.id, last.id]

    @pytest.mark.parametrize("alone", [True, False])
    def test_a_job_whose_key_holds_something_else_is_passed_by(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, alone: bool
    ) -> None:
        before = submit(messages=HI)
        connection.set(RQJob.key_for("odd"), "no hash")
        connection.rpush(f"rq:queue:{QUEUE}", "odd")
        after = submit(messages=HI)
        worker = start_worker()
        worker.worker._leases.alone = alone
        for job in (before, after):
            assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
        assert worker.stop() == 2
        assert not connection.exists(f"rq:queue:{QUEUE}")

    @pytest.mark.parametrize("alone", [True, False])
    def test_a_queue_that_is_no_list_keeps_no_other_from_being_worked_on(
        self, redis_url: str, connection: Redis, alone: bool
    ) -> None:
        connection.set(f"rq:queue:{keys.queue_name('default', 'high')}", "no list")
        job = submit(messages=HI)
        (claimed,) = claims(connection).take(5, alone=alone)
        assert claimed.id == job.id

    @pytest.mark.parametrize("alone", [True, False])
    @pytest.mark.parametrize(
        "key", [f"rq:wip:{QUEUE}", "rq:executions:{id}", "rq:worker:w:executions", "{owner}"]
    )
    def test_a_record_of_a_claim_that_is_something_else_is_made_anew(
        self, redis_url: str, connection: Redis, key: str, alone: bool
    ) -> None:
        others = submit(messages=HI)  # claimed first: a script that fails undoes nothing
        job = submit(messages=HI)
        prefix = json.loads(connection.hget(RQJob.key_for(job.id), "meta"))["prefix"]
        key = key.format(id=job.id, owner=keys.OWNER + prefix)
        connection.hset(key, "no", "such type") if "owner" in key else connection.set(key, "x")

        mine = claims(connection)
        claimed = mine.take(5, enough=5, alone=alone)

        assert [one.id for one in claimed] == [others.id, job.id]
        assert job.status() == "in_progress"
        assert mine.hand_back(claimed) == 2
        assert [job.status(), others.status()] == ["queued", "queued"]

    @pytest.mark.parametrize("key", ["rq:job:{id}", "rq:executions:{id}", f"rq:queue:{QUEUE}"])
    @pytest.mark.parametrize("how", ["hand back", "reap", "recover"])
    def test_what_was_claimed_goes_back_though_a_key_holds_something_else(
        self, redis_url: str, connection: Redis, key: str, how: str
    ) -> None:
        spoilt, other = submit(messages=HI), submit(messages=HI)
        mine = claims(connection)
        claimed = mine.take(5)
        connection.set(key.format(id=spoilt.id), "x")

        if how == "hand back":
            returned = mine.hand_back(claimed)
        elif how == "reap":
            returned = reap(connection, "w")
        else:
            for seconds, one in enumerate(claimed):
                lease = f"{one.id}:{one.lease.execution_id}"
                connection.zadd(f"rq:wip:{QUEUE}", {lease: 1 + seconds})
            returned = recover_expired(connection, mine.queues)

        lost = "rq:job" in key  # there is no job any more
        assert returned == (1 if lost else 2)
        expected = [other.id] if lost else [spoilt.id, other.id]
        assert [name.decode() for name in connection.lrange(f"rq:queue:{QUEUE}", 0, -1)] == expected
        assert connection.zcard(f"rq:wip:{QUEUE}") == (1 if how == "reap" and lost else 0)

    def test_a_registry_that_is_something_else_keeps_no_other_queue_from_recovery(
        self, redis_url: str, connection: Redis
    ) -> None:
        low = submit(messages=HI, priority="low")
        mine = claims(connection)
        mine.take(5)
        (registry,) = connection.keys("rq:wip:*")
        for entry in connection.zrange(registry, 0, -1):
            connection.zadd(registry, {entry: 1})
        connection.set(f"rq:wip:{keys.queue_name('default', 'high')}", "x")
        connection.set(f"rq:finished:{QUEUE}", "x")
        assert recover_expired(connection, mine.queues) == 1
        assert low.status() == "queued"

    @pytest.mark.parametrize(
        "key",
        [
            *(f"rq:wip:{QUEUE}", "rq:executions:{id}", "rq:worker:{name}:executions"),
            *("rq:worker:{name}", "rq:workers", "mlx-rq:worker:{name}", "mlx-rq:aboard:{name}"),
            *("mlx-rq:recovery", "mlx-rq:bell:default", f"mlx-rq:backlog-state:{QUEUE}"),
        ],
    )
    def test_a_worker_goes_on_though_a_key_of_its_own_holds_something_else(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, key: str
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        jobs = [submit(messages=HI), submit(messages=HI)]
        worker.engine.wait_for_tasks(2)
        key = key.format(id=jobs[0].id, name=worker.name)
        with connection.pipeline() as pipe:  # in one step: the worker writes to it, too
            pipe.delete(key)
            pipe.xadd(key, {"x": "y"})
            pipe.execute()

        worker.worker._leases.renew()
        jobs.append(submit(messages=HI))  # claimed beside them
        worker.engine.wait_for_tasks(3)
        worker.engine.release()

        for job in jobs:
            assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
        assert [one["name"] for one in live_workers(connection)] == [worker.name]
        assert worker.stop() == 3

    @pytest.mark.parametrize("how", ["hand back", "reap"])
    def test_jobs_whose_registry_was_made_anew_go_back(
        self, redis_url: str, connection: Redis, how: str
    ) -> None:
        first, second = submit(messages=HI), submit(messages=HI)
        mine = claims(connection)
        claimed = mine.take(5)
        connection.delete(f"rq:wip:{QUEUE}")
        returned = mine.hand_back(claimed) if how == "hand back" else reap(connection, "w")
        assert returned == 2
        assert [first.status(), second.status()] == ["queued", "queued"]

    def test_an_answer_to_what_is_no_job_any_more_is_given_up(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        worker = start_worker(FakeEngine(hold=True))
        job = submit(messages=HI)
        worker.engine.wait_for_tasks(1)
        connection.set(RQJob.key_for(job.id), "x")
        worker.engine.release()
        other = submit(messages=HI)
        assert other.result(PATIENCE)["id"] == f"chatcmpl-{other.id}"
        assert worker.stop() == 1
        assert worker.worker.describe()["discarded"] == 1

    @pytest.mark.parametrize("status", ["finished", "failed", "canceled", "started", "deferred"])
    def test_a_job_that_does_not_wait_is_not_claimed(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, status: str
    ) -> None:
        odd = put(connection, "odd", status=status)
        job = submit(messages=HI)
        worker = start_worker()
        job.result(PATIENCE)
        assert worker.stop() == 1
        assert connection.hget(RQJob.key_for(odd.id), "status").decode() == status


def called(*arguments: Any) -> None:
    """A callback that a job's record may name."""
    called_with.append(arguments)


called_with: list[Any] = []


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[str]]]:
    """The URL of a server, and the requests that it got."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path)
            self.send_response(200)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", requests
    server.shutdown()
    server.server_close()


class TestCallbacks:
    """RQ runs what a job's record names. Whoever can write to Redis could name anything."""

    @pytest.fixture
    def trapped(self, redis_url: str, connection: Redis, webhook: tuple[str, list[str]]) -> Job:
        """A job whose record names callbacks and webhooks."""
        called_with.clear()
        hooks = [Webhook(webhook[0], "finished").to_dict(), Webhook(webhook[0], "failed").to_dict()]
        name = f"{__name__}.called"
        return put(
            connection,
            "trapped",
            success_callback_name=name,
            failure_callback_name=name,
            stopped_callback_name=name,
            webhooks=json.dumps(hooks),
        )

    def lose_the_leases(self, connection: Redis, queues: list[Queue], count: int) -> None:
        """Lets the leases of the queue run out, and has their jobs given back."""

        def look() -> bool:  # again where the worker has renewed them in between
            for entry in connection.zrange(registry.key, 0, -1):
                connection.zadd(registry.key, {entry: 1})
            return recover_expired(connection, queues) == count

        registry = StartedJobRegistry(
            QUEUE, connection=connection, serializer=SERIALIZER, job_class=InertJob
        )
        eventually(look, "the end of the leases")

    def test_the_trap_works(
        self, trapped: Job, connection: Redis, webhook: tuple[str, list[str]]
    ) -> None:
        # given RQ's own clean-up, which reads the record as it stands
        claimed = {f"{trapped.id}:execution": 1}
        registry = StartedJobRegistry(QUEUE, connection=connection, serializer=SERIALIZER)
        connection.zadd(registry.key, claimed)
        connection.hset(RQJob.key_for(trapped.id), "status", "started")
        registry.cleanup()
        assert len(called_with) == 1
        assert webhook[1] == ["/hook"]

    @pytest.mark.parametrize("retries", [None, 3])
    def test_a_lease_that_runs_out_calls_nothing(
        self,
        trapped: Job,
        connection: Redis,
        start_worker: StartWorker,
        webhook: tuple[str, list[str]],
        retries: int | None,
    ) -> None:
        if retries is not None:
            connection.hset(RQJob.key_for(trapped.id), "retries_left", retries)
        holder = start_worker(FakeEngine(hold=True))
        holder.engine.wait_for_tasks(1)

        self.lose_the_leases(connection, holder.worker.claims.queues, 1)

        assert trapped.status() in ("queued", "in_progress")
        left = int(connection.hget(RQJob.key_for(trapped.id), "retries_left"))
        assert left == (1 + RECOVERY_RETRIES if retries is None else 2), "an attempt was counted"
        assert called_with == []
        assert webhook[1] == []

    def test_an_end_calls_nothing(
        self,
        trapped: Job,
        start_worker: StartWorker,
        webhook: tuple[str, list[str]],
    ) -> None:
        start_worker()
        trapped.result(PATIENCE)
        assert called_with == []
        assert webhook[1] == []

    def test_a_record_that_cannot_be_read_does_not_keep_its_neighbours_from_recovery(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        # given two jobs whose worker died; RQ cannot read the record of one
        odd = put(connection, "odd", result_ttl="soon")
        good = submit(messages=HI)
        holder = start_worker(FakeEngine(hold=True))
        holder.engine.wait_for_tasks(2)
        holder.engine.hold()

        self.lose_the_leases(connection, holder.worker.claims.queues, 2)

        assert int(connection.hget(RQJob.key_for(good.id), "retries_left")) == 4
        assert odd.id == "odd"
