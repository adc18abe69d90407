"""Clocks that are wrong, or set: workers go by that of Redis, and by one that nobody sets."""

from pathlib import Path

from checks import all_answered, attempts_lost
from fakes import eventually
from harness import StartProgram
from redis import Redis

from mlx_rq import submit_many
from mlx_rq.jobs.queue import keys


def lease_ends(connection: Redis) -> list[float]:
    registry = f"rq:wip:{keys.queue_name('default', 'default')}"
    return [end for _, end in connection.zrange(registry, 0, -1, withscores=True)]


def test_a_worker_with_another_clock_takes_no_running_job_and_keeps_its_own(
    start: StartProgram, connection: Redis, redis_url: str, tmp_path: Path
) -> None:
    # given a worker that holds four jobs which may be tried once
    gate, options = tmp_path / "gate", {"lease": 2}
    jobs = submit_many([{"prompt": f"hold {gate}"}] * 8, max_attempts=1)
    right = start("work", name="right", options={**options, "window": 4})
    right.until("began", 4)
    # and another, whose clock is wrong, with four more
    clock = tmp_path / "clock"
    clock.write_text("300")
    wrong = start("work", name="wrong", options={**options, "window": 4}, clock=clock)
    wrong.until("began", 4)

    def all_hold_for(seconds: int) -> None:
        ended = max(lease_ends(connection)) + seconds
        eventually(lambda: min(lease_ends(connection), default=0) > ended, "renewals")

    all_hold_for(3)
    clock.write_text("-300")  # it is set
    all_hold_for(3)
    gate.touch()

    all_answered(jobs)
    assert [len(worker.said("answered")) for worker in (right, wrong)] == [4, 4]
    assert attempts_lost(connection, jobs) == [2] * 8, "which is none of the one"
    assert connection.xlen(keys.COMPLETIONS) == 8
