"""Jobs as plain HTTP: submit, look, wait, cancel."""

import threading
import time

import openai
import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, eventually, failure
from redis import Redis
from servers import RunningServer, StartServer

from mlx_rq.jobs.client.job import fetch
from mlx_rq.jobs.queue.limits import set_limits

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


def test_submit_and_read(server: RunningServer, start_worker: StartWorker) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    accepted = server.http.post("/v1/jobs", json=CHAT)
    assert accepted.status_code == 202
    job_id = accepted.json()["id"]
    assert accepted.headers["location"] == f"/v1/jobs/{job_id}"
    assert accepted.headers["retry-after"] == "1"
    engine.wait_for_tasks(1)
    running = server.http.get(accepted.headers["location"]).json()
    assert running["status"] == "in_progress"
    assert running["result"] is None
    engine.release()
    ended = server.http.get(f"/v1/jobs/{job_id}?wait=50").json()
    assert ended["status"] == "completed"
    assert ended["result"]["choices"][0]["message"]["content"] == f"chat for {job_id}"
    assert ended["error"] is None


def test_completion_with_options(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    query = "priority=high&result_ttl=60&timeout=5&max_attempts=2"
    accepted = server.http.post(f"/v1/jobs?{query}", json={"prompt": "Once"}).json()
    assert accepted["priority"] == "high"
    ended = server.http.get(f"/v1/jobs/{accepted['id']}?wait=50").json()
    assert ended["result"]["object"] == "text_completion"
    assert 0 < fetch(accepted["id"])._connection.ttl(f"mlx-rq:result:{accepted['id']}") <= 60


def test_long_poll_wakes_up_at_the_end(server: RunningServer, start_worker: StartWorker) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    job_id = server.http.post("/v1/jobs", json=CHAT).json()["id"]
    requests = server.server.config.app.state.service.requests

    def end() -> None:
        eventually(lambda: requests.waiting == 1, "the poll")
        engine.release()

    threading.Thread(target=end).start()
    ended = server.http.get(f"/v1/jobs/{job_id}?wait=300", timeout=PATIENCE).json()
    assert ended["status"] == "completed"


def test_long_poll_gives_up_in_time(server: RunningServer, start_worker: StartWorker) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    job_id = server.http.post("/v1/jobs", json=CHAT).json()["id"]
    engine.wait_for_tasks(1)
    started = time.monotonic()
    answer = server.http.get(f"/v1/jobs/{job_id}?wait=0.4")
    assert time.monotonic() - started > 0.3
    assert answer.json()["status"] == "in_progress"
    assert answer.headers["retry-after"] == "1"


def test_delete_cancels(server: RunningServer, start_worker: StartWorker) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    job_id = server.http.post("/v1/jobs", json=CHAT).json()["id"]
    cancelled = server.http.delete(f"/v1/jobs/{job_id}").json()
    assert cancelled["status"] == "cancelled"
    assert cancelled["error"]["code"] == "cancelled"
    again = server.http.delete(f"/v1/jobs/{job_id}")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")


def test_delete_leaves_a_result_alone(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    job_id = server.http.post("/v1/jobs", json=CHAT).json()["id"]
    server.http.get(f"/v1/jobs/{job_id}?wait=50")
    assert server.http.delete(f"/v1/jobs/{job_id}").json()["status"] == "completed"
    assert server.http.get(f"/v1/jobs/{job_id}").json()["result"]["id"] == f"chatcmpl-{job_id}"


def test_failed_job_shows_its_error(server: RunningServer, start_worker: StartWorker) -> None:
    refusal = failure("context_length_exceeded")
    start_worker(FakeEngine(refuse=lambda task: refusal))
    job_id = server.http.post("/v1/jobs", json=CHAT).json()["id"]
    ended = server.http.get(f"/v1/jobs/{job_id}?wait=50").json()
    assert ended["status"] == "failed"
    assert ended["error"]["code"] == "context_length_exceeded"
    assert ended["result"] is None


def test_unknown_job(server: RunningServer) -> None:
    for method in ("GET", "DELETE"):
        answer = server.http.request(method, f"/v1/jobs/{'0' * 32}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "job_not_found"


def test_same_idempotency_key_same_job(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker(FakeEngine(hold=True))
    headers = {"idempotency-key": "one"}
    first, second = (server.http.post("/v1/jobs", json=CHAT, headers=headers) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
    other = server.http.post("/v1/jobs", json={**CHAT, "seed": 1}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_conflict")


def test_job_for_a_model_that_nobody_serves(
    server: RunningServer, start_server: StartServer
) -> None:
    body = {**CHAT, "model": "org/other"}
    assert server.http.post("/v1/jobs", json=body).json()["error"]["code"] == "model_not_found"
    accepted = start_server(queue_unserved=True).http.post("/v1/jobs", json=body)
    assert accepted.status_code == 202
    assert "no live worker serves the model 'org/other'" in accepted.json()["note"]


def test_queue_that_the_operator_limits(start_server: StartServer, connection: Redis) -> None:
    server = start_server(queue_unserved=True)
    set_limits(connection, {"jobs": 1})
    assert server.http.post("/v1/jobs", json=CHAT).status_code == 202
    refused = server.http.post("/v1/jobs", json=CHAT)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("queue_full", "rate_limit_error")
    with pytest.raises(openai.RateLimitError, match="1 job waits, 1 would come"):
        server.client().responses.create(model="default", input="Hi", background=True)


def test_full_queue(start_server: StartServer) -> None:
    server = start_server(queue_unserved=True, max_queued=2)
    assert [server.http.post("/v1/jobs", json=CHAT).status_code for _ in range(3)] == [
        202,
        202,
        429,
    ]
    refused = server.http.post("/v1/jobs", json=CHAT)
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 120
