"""A Redis that throws jobs away is warned of, and what it threw away is counted and told."""

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import FakeEngine, StartWorker, until_idle
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import lost_from
from mlx_rq.jobs.queue.eviction import eviction_warning, warn_once_of_eviction
from mlx_rq.jobs.queue.overview import overview
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.leases.claim import Claims

QUEUE = keys.queue_name("default", "default")
HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture
def evicting(connection: Redis) -> Iterator[Redis]:
    """A server that throws away what it likes when it is full."""
    connection.config_set("maxmemory-policy", "allkeys-random")
    connection.config_set("maxmemory", str(connection.info("memory")["used_memory"] + 1_500_000))
    warn_once_of_eviction.cache_clear()
    yield connection
    connection.config_set("maxmemory", "0")
    connection.config_set("maxmemory-policy", "noeviction")
    warn_once_of_eviction.cache_clear()


def claims_of(connection: Redis) -> Claims:
    connection.set(keys.worker("w"), "{}")  # it lives
    return Claims(connection, "w", ["default"], lease_seconds=60, max_wait=30)


class TestAWarning:
    @pytest.mark.parametrize(
        ("policy", "most", "words"),
        [
            ("noeviction", "1gb", None),
            ("allkeys-lru", "0", None),
            ("allkeys-lru", "1gb", "may evict jobs and results when .* is 'allkeys-lru'. Set it"),
            ("volatile-ttl", "1gb", "may evict results and leases when .* is 'volatile-ttl'"),
        ],
    )
    def test_comes_where_the_policy_allows_it_and_memory_is_bounded(
        self, evicting: Redis, policy: str, most: str, words: str | None
    ) -> None:
        evicting.config_set("maxmemory-policy", policy)
        evicting.config_set("maxmemory", most)
        warning = eviction_warning(evicting)
        assert (warning is None) == (words is None)
        assert re.search(words or "", warning or "")

    def test_of_a_producer_comes_once(
        self, evicting: Redis, redis_url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING, "mlx_rq"):
            submit(messages=HI)
            submit(messages=HI)
        (warned,) = [record.message for record in caplog.records if record.name == "mlx_rq"]
        assert warned.startswith("Redis may evict jobs and results when its memory is full: ")

    def test_stands_in_status_with_what_was_evicted(self, evicting: Redis, redis_url: str) -> None:
        submit_many([{"prompt": f"{number} " + "x" * 9} for number in range(4000)])
        evicting.config_set("maxmemory", "1gb")
        evicted = evicting.info("stats")["evicted_keys"]
        assert evicted > 0
        shown = json.loads(CliRunner().invoke(main, ["status", "--json"]).stdout)
        assert shown["notes"][-1] == (
            "Redis may evict jobs and results when its memory is full, as it did with "
            f"{evicted:,} keys so far: its maxmemory-policy is 'allkeys-random'. Set it to "
            "'noeviction'."
        )


class TestALostJob:
    def test_of_a_short_queue_is_counted_and_told(
        self, redis_url: str, connection: Redis, start_worker: StartWorker, caplog: Any
    ) -> None:
        jobs = submit_many([{"prompt": f"Say {number}."} for number in range(6)])
        connection.delete(*(RQJob.key_for(job.id) for job in jobs[1:4]))

        worker = start_worker(FakeEngine())
        until_idle(connection)

        assert len(worker.engine.added) == 3
        (lost,) = lost_from(connection, [QUEUE])
        assert lost.jobs == 3
        assert lost.at > 1_700_000_000
        (note,) = [note for note in overview(connection)["notes"] if "gone" in note]
        assert note.startswith("3 jobs for 'default' (default) were gone from Redis when their")
        names = ", ".join(job.id for job in jobs[1:4])
        assert f"3 jobs were gone from Redis when their turn came: {names}" in caplog.messages

    def test_under_an_endless_id_is_named_by_its_beginning(
        self, redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        submit_many([{"prompt": "Say 0."}])  # so that there is such a queue
        connection.rpush(f"rq:queue:{QUEUE}", "x" * 100_000)
        claims = claims_of(connection)
        assert [len(claims.take(256)) for _ in range(2)] == [1, 0]
        (said,) = [message for message in caplog.messages if "gone" in message]
        assert said == f"1 job was gone from Redis when its turn came: {'x' * 79}…"

    def test_of_a_long_queue_is_counted_too_and_nothing_else_is(
        self, redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        jobs = submit_many([{"prompt": f"Say {number}."} for number in range(1500)])
        connection.delete(*(RQJob.key_for(job.id) for job in jobs[1000:1100]))
        claims = claims_of(connection)
        taken = []
        while some := claims.take(256):
            taken += some
            # Ended and forgotten while its entry is still in the list: that one is not lost.
            connection.delete(*(RQJob.key_for(job.id) for job in some[::2]))

        assert len(taken) == 1400
        assert lost_from(connection, [QUEUE])[0].jobs == 100
        said = [message for message in caplog.messages if "gone" in message]
        # Those that had ended are gone, too, so none is named.
        assert said == ["100 jobs were gone from Redis when their turn came"]

    @pytest.mark.parametrize("jobs", [6, 300])
    def test_a_list_that_was_lost_is_made_anew_of_what_waits(
        self, redis_url: str, connection: Redis, jobs: int
    ) -> None:
        waiting = submit_many([{"prompt": f"Say {number}."} for number in range(jobs)])
        waiting[0].cancel()
        connection.delete(f"rq:queue:{QUEUE}")
        claims = claims_of(connection)
        taken = [job.id for _ in range(4) for job in claims.take(100)]
        assert sorted(taken) == sorted(job.id for job in waiting[1:])
        assert connection.exists(f"mlx-rq:backlog:{QUEUE}", f"mlx-rq:backlog-next:{QUEUE}") == 0

    @pytest.mark.parametrize("seen_by", ["claim", "enqueue"])
    def test_a_backlog_that_was_lost_is_made_anew_before_the_list_is_lost_too(
        self, redis_url: str, connection: Redis, seen_by: str
    ) -> None:
        waiting = submit_many([{"prompt": f"Say {number}."} for number in range(6)])
        connection.set(f"mlx-rq:backlog-next:{QUEUE}", "x")
        claims = claims_of(connection)
        if seen_by == "claim":
            assert [job.id for job in claims.take(1)] == [waiting.pop(0).id]
        else:
            waiting.append(submit(messages=HI))
        connection.set(f"rq:queue:{QUEUE}", "x")
        taken = [job.id for _ in range(4) for job in claims.take(100)]
        assert sorted(taken) == sorted(job.id for job in waiting)

    def test_what_is_gone_with_its_list_is_counted_and_told(
        self, redis_url: str, connection: Redis, caplog: pytest.LogCaptureFixture
    ) -> None:
        first, *jobs = submit_many([{"prompt": f"Say {number}."} for number in range(6)])
        connection.delete(f"rq:queue:{QUEUE}", *(RQJob.key_for(job.id) for job in jobs))
        assert [job.id for job in claims_of(connection).take(9)] == [first.id]
        assert lost_from(connection, [QUEUE])[0].jobs == 5
        (said,) = [message for message in caplog.messages if "gone" in message]
        assert set(said.rpartition(": ")[2].split(", ")) == {job.id for job in jobs}

    def test_what_was_cancelled_and_deleted_is_not_lost(
        self, redis_url: str, connection: Redis
    ) -> None:
        for job in submit_many([{"prompt": f"Say {number}."} for number in range(9)])[::2]:
            job.delete()
        assert len(claims_of(connection).take(256)) == 4
        assert lost_from(connection, [QUEUE])[0].jobs == 0
