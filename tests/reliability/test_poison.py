"""Jobs that break what generates them: they end, alone, and their neighbours are answered."""

import pytest
from checks import ALL, all_answered, attempts_lost
from fakes import PATIENCE
from harness import StartProgram
from redis import Redis
from rq import Queue
from rq.job import Job as RQJob

from mlx_rq import Job, JobFailed, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.payload import FUNCTION, SERIALIZER
from mlx_rq.worker.leases.recovery import reap

QUEUE = keys.queue_name("default", "default")


def code_of(job: Job) -> str:
    """The code of the error that a job ended with."""
    with pytest.raises(JobFailed) as failed:
        job.result(PATIENCE)
    return str(failed.value.error["code"])


@pytest.mark.parametrize("does", ["abort", "abort in add", "raise in step", "hang"])
def test_poison_ends_as_a_dead_letter_after_three_deaths_and_the_innocent_are_answered(
    start: StartProgram, connection: Redis, does: str
) -> None:
    prompts = ["answer"] * 3 + ["slow 5"] * 3 + [does] + ["answer"] * 14
    jobs = submit_many([{"prompt": prompt} for prompt in prompts])
    poison, innocent = jobs[6], [job for job in jobs if job is not jobs[6]]

    program = start(capacity=8)

    assert code_of(poison) == "max_attempts_exceeded"
    all_answered(innocent)
    # One more where they were read together: then nobody knew whose fault it was.
    read = does == "abort in add"
    assert len(program.said("log the worker")) == 3 + read, "deaths"
    assert attempts_lost(connection, [poison]) == [3]
    most = 0 if read else 2
    assert max(attempts_lost(connection, innocent)) == most, "then the suspect was alone"
    # those behind the batch only waited
    assert attempts_lost(connection, innocent[-4:]) == [0] * 4


def test_a_job_with_one_attempt_is_given_up_after_one_death(
    start: StartProgram, connection: Redis
) -> None:
    poison = submit(prompt="abort", max_attempts=1)
    program = start(capacity=2)
    assert code_of(poison) == "max_attempts_exceeded"
    assert len(program.said("log the worker was killed by SIGABRT")) == 1


def test_poison_that_was_put_in_by_hand_ends_too(start: StartProgram, connection: Redis) -> None:
    queue = Queue(QUEUE, connection=connection, serializer=SERIALIZER)
    rq_job = queue.enqueue(FUNCTION, kind="completion", body={"prompt": "abort"})
    assert not connection.hexists(RQJob.key_for(rq_job.id), "retries_left")
    program = start()
    assert code_of(Job(rq_job.id)) == "max_attempts_exceeded"
    assert len(program.said("log the worker was killed by SIGABRT")) == 3


def test_burst_goes_on_to_a_suspect_at_the_head_of_the_queue(
    start: StartProgram, connection: Redis
) -> None:
    jobs = submit_many([{"prompt": "answer"}] * 5)
    for job in (jobs[0], jobs[3]):
        connection.hset(RQJob.key_for(job.id), "retries_left", ALL - 2)
    program = start("work", options={"burst": True})
    assert program.wait() == 0
    all_answered(jobs)
    program.silence()
    claims = [found.string.partition(" ")[2] for found in program.said("claimed")]
    assert claims == ["claimed 1", "claimed 2", "claimed 1", "claimed 1"]


@pytest.mark.parametrize("does", ["wrong id", "forget", "wrong shape"])
def test_an_engine_that_answers_wrongly_fails_that_job_and_no_other(
    start: StartProgram, connection: Redis, does: str
) -> None:
    good, bad, other = submit_many([{"prompt": p} for p in ("answer", does, "slow 4")])
    program = start("work", options={"burst": True})
    assert code_of(bad) == "no_answer"
    all_answered([good, other])
    assert program.wait() == 0, "and the worker lives"
    assert attempts_lost(connection, [good, bad, other]) == [0] * 3


def test_a_worker_that_has_lost_track_of_a_job_is_started_afresh(
    start: StartProgram, connection: Redis
) -> None:
    forgotten, slow = submit_many([{"prompt": "forget"}, {"prompt": "slow 50"}])

    program = start(check_turns=1)

    found = program.until(r"log integrity: job (\w+) is claimed, but has neither task nor answer")
    assert found[2] == forgotten.id
    assert code_of(forgotten) == "no_answer", "when it is alone, as a suspect"
    all_answered([slow])
    assert len(program.said("log the worker ended with 1")) == 2
    assert attempts_lost(connection, [forgotten]) == [2]


def test_what_only_waited_loses_no_attempt_when_the_engine_raises(
    start: StartProgram, connection: Redis
) -> None:
    jobs = submit_many([{"prompt": "raise in step"}] + [{"prompt": "answer"}] * 5)
    program = start("work", capacity=2)
    assert program.wait() == 1
    assert {job.status() for job in jobs} == {"queued"}
    assert attempts_lost(connection, jobs) == [1, 1, 0, 0, 0, 0]


def test_a_job_whose_id_is_part_of_anothers_loses_no_attempt_with_it(
    start: StartProgram, connection: Redis
) -> None:
    queue = Queue(QUEUE, connection=connection, serializer=SERIALIZER)
    arguments = {"kind": "completion", "body": {"prompt": "hold /nowhere"}}
    for job_id in ("12", "1"):
        queue.enqueue(FUNCTION, kwargs=arguments, job_id=job_id)
    program = start("work", capacity=1, name="small")
    program.until("began 12")
    program.kill()
    program.wait()

    assert reap(connection, "small") == 2

    left = [int(connection.hget(RQJob.key_for(job_id), "retries_left")) for job_id in ("12", "1")]
    assert left == [ALL - 1, ALL]
