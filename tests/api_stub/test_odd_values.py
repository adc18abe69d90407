"""Anybody may write anything to Redis: one strange value stops nothing but what it stands in.

A world of jobs in all states of their lives; each key and each field that there is, in turn, is set
to something odd. Then other jobs must end as ever, and no command or endpoint may fail.
"""

import os
import random
import re
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from batch_helpers import batch_lines, write_jsonl
from click.testing import CliRunner
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, eventually
from odd_values import BYTES, TYPES
from redis import Redis
from servers import StartServer, answer_any

from mlx_rq import Job, as_completed, submit
from mlx_rq.engine.interface import Partial
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.webhooks import read_networks
from mlx_rq.worker.cli.main import main

HI = [{"role": "user", "content": "Say hi."}]
LONG = [{"role": "system", "content": "Be brief. " * 40}, *HI]

PART = os.environ.get("MLX_RQ_ODD_VALUES", "0/125")
"""Which of so many parts of all cases are tried; `0/1`, all of them, takes some minutes."""


class Case(NamedTuple):
    """A key, a field of it where it is a hash, and what it is set to."""

    key: str
    field: str | None
    odd: str

    def spoil(self, redis: Redis) -> None:
        if self.field is not None:
            redis.hset(self.key, self.field, BYTES[self.odd])
            return
        redis.delete(self.key)
        if self.odd in BYTES:
            redis.set(self.key, BYTES[self.odd])
        else:
            TYPES[self.odd](redis, self.key)


class World:
    """A worker, a server, and jobs in all states, of which those that wait or run stay so."""

    def __init__(self, redis: Redis, worker: RunningWorker, http: httpx.Client, folder: Path):
        self.redis, self.worker, self.http = redis, worker, http
        self.engine = worker.engine
        self.held: list[str] = []
        self.waiting = submit(messages=HI, model="nobody", idempotency_key="waits")
        self.running = self._hold(submit(messages=LONG, stream=True))
        self.engine.say(self.running.id, Partial(0, "", "so far"))
        self.finished = self.done(submit(messages=HI, webhook="http://127.0.0.1:9/x"))
        self.response = self.done(submit(input="Say hi.", stream=True))
        self.cancelled = submit(messages=HI, model="nobody")
        self.cancelled.cancel()
        self.stored = self._store()
        self.batch = self._batch(folder)
        eventually(lambda: bool(redis.exists(keys.stream(self.running.id))), "the text")
        eventually(lambda: bool(redis.exists(keys.WEBHOOK_TRIES)), "a delivery")
        redis.hset(keys.LIMITS, mapping={"jobs": 10**6, "bytes": 10**12})

    def done(self, job: Job) -> Job:
        """Has a job answered."""
        self.engine.release(job.id)
        job.result(PATIENCE)
        return job

    def _hold(self, job: Job) -> Job:
        self.engine.wait_until(lambda engine: any(task.id == job.id for task in engine.added))
        self.held.append(job.id)
        return job

    def _store(self) -> str:
        answered = self.http.post("/v1/jobs", json={"messages": HI, "store": True}).json()
        job = self.done(Job(answered["id"]))
        self.redis.zadd(keys.STORED, {job.id: 2_000_000_000})
        body = {"metadata": {"a": "b"}}
        assert self.http.post(f"/v1/chat/completions/chatcmpl-{job.id}", json=body).is_success
        return job.id

    def _batch(self, folder: Path) -> str:
        lines = write_jsonl(
            folder / "in.jsonl",
            [{**line, "body": {**line["body"], "model": "fake"}} for line in batch_lines(2)],
        )
        before = len(self.engine.added)
        file = self.http.post(
            "/v1/files", files={"file": lines.read_bytes()}, data={"purpose": "batch"}
        ).json()
        wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = self.http.post("/v1/batches", json={"input_file_id": file["id"], **wanted})
        self.held += self.engine.wait_for_tasks(before + 2)[before:]
        return str(batch.json()["id"])

    def targets(self) -> Iterator[tuple[str, str | None]]:
        """Every key, and every field of the hashes."""
        names = (key.decode() for key in self.redis.scan_iter("*"))
        for key in sorted(names, key=lambda name: re.sub("[0-9a-f]{32}", "id", name)):
            yield key, None
            if self.redis.type(key) == b"hash":
                for field in sorted(self.redis.hkeys(key)):
                    yield key, field.decode()

    def cases(self) -> list[Case]:
        return [
            Case(key, field, odd)
            for key, field in self.targets()
            for odd in (BYTES if field is not None else [*BYTES, *TYPES])
        ]

    def go_through(self, case: Case) -> None:
        """Has other jobs answered while a value is odd."""
        running = submit(messages=LONG)
        self.engine.wait_until(lambda engine: any(t.id == running.id for t in engine.added))
        self.redis.set("rq:suspended", 1)
        self.worker.take_turns()
        waiting = submit(messages=LONG)
        before = self.redis.dump(case.key)
        case.spoil(self.redis)
        spoilt = self.redis.dump(case.key)
        self.redis.delete("rq:suspended")
        try:
            self._others_end(case, running, waiting)
            self._commands_answer(case)
        finally:
            if self.redis.dump(case.key) == spoilt and before is not None:  # nobody minded
                self.redis.restore(case.key, 0, before, replace=True)

    def _others_end(self, case: Case, running: Job, waiting: Job) -> None:
        others = [running, waiting]
        limited = case.key == keys.LIMITS and case.field is not None
        if not limited:  # such a limit refuses what is new, by its name
            cancelled, new = submit(messages=HI, model="nobody"), submit(messages=HI)
            assert cancelled.cancel() is True
            assert cancelled.status() == "cancelled"
            others.append(new)
        self.engine.release(*(job.id for job in others))
        for job in others:
            assert job.result(PATIENCE)["id"] == f"chatcmpl-{job.id}"
            assert job.status() == "completed"
        assert set(as_completed(others, timeout=PATIENCE)) == set(others)

    def _commands_answer(self, case: Case) -> None:
        named = re.findall(r"[0-9a-f]{32}", case.key)
        jobs = {*named[:1], self.finished.id}
        calls = [["status"], ["status", "--json"], ["limits"]]
        calls += [[name, job_id] for job_id in jobs for name in ("status",)]
        calls += [["result", "--no-wait", job_id] for job_id in jobs]
        calls += [["cancel", job_id] for job_id in jobs if job_id not in self.held]
        for call in calls:
            run = CliRunner().invoke(main, call)
            assert run.exception is None or isinstance(run.exception, SystemExit), (call, run)
        paths = ["/metrics", "/health", "/v1/models", "/v1/batches", "/v1/chat/completions"]
        for job_id in (*jobs, self.stored, self.response.id):
            paths += [f"/v1/jobs/{job_id}", f"/v1/responses/resp_{job_id}"]
            paths += [f"/v1/chat/completions/chatcmpl-{job_id}/messages"]
            paths += [f"/v1/responses/resp_{job_id}?stream=true"] * (job_id not in self.held)
        for path in paths:
            assert self.http.get(path).status_code < 500, path

    def end(self) -> None:
        """Lets all end that waits."""
        self.engine.release()
        eventually(lambda: self._batch_status() in ("completed", "failed"), "the batch's end")
        assert self._batch_status() == "completed"

    def _batch_status(self) -> str:
        return str(self.http.get(f"/v1/batches/{self.batch}").json()["status"])


