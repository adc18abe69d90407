"""The history: one sample for each time slot, whoever writes it, and what else may lie there."""

import pytest
from redis import Redis

from mlx_rq.jobs.queue import history, keys
from mlx_rq.jobs.queue.history import KEPT_SECONDS, Sample, read_history, write_sample

SAMPLE = Sample(
    workers=1,
    queued=2,
    in_progress=3,
    jobs_ended=0.5,
    prompt_tokens=20.0,
    prefilled_tokens=5.25,
    decoded_tokens=7.0,
    memory_active=6_000_000_000,
    memory_cache=0,
    memory_ceiling=8_000_000_000,
)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    clock = {"now": 1_764_201_605.25}
    monkeypatch.setattr(history, "redis_time", lambda _: clock["now"])
    return clock


def test_of_those_who_write_in_one_slot_the_first_one_counts(
    connection: Redis, now: dict[str, float]
) -> None:
    assert write_sample(connection, SAMPLE)
    now["now"] += 4
    assert not write_sample(connection, SAMPLE.model_copy(update={"queued": 9}))
    now["now"] += 1
    assert write_sample(connection, SAMPLE.model_copy(update={"queued": 4}))
    assert [(at, sample.queued) for at, sample in read_history(connection)] == [
        (1_764_201_600, 2),
        (1_764_201_610, 4),
    ]
    assert read_history(connection)[0][1] == SAMPLE
    assert [at for at, _ in read_history(connection, 1_764_201_600)] == [1_764_201_610]
    assert read_history(connection, 1_764_201_610) == []
    assert 0 < connection.ttl(keys.HISTORY) <= KEPT_SECONDS


def test_it_has_a_bound(connection: Redis, now: dict[str, float]) -> None:
    kept = KEPT_SECONDS // history.SLOT_SECONDS
    with connection.pipeline() as pipe:
        for number in range(kept + 500):
            pipe.xadd(keys.HISTORY, {"a": 1}, id=f"{number + 1}-0")
        pipe.execute()
    write_sample(connection, SAMPLE)
    assert kept <= connection.xlen(keys.HISTORY) < kept + 200  # whole nodes are trimmed
    assert [sample for _, sample in read_history(connection)] == [SAMPLE]


def test_a_key_of_another_type_is_made_anew(connection: Redis, now: dict[str, float]) -> None:
    connection.set(keys.HISTORY, "x")
    assert read_history(connection) == []
    assert write_sample(connection, SAMPLE)
    assert [sample for _, sample in read_history(connection)] == [SAMPLE]
