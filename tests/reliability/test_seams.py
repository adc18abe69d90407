"""`kill -9` of the worker at each seam of a job's way: every job ends once, with its own answer."""

import pytest
from checks import all_answered, attempts_lost, ends, traces
from fakes import eventually
from harness import StartProgram
from redis import Redis

from mlx_rq import submit_many
from mlx_rq.jobs.queue import keys

IN_FLIGHT = {
    "claim": 0,
    "prefill": 1,
    "decode": 1,
    "generated": 1,
    "commit sent": 0,
    "committed": 0,
}
"""Where a worker may die, and what that costs the jobs that it was generating.

After the commit they are ended; when it dies while the commit is on its way, they are ended or not.
"""


@pytest.mark.parametrize("seam", IN_FLIGHT)
def test_a_worker_killed_at_a_seam_loses_nothing(
    start: StartProgram, connection: Redis, redis_url: str, seam: str
) -> None:
    jobs = submit_many([{"prompt": "answer"}] * 6)

    program = start(kill_at=seam, capacity=4)

    all_answered(jobs)
    assert len(program.said("killed at")) == 1
    assert [ends(connection, job) for job in jobs] == [1] * 6
    assert connection.xlen(keys.COMPLETIONS) == 6
    lost = attempts_lost(connection, jobs)
    # the last two only waited behind the batch
    assert lost[4:] == [0, 0]
    if seam == "commit sent":
        assert set(lost) <= {0, 1}
    else:
        assert lost[:4] == [IN_FLIGHT[seam]] * 4
    program.terminate()
    assert program.wait() == 0
    assert traces(connection) == []


def test_leases_are_handed_back_at_once_after_a_death(
    start: StartProgram, connection: Redis, redis_url: str
) -> None:
    # given leases, and a pause before the next worker, that are longer than anybody waits here
    program = start(options={"lease": 600}, supervisor={"first_pause": 60.0, "longest_pause": 60.0})
    jobs = submit_many([{"prompt": "hold /nowhere"}] * 6)
    program.until("began", 4)

    program.kill_worker()

    eventually(lambda: {job.status() for job in jobs} == {"queued"}, "the hand back")
    assert traces(connection) == []
    eventually(lambda: not connection.smembers("rq:workers"), "the end of the worker's record")
    order = connection.lrange(f"rq:queue:{keys.queue_name('default', 'default')}", 0, -1)
    assert [job_id.decode() for job_id in order] == [job.id for job in jobs]


def test_a_stop_just_after_a_claim_hands_back_or_finishes(
    start: StartProgram, connection: Redis
) -> None:
    jobs = submit_many([{"prompt": "hold /nowhere"}] * 6)
    program = start(options={"grace": 0.0})
    program.until("claimed")
    program.terminate()
    assert program.wait() == 0
    assert {job.status() for job in jobs} == {"queued"}
    assert attempts_lost(connection, jobs) == [0] * 6
    assert traces(connection) == []


class TestSupervisorKilled:
    def test_its_worker_stops_by_itself_and_hands_back(
        self, start: StartProgram, connection: Redis
    ) -> None:
        program = start(options={"grace": 0.0})
        jobs = submit_many([{"prompt": "hold /nowhere"}] * 6)
        program.until("began", 4)

        program.kill()

        program.until("ended 0")
        program.silence()
        assert {job.status() for job in jobs} == {"queued"}
        assert attempts_lost(connection, jobs) == [0] * 6
        assert traces(connection) == []

    def test_of_both_the_next_on_this_machine_reaps_them(
        self, start: StartProgram, connection: Redis
    ) -> None:
        first = start(options={"lease": 600})
        jobs = submit_many([{"prompt": "slow 1000000"}] * 6)
        first.until("began", 4)
        worker = first.worker
        first.kill()
        first.kill_worker()
        first.silence()
        assert {job.status() for job in jobs} == {"in_progress"}

        # the name is the same: that nobody holds it any more is found out first, not waited for
        second = start(options={"grace": 0.0})

        second.until("log worker child died here: 6 of its jobs")
        second.until("began", 4)
        assert second.worker != worker
        assert attempts_lost(connection, jobs) == [1] * 4 + [0] * 2
