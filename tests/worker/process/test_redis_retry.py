"""How often a Redis that is away is tried, and that waiting for it is no stall."""

from redis.exceptions import ConnectionError

from mlx_rq.worker.process.redis_retry import RETRY_SECONDS, RedisRetry


def test_a_redis_that_failed_is_left_alone_for_a_while_and_then_tried_again() -> None:
    now, tried, alive = 0.0, [], []
    redis_retry = RedisRetry(lambda: alive.append(now), clock=lambda: now)
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
