"""How many jobs of one key are on their way at once."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, StartWorker
from redis import Redis
from servers import RunningServer, StartServer

from mlx_rq.api_stub.settings import ApiKeys
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.queue import keys

CHAT: Any = {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(autouse=True)
def _looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_rq.api_stub.quota._CLEAN_SECONDS", 0.0)


@pytest.fixture
def engine(start_worker: StartWorker) -> FakeEngine:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    return engine


@pytest.fixture
def server(start_server: StartServer, engine: FakeEngine) -> RunningServer:
    return start_server(keys=ApiKeys(["a", "b"]), jobs_per_key=3)


def ask(server: RunningServer, key: str, **more: Any) -> Any:
    headers = {"authorization": f"Bearer {key}", **more}
    return server.http.post("/v1/jobs", json=CHAT, headers=headers)


def statuses(server: RunningServer, key: str, count: int) -> list[int]:
    return [ask(server, key).status_code for _ in range(count)]


def test_every_key_has_its_places(server: RunningServer, engine: FakeEngine) -> None:
    assert statuses(server, "a", 4) == [202] * 3 + [429]
    refused = ask(server, "a")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "3 jobs of this key" in refused.json()["error"]["message"]
    assert 1 <= int(refused.headers["retry-after"]) <= 120
    assert statuses(server, "b", 1) == [202]
    assert len(engine.wait_for_tasks(4)) == 4


def test_a_job_that_ended_gives_its_place_back(server: RunningServer, engine: FakeEngine) -> None:
    job_ids = [ask(server, "a").json()["id"] for _ in range(3)]
    engine.wait_for_tasks(3)
    engine.release(job_ids[1])
    Job(job_ids[1]).result(timeout=PATIENCE)
    Job(job_ids[2]).cancel()
    assert statuses(server, "a", 3) == [202, 202, 429]


def test_a_request_that_is_refused_takes_no_place(server: RunningServer, connection: Redis) -> None:
    headers = {"authorization": "Bearer a"}
    wrong = {**CHAT, "temperature": 200}
    for _ in range(5):
        assert server.http.post("/v1/jobs", json=wrong, headers=headers).status_code == 400
    assert statuses(server, "a", 4) == [202] * 3 + [429]
    (name,) = connection.keys("mlx-rq:owned:*")
    assert connection.zcard(name) == 3
    assert 0 < int(connection.ttl(name)) <= 30 * 24 * 3600


def test_the_same_job_again_takes_one_place(server: RunningServer) -> None:
    again = [ask(server, "a", **{"idempotency-key": "k"}).status_code for _ in range(5)]
    assert again == [202] * 5
    assert statuses(server, "a", 3) == [202, 202, 429]


def test_requests_that_come_together_do_not_pass_together(server: RunningServer) -> None:
    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda _: ask(server, "a").status_code, range(24)))
    assert answers.count(202) <= 3
    assert set(answers) == {202, 429}


def test_a_place_that_a_dead_server_took_is_free_again(
    server: RunningServer, connection: Redis
) -> None:
    assert statuses(server, "a", 1) == [202]
    (name,) = connection.keys("mlx-rq:owned:*")
    connection.zadd(name, {"new:old": time.time() - 61, "new:recent": time.time()})
    assert statuses(server, "a", 2) == [202, 429]


def test_a_server_whose_clock_is_ahead_frees_no_place(
    server: RunningServer, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert statuses(server, "a", 1) == [202]
    (name,) = connection.keys("mlx-rq:owned:*")
    now = time.time()
    connection.zadd(name, {"new:by another": now, "new:by a third": now})
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: now + 3600)
        assert statuses(server, "a", 1) == [429]


def test_without_keys_the_limit_is_for_all(
    start_server: StartServer, engine: FakeEngine, connection: Redis
) -> None:
    server = start_server(jobs_per_key=1)
    assert [server.http.post("/v1/jobs", json=CHAT).status_code for _ in range(2)] == [202, 429]
    assert connection.zcard(keys.owned("anyone")) == 1
