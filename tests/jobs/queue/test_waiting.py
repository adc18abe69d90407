"""`await job`: any number of coroutines, one blocking read."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, eventually, failure
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from rq.job import Job as RQJob

from mlx_rq import Job, JobFailed, JobNotFound, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue import waiting as awaiting
from mlx_rq.jobs.queue.connection import connect

HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture
def held(start_worker: StartWorker) -> RunningWorker:
    """A worker that answers when it is told to."""
    return start_worker(FakeEngine(hold=True, capacity=1000), window=1000)


async def patiently(waiting: Awaitable[Any]) -> Any:
    """Awaits something that should not take long."""

    async def wait() -> Any:
        return await waiting

    return await asyncio.wait_for(wait(), PATIENCE)


def blocked_readers(connection: Redis) -> int:
    """How many connections block in an XREAD right now."""
    return sum(
        client["cmd"] == "xread" and "b" in client["flags"] for client in connection.client_list()
    )


async def until_blocked(connection: Redis, readers: int) -> None:
    """Returns once so many connections block in an XREAD."""
    while blocked_readers(connection) != readers:
        await asyncio.sleep(0.005)


def test_the_answer_is_returned(start_worker: StartWorker) -> None:
    start_worker()
    job = submit(messages=HI)
    response = asyncio.run(patiently(job))
    assert response["choices"][0]["message"]["content"] == f"chat for {job.id}"


def test_a_job_that_had_ended_before_is_no_wait(start_worker: StartWorker) -> None:
    start_worker()
    job = submit(messages=HI)
    response = job.result(PATIENCE)
    assert asyncio.run(patiently(job)) == response


def test_a_coroutine_is_woken_by_the_end_not_by_a_later_look(
    held: RunningWorker, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaiting, "_BLOCK_MILLISECONDS", 1000 * 2 * int(PATIENCE))

    async def run() -> Any:
        job = submit(messages=HI)
        task = asyncio.create_task(patiently(job))
        await asyncio.wait_for(until_blocked(connection, 1), PATIENCE)
        held.engine.release()
        return (await task)["id"] == f"chatcmpl-{job.id}"

    assert asyncio.run(run())


def test_five_hundred_coroutines_wait_through_one_blocking_read(
    held: RunningWorker, connection: Redis
) -> None:
    async def run() -> None:
        jobs = submit_many([{"prompt": str(number)} for number in range(500)])
        before = len(connection.client_list())
        tasks = [asyncio.create_task(patiently(job)) for job in jobs]
        held.engine.wait_for_tasks(500)
        await asyncio.wait_for(until_blocked(connection, 1), PATIENCE)

        assert not any(task.done() for task in tasks)
        opened = len(connection.client_list()) - before
        assert opened <= 10, f"{opened} connections for one reader"

        held.engine.release()
        responses = await asyncio.gather(*tasks)
        texts = [response["choices"][0]["text"] for response in responses]
        assert texts == [f"text for {job.id}" for job in jobs]

    asyncio.run(run())


def test_many_may_wait_for_the_same_job(held: RunningWorker, connection: Redis) -> None:
    async def run() -> None:
        job = submit(messages=HI)
        waiting = [asyncio.create_task(patiently(Job(job.id))) for _ in range(5)]
        await asyncio.wait_for(until_blocked(connection, 1), PATIENCE)
        held.engine.release()
        responses = await asyncio.gather(*waiting)
        assert {response["id"] for response in responses} == {f"chatcmpl-{job.id}"}

    asyncio.run(run())


def test_one_that_gives_up_does_not_disturb_the_others(
    held: RunningWorker, connection: Redis
) -> None:
    async def run() -> None:
        first, second = submit_many([{"messages": HI}] * 2)
        impatient = asyncio.create_task(patiently(first))
        patient = [asyncio.create_task(patiently(job)) for job in (first, second)]
        await asyncio.wait_for(until_blocked(connection, 1), PATIENCE)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        held.engine.release()
        assert [response["object"] for response in await asyncio.gather(*patient)] == [
            "chat.completion"
        ] * 2

    asyncio.run(run())


def test_a_failed_job_raises_as_result_does(start_worker: StartWorker) -> None:
    start_worker(FakeEngine(answer_with=lambda task: failure("no_luck")))
    with pytest.raises(JobFailed) as failed:
        asyncio.run(patiently(submit(messages=HI)))
    assert failed.value.error["code"] == "no_luck"


def test_a_cancelled_job_wakes_who_waits(redis_url: str, connection: Redis) -> None:
    async def run() -> None:
        job = submit(messages=HI)
        waiting = asyncio.create_task(patiently(job))
        await asyncio.wait_for(until_blocked(connection, 1), PATIENCE)
        job.cancel()
        with pytest.raises(JobFailed) as failed:
            await waiting
        assert failed.value.error["code"] == "cancelled"

    asyncio.run(run())


def test_an_unknown_job(redis_url: str) -> None:
    with pytest.raises(JobNotFound):
        asyncio.run(patiently(Job("none")))


def test_an_end_that_the_stream_did_not_tell_is_seen_a_little_later(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaiting, "_BLOCK_MILLISECONDS", 20)

    async def run() -> None:
        job = submit(messages=HI)
        waiting = asyncio.create_task(patiently(job))
        await asyncio.sleep(0)
        connection.hset(RQJob.key_for(job.id), "status", "failed")  # as RQ's own clean-up does
        with pytest.raises(JobFailed) as failed:
            await waiting
        assert failed.value.error["code"] == "abandoned"

    asyncio.run(run())


def test_an_end_between_the_first_look_and_the_first_read_is_not_missed(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given that nothing but the stream wakes a waiter
    monkeypatch.setattr(awaiting, "_BLOCK_MILLISECONDS", 1000 * 2 * int(PATIENCE))
    job = submit(messages=HI)
    looked = asyncio.Event()
    look = awaiting._Reader._wake_ended
    newest = AsyncRedis.xrevrange

    async def look_and_tell(self: Any, *arguments: Any) -> None:
        await look(self, *arguments)
        looked.set()

    # and that the job ends after the waiter has looked, before the reader notes where it begins
    async def newest_after_the_end(self: Any, *arguments: Any, **options: Any) -> Any:
        await looked.wait()
        job.cancel()
        return await newest(self, *arguments, **options)

    monkeypatch.setattr(awaiting._Reader, "_wake_ended", look_and_tell)
    monkeypatch.setattr(AsyncRedis, "xrevrange", newest_after_the_end)

    # then the waiter hears of it all the same
    with pytest.raises(JobFailed) as failed:
        asyncio.run(patiently(job))
    assert failed.value.error["code"] == "cancelled"


def test_an_end_that_the_stream_did_not_tell_is_seen_while_others_keep_it_busy(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(awaiting, "_BLOCK_MILLISECONDS", 50)

    async def run() -> None:
        job = submit(messages=HI)
        waiting = asyncio.create_task(patiently(job))
        await asyncio.wait_for(until_blocked(connection, 1), PATIENCE)
        connection.hset(RQJob.key_for(job.id), "status", "failed")  # as RQ's own clean-up does
        while not waiting.done():  # given that an entry comes more often than every 50 ms
            connection.xadd(keys.COMPLETIONS, {"job": "another", "status": "finished"})
            await asyncio.sleep(0.01)
        with pytest.raises(JobFailed):
            await waiting

    asyncio.run(asyncio.wait_for(run(), PATIENCE))


def test_each_event_loop_has_a_reader_of_its_own(start_worker: StartWorker) -> None:
    start_worker()
    for _ in range(3):
        job = submit(messages=HI)
        assert asyncio.run(patiently(job))["id"] == f"chatcmpl-{job.id}"


def test_no_connection_stays_behind(held: RunningWorker, connection: Redis) -> None:
    job = submit(messages=HI)
    connect().ping()
    before = {client["id"] for client in connection.client_list()}

    async def run() -> None:
        waiting = asyncio.create_task(patiently(job))
        await asyncio.wait_for(until_blocked(connection, 1), PATIENCE)
        held.engine.release()
        await waiting

    asyncio.run(run())

    def behind() -> list[Any]:
        return [
            client
            for client in connection.client_list()
            if client["id"] not in before and client["cmd"] == "xread"
        ]

    eventually(lambda: behind() == [], "the end of the reader's connections")
