"""How often a Redis that is away is tried, and that waiting for it is no stall."""

import threading

import pytest
from fakes import PATIENCE, eventually
from redis.exceptions import ConnectionError, TimeoutError

from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.retry import RETRY_SECONDS, RedisRetry


def test_a_redis_that_failed_is_left_alone_for_a_while_and_then_tried_again() -> None:
    now, tried, alive = 0.0, [], []
    redis_retry = RedisRetry(lambda error: alive.append(now), clock=lambda: now)
    fails = True

    def action() -> None:
        tried.append(now)
        if fails:
            raise ConnectionError("gone")

    times = [0.0, RETRY_SECONDS / 2, RETRY_SECONDS, 1.5 * RETRY_SECONDS, 2 * RETRY_SECONDS]
    for now in times:
        fails = now < 2 * RETRY_SECONDS
        redis_retry.attempt(action)
        assert redis_retry.away is fails
    assert tried == [0.0, RETRY_SECONDS, 2 * RETRY_SECONDS]
    assert alive == [0.0, RETRY_SECONDS], "a failed attempt is progress too"


def test_what_is_to_be_done_is_tried_until_it_is() -> None:
    waited: list[float] = []
    errors = [ConnectionError("gone"), RedisUnavailable("No Redis")]
    failed: list[Exception] = []

    def action() -> None:
        if len(waited) < len(errors):
            raise errors[len(waited)]

    def wait(seconds: float) -> bool:
        nonlocal now
        waited.append(seconds)
        now += seconds
        return False

    now = 0.0
    redis_retry = RedisRetry(failed.append, seconds=5.0, clock=lambda: now)
    redis_retry.until_done(action, wait)
    assert waited == [5.0, 5.0]
    assert failed == errors
    assert not redis_retry.away


def test_a_wait_that_ends_early_is_gone_on_with() -> None:
    now, tried = 0.0, []

    def action() -> None:
        tried.append(now)
        if now < 1.0:
            raise ConnectionError("gone")

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds / 2 if seconds > 0.01 else seconds
        return False

    RedisRetry(lambda error: None, seconds=1.0, clock=lambda: now).until_done(action, wait)
    assert tried == [0.0, 1.0]


def test_nothing_is_tried_again_once_it_is_enough() -> None:
    tried = []

    def action() -> None:
        tried.append(1)
        raise ConnectionError("gone")

    RedisRetry(lambda error: None).until_done(action, lambda seconds: True)
    assert tried == [1]


def test_another_error_is_not_for_us() -> None:
    def action() -> None:
        raise KeyError("a")

    redis_retry = RedisRetry(lambda error: None)
    with pytest.raises(KeyError):
        redis_retry.attempt(action)
    assert not redis_retry.away


@pytest.mark.parametrize("then", [None, ConnectionError("gone")])
def test_a_redis_that_hangs_is_asked_by_another_thread_until_it_answers(
    then: Exception | None,
) -> None:
    now, tried, asked, answers = 0.0, [], [], threading.Semaphore(0)

    def action() -> None:
        tried.append(now)
        if now < 3:
            raise TimeoutError("no answer")

    def ping() -> None:
        assert answers.acquire(timeout=PATIENCE)
        asked.append(threading.current_thread())
        if len(asked) < 2:
            raise TimeoutError("no answer")
        if then is not None:
            raise then

    redis_retry = RedisRetry(lambda error: None, seconds=1.0, clock=lambda: now, ping=ping)
    for at in (0.0, 1.0, 2.0):
        now = at
        assert not redis_retry.attempt(action)
        assert redis_retry.pause == 1.0, "seconds that can be waited"
    answers.release(2)
    now = 3.0
    eventually(lambda: not redis_retry.away)
    assert redis_retry.attempt(action)
    assert tried == [0.0, 3.0]
    assert threading.current_thread() not in asked