@pytest.fixture
def world(
    connection: Redis, start_worker: StartWorker, start_server: StartServer, tmp_path: Path
) -> World:
    worker = start_worker(FakeEngine(hold=True, answer_with=answer_any, capacity=64), lease=4)
    server = start_server(
        webhook_secrets=(b"s" * 32,), webhook_networks=read_networks(["127.0.0.0/8"])
    )
    return World(connection, worker, server.http, tmp_path)


def test_one_odd_value_stops_nothing_else(world: World) -> None:
    part, parts = PART.split("/")
    cases = world.cases()
    random.Random(1).shuffle(cases)
    failed = {}
    for case in cases[int(part) :: int(parts)]:
        try:
            world.go_through(case)
        except Exception as error:
            failed[case] = "".join(traceback.format_exception(error)[-3:])
    assert not failed, "\n".join(f"{case}\n{error}" for case, error in failed.items())
    world.end()


def test_a_result_that_cannot_be_read_is_told_to_clients(world: World) -> None:
    world.engine.release()
    http, body = world.http, {"model": "fake", "messages": HI}
    named = {"idempotency-key": "k"}
    answered = http.post("/v1/chat/completions", json={**body, "store": True}, headers=named)
    job_id = answered.headers["x-job-id"]
    assert job_id in str(http.get("/v1/chat/completions").json())

    for value in (b"notjson", b"null", b"\xff"):
        world.redis.set(keys.result(job_id), value)
        for fields in ({}, {"stream": True}):
            again = {**body, "store": True, **fields}
            told = http.post("/v1/chat/completions", json=again, headers=named)
            assert told.status_code == 502
            assert told.json()["error"]["code"] == "unreadable_result"
        view = http.get(f"/v1/jobs/{job_id}").json()
        assert (view["status"], view["error"]["code"]) == ("failed", "unreadable_result")
        listed = http.get("/v1/chat/completions").json()
        assert [one["id"] for one in listed["data"]] == [f"chatcmpl-{world.stored}"]
        assert http.get(f"/v1/chat/completions/chatcmpl-{job_id}").status_code == 404

    world.redis.set(keys.result(world.response.id), b"[]")
    view = http.get(f"/v1/responses/resp_{world.response.id}").json()
    assert (view["status"], view["error"]["code"]) == ("failed", "server_error")
    events = http.get(f"/v1/responses/resp_{world.response.id}?stream=true").text
    assert "event: response.failed" in events


def test_a_stream_beside_one_whose_key_holds_something_else_is_followed(world: World) -> None:
    # given two streams that one server follows together, one of them spoilt
    body = {"model": "fake", "messages": HI, "stream": True}
    spoilt = world.http.get(f"/v1/responses/resp_{world.response.id}?stream=true")
    assert spoilt.status_code == 200
    before = len(world.engine.added)
    with (
        world.http.stream("POST", "/v1/chat/completions", json=body) as one,
        world.http.stream("POST", "/v1/chat/completions", json=body) as other,
    ):
        first, second = world.engine.wait_for_tasks(before + 2)[before:]
        world.redis.delete(keys.stream(first))
        world.redis.set(keys.stream(first), "x")
        for job_id in (first, second):
            world.engine.say(job_id, Partial(0, "", "chat"))
        for answer in (one, other):
            assert any("chat" in text for text in islice(answer.iter_text(), 4))
        world.engine.release(first, second)
