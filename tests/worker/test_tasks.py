"""What a worker reads of the jobs that wait, before it claims any."""

from typing import Any

import pytest
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.worker.tasks import waiting_requests


def said(requests: Any) -> list[str]:
    return [request.prompt for request in requests]


def test_some_of_all_over_the_queues_are_read(redis_url: str, connection: Redis) -> None:
    submit_many([{"prompt": str(i), "model": "a"} for i in range(40)])
    submit(prompt="urgent", model="b", priority="high")
    submit(prompt="another's", model="c")

    found = said(waiting_requests(connection, ["a", "b"]))

    assert found[-1] == "urgent"
    assert [int(prompt) for prompt in found[:-1]] == [*range(0, 40, 3)]
    assert said(waiting_requests(connection, ["d"])) == []


def test_what_cannot_be_read_is_left_out(redis_url: str, connection: Redis) -> None:
    jobs = [submit(prompt=str(i), model="a") for i in range(4)]
    connection.hset(RQJob.key_for(jobs[0].id), "data", b"\x00")
    connection.delete(RQJob.key_for(jobs[1].id))
    connection.delete(RQJob.key_for(jobs[2].id))
    connection.set(RQJob.key_for(jobs[2].id), "another type")
    connection.set(f"rq:queue:{keys.queue_name('b', 'default')}", "another type")

    assert said(waiting_requests(connection, ["a", "b"])) == ["3"]


def test_without_redis_nothing_is_known(
    nobody_listens: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert waiting_requests(new_connection(nobody_listens), ["a"]) == []
    assert "nobody knows yet what waits" in caplog.text
