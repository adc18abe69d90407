"""What the HTTP server notes of the queue every few seconds."""

from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, eventually
from redis import Redis

from mlx_rq import submit
from mlx_rq.api_stub import sampler as module
from mlx_rq.api_stub.sampler import Sampler
from mlx_rq.jobs.queue.history import read_history
from mlx_rq.jobs.queue.workers import live_workers


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    clock = {"now": 1000.0}
    monkeypatch.setattr(module, "redis_time", lambda _: clock["now"])
    return clock


def test_rates_are_what_was_done_between_two_looks(
    redis_url: str, connection: Redis, start_worker: StartWorker, now: dict[str, float]
) -> None:
    engine = FakeEngine()
    start_worker(engine)
    sampler = Sampler(redis_url)
    sampler.look()
    assert read_history(connection) == []  # nothing to go by yet
    engine.totals.decoded_tokens, engine.totals.prompt_tokens = 500, 1000
    engine.totals.prefilled_tokens = 250
    submit(prompt="x").result(timeout=PATIENCE)  # at its end, a worker says what it did
    submit(prompt="x", model="nobody's")
    eventually(lambda: live_workers(connection)[0]["ended"] == 1, "what the worker says")
    now["now"] += 10
    sampler.look()
    ((_, sample),) = read_history(connection)
    assert sample.model_dump() == {
        "workers": 1,
        "queued": 1,
        "in_progress": 0,
        "jobs_ended": 0.1,
        "prompt_tokens": 100.0,
        "prefilled_tokens": 25.0,
        "decoded_tokens": 50.0,
        "memory_active": 6_000_000_000,
        "memory_cache": 500,
        "memory_ceiling": 8_000_000_000,
    }


def test_workers_that_come_go_and_begin_again() -> None:
    def worker(count: int) -> dict[str, int]:
        rates = ("jobs_ended", "prompt_tokens", "prefilled_tokens", "decoded_tokens")
        return dict.fromkeys(rates, count)

    before: Any = {"goes on": worker(100), "began again": worker(100), "went": worker(100)}
    now: Any = {"goes on": worker(107), "began again": worker(20), "came": worker(1000)}
    assert module._difference(before, now) == worker(27)
