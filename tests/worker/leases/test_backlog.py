"""A long backlog is claimed in the order of the prefix tree, and nothing in it is lost."""

import random
from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
from redis import Redis
from rq import Queue
from rq.job import Job as RQJob

from mlx_rq import Job, submit, submit_many
from mlx_rq.engine.interface import Outcome
from mlx_rq.jobs.queue import keys, scripts
from mlx_rq.jobs.queue.backlog import lost_from, waiting_in
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.payload import SERIALIZER, read_payload
from mlx_rq.worker.leases.claim import ClaimedJob, Claims
from mlx_rq.worker.results.commit import commit

QUEUE = keys.queue_name("default", "default")
SYSTEM = "You answer in one word. " * 10
WINDOW = 256


def document(number: int) -> str:
    return "".join(random.Random(number).choices("abcdefgh ", k=700))


def question(about: int, number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"{document(about)} Question {number}?"},
        ]
    }


def shuffled(documents: int, questions: int) -> list[tuple[int, dict[str, Any]]]:
    work = [(d, question(d, q)) for d in range(documents) for q in range(questions)]
    random.Random(3).shuffle(work)
    return work


def claims_of(connection: Redis, name: str = "w", max_wait: float = 30.0) -> Claims:
    connection.set(keys.worker(name), "{}")  # it lives
    return Claims(connection, name, ["default"], lease_seconds=60, max_wait=max_wait)


def about(job: ClaimedJob) -> str:
    text: str = read_payload(job.data).body["messages"][1]["content"]
    return text[:700]


def end(connection: Redis, jobs: list[ClaimedJob]) -> None:
    for job in jobs:
        Job(job.id).cancel()


def drain(claims: Claims, **how: Any) -> list[ClaimedJob]:
    taken: list[ClaimedJob] = []
    while some := claims.take(WINDOW, **how):
        taken += some
    return taken


def runs(jobs: list[ClaimedJob]) -> int:
    return len(list(groupby(jobs, key=about)))


def test_jobs_that_begin_alike_come_together_out_of_a_shuffled_backlog(
    redis_url: str, connection: Redis
) -> None:
    work = shuffled(documents=300, questions=8)
    ids = {job.id for job in submit_many(body for _, body in work)}

    taken = drain(claims_of(connection))

    assert len(taken) == len({job.id for job in taken}) == 2400
    assert {job.id for job in taken} == ids
    assert runs(taken) <= 300 + 8  # the last ones come in the order of their arrival


def test_two_workers_walk_different_parts_of_it(redis_url: str, connection: Redis) -> None:
    submit_many(body for _, body in shuffled(documents=400, questions=8))
    workers = [claims_of(connection, name) for name in "ab"]
    taken: list[list[ClaimedJob]] = [[], []]

    while True:
        claimed = [worker.take(WINDOW, enough=16, alone=False) for worker in workers]
        if not any(claimed):
            break
        for all_of_it, some in zip(taken, claimed, strict=True):
            all_of_it += some

    assert len({job.id for jobs in taken for job in jobs}) == 3200
    assert min(map(len, taken)) > 1000
    assert sum(map(runs, taken)) <= 400 + 40
    both = {about(job) for job in taken[0]} & {about(job) for job in taken[1]}
    assert len(both) <= 20


def test_where_a_dead_worker_was_is_forgotten(redis_url: str, connection: Redis) -> None:
    submit_many(body for _, body in shuffled(documents=150, questions=8))
    claims_of(connection, "dead", max_wait=0.0).take(WINDOW)
    connection.delete(keys.worker("dead"))
    drain(claims_of(connection, "living", max_wait=0.0))

    submit_many(body for _, body in shuffled(documents=150, questions=8))
    claims_of(connection, "living", max_wait=0.0).take(WINDOW)

    places = connection.hkeys(keys.backlog_state(QUEUE))
    assert [name for name in places if name.startswith(b"at ")] == [b"at living"]


def test_a_lone_job_that_comes_in_the_middle_is_taken_with_the_next_claim(
    redis_url: str, connection: Redis
) -> None:
    submit_many(body for _, body in shuffled(documents=300, questions=8))
    claims = claims_of(connection)
    claims.take(WINDOW)
    lone = submit(messages=[{"role": "user", "content": "What is the time?"}])
    own = submit(messages=[*question(1, 1)["messages"][:1], {"role": "user", "content": "Hi."}])

    taken = [job.id for job in claims.take(WINDOW)]

    assert {lone.id, own.id} <= set(taken)


def places_of(lone: list[Job], claims: Claims, limit: int, most: int) -> list[int]:
    """Of each of some jobs, how many claims were made before the one that took it."""
    ids = {job.id for job in lone}
    places: list[int] = []
    for number in range(most):
        places += [number for job in claims.take(limit) if job.id in ids]
    return places


class TestLoneJobsAmongBulk:
    """Each is claimed soon, whatever came before and after it, and bulk work keeps its share."""

    @pytest.fixture
    def claims(self, redis_url: str, connection: Redis) -> Claims:
        submit_many(body for _, body in shuffled(documents=80, questions=8))
        claims = claims_of(connection)
        claims.take(16)
        return claims

    @staticmethod
    def ask(text: str) -> Job:
        return submit(messages=[{"role": "user", "content": text}])

    def test_as_many_as_come(self, claims: Claims) -> None:
        lone = [self.ask(f"What is {number}?") for number in range(40)]
        assert places_of(lone, claims, limit=16, most=20) == [n for n in range(20) for _ in "12"]

    @pytest.mark.parametrize("limit", [1, 16, 256])
    def test_though_more_bulk_work_comes(self, claims: Claims, limit: int) -> None:
        lone = [self.ask("What is the time?")]
        submit_many(question(1000 + number // 4, number % 4) for number in range(40))
        assert places_of(lone, claims, limit, most=2) == [0]

    def test_though_much_was_given_back_which_goes_before_all_else(self, claims: Claims) -> None:
        returned = claims.take(WINDOW)
        claims.hand_back(returned)
        lone = {self.ask(f"What is {number}?").id for number in range(40)}
        taken = [job.id for job in claims.take(16)]
        assert lone.isdisjoint(taken[2:])
        assert taken[2:] == [job.id for job in returned[:14]]

    def test_two_of_the_same_go_together(self, claims: Claims) -> None:
        lone = [self.ask("What is the time?"), self.ask("What is the time?")]
        assert places_of(lone, claims, limit=16, most=1) == [0, 0]

    def test_one_that_there_was_no_room_for_goes_with_the_next_claim(self, claims: Claims) -> None:
        lone = [self.ask("What is the time?"), self.ask("What is the time?")]
        assert places_of(lone, claims, limit=1, most=9) == [0, 8]

    def test_the_newest_does_not_wait_for_all_that_came_alone(self, claims: Claims) -> None:
        for number in range(40):
            self.ask(f"What is {number}?")
        assert places_of([self.ask("What is the time?")], claims, limit=16, most=2) == [0]

    def test_one_that_was_cancelled_is_in_nobodys_way(self, claims: Claims) -> None:
        for number in range(40):
            self.ask(f"What is {number}?").cancel()
        assert places_of([self.ask("What is the time?")], claims, limit=16, most=1) == [0]

    def test_they_get_an_eighth_however_little_is_claimed_at_once(self, claims: Claims) -> None:
        lone = [self.ask(f"What is {number}?") for number in range(40)]
        assert places_of(lone, claims, limit=1, most=32) == [0, 8, 16, 24]

    def test_what_has_become_many_is_no_newcomer(self, claims: Claims) -> None:
        first = submit(**question(1000, 0))
        submit_many(question(1000, number) for number in range(1, 9))
        submit_many(question(2000 + number, 0) for number in range(100))
        assert places_of([first], claims, limit=16, most=1) == []


@pytest.mark.parametrize("documents", [10, 80], ids=["in a short queue", "in a long one"])
def test_a_claim_that_ends_amid_jobs_that_begin_alike_says_so(
    redis_url: str, connection: Redis, documents: int
) -> None:
    submit_many(question(d, q) for d in range(documents) for q in range(7))
    claims = claims_of(connection)
    for limit, follow in ((8, True), (6, False), (1, True), (6, False)):
        assert [job.others_follow for job in claims.take(limit)] == [*[False] * (limit - 1), follow]
    assert not drain(claims)[-1].others_follow


def test_what_comes_after_a_round_has_closed_waits_for_the_next(
    redis_url: str, connection: Redis
) -> None:
    """However many come of what is being worked on, all that waited before is reached first."""
    first = submit_many(body for _, body in shuffled(documents=200, questions=8))
    claims = claims_of(connection, max_wait=0.0)
    taken = claims.take(WINDOW)
    more = submit_many(question(d, 100 + q) for d in range(200) for q in (1, 2))
    later = {job.id for job in more}

    while {job.id for job in first} - {job.id for job in taken}:
        taken += claims.take(WINDOW)

    early = sum(job.id in later for job in taken)
    assert early < WINDOW  # those that fill the last claim of the round


@pytest.fixture
def set_clock(connection: Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has the clock of Redis, as scripts see it, stand still, so many seconds from the start."""
    load, clock = scripts.load_script, "tonumber(time[1])"
    assert clock in load(scripts.__package__, "clock.lua")
    still = "tonumber(redis.call('GET', 'test:clock'))"
    monkeypatch.setattr(scripts, "load_script", lambda *name: load(*name).replace(clock, still))
    start, _ = connection.time()
    connection.set("test:clock", start)
    return lambda seconds: connection.set("test:clock", start + seconds)


def test_a_round_takes_in_what_comes_within_the_time_that_a_job_may_wait(
    redis_url: str, connection: Redis, set_clock: Callable[[float], None]
) -> None:
    def asked(number: int) -> set[str]:
        """Questions about what is being worked on."""
        jobs = submit_many(question(d, number + q) for d in range(80) for q in (1, 2))
        return {job.id for job in jobs}

    submit_many(body for _, body in shuffled(documents=80, questions=8))
    claims = claims_of(connection, max_wait=30)
    claims.take(1)
    set_clock(29)
    in_time = asked(100)
    set_clock(31)
    too_late = asked(200)

    taken = {job.id for _ in range(14) for job in claims.take(50)}  # of 799 in the round

    assert len(taken) == 700
    assert len(taken & in_time) >= 160 - 99
    assert taken & too_late == set()


def test_a_round_stays_open_no_longer_where_the_clock_of_redis_was_set_back(
    redis_url: str, connection: Redis
) -> None:
    submit_many(body for _, body in shuffled(documents=150, questions=8))
    claims = claims_of(connection)
    claims.take(1)
    state = keys.backlog_state(QUEUE)
    connection.hset(state, "closes", redis_time(connection) + 3600)

    claims.take(1)

    assert float(connection.hget(state, "closes")) <= redis_time(connection) + 30


def test_what_was_given_back_goes_first_and_in_its_order(redis_url: str, connection: Redis) -> None:
    submit_many(body for _, body in shuffled(documents=300, questions=8))
    claims = claims_of(connection)
    taken = claims.take(WINDOW)
    claims.take(WINDOW)

    assert claims.hand_back(taken) == WINDOW
    again = claims_of(connection, "another").take(WINDOW)

    assert [job.id for job in again] == [job.id for job in taken]


def test_jobs_that_only_rqs_list_knows_are_reached(redis_url: str, connection: Redis) -> None:
    jobs = submit_many(body for _, body in shuffled(documents=200, questions=8))
    for name in ("backlog", "backlog-next"):
        for job in random.Random(1).sample(jobs, 300):
            for member in connection.zscan_iter(f"mlx-rq:{name}:{QUEUE}", match=f"*:{job.id}"):
                connection.zrem(f"mlx-rq:{name}:{QUEUE}", member[0])

    assert {job.id for job in drain(claims_of(connection))} == {job.id for job in jobs}


def test_cancelled_jobs_are_passed_by(redis_url: str, connection: Redis) -> None:
    jobs = submit_many(body for _, body in shuffled(documents=200, questions=8))
    gone = jobs[::2]
    for job in gone:
        job.cancel()

    taken = {job.id for job in drain(claims_of(connection))}

    assert taken == {job.id for job in jobs} - {job.id for job in gone}


def test_what_waits_is_counted_right_also_when_a_long_backlog_has_become_short(
    redis_url: str, connection: Redis
) -> None:
    submit_many(body for _, body in shuffled(documents=160, questions=8))
    claims = claims_of(connection)

    for taken in range(WINDOW, 1280, WINDOW):
        assert len(claims.take(WINDOW)) == WINDOW
        assert waiting_in(connection, [QUEUE]) == [1280 - taken]


def test_what_waits_is_counted_right_where_many_are_cancelled(
    redis_url: str, connection: Redis
) -> None:
    jobs = submit_many(body for _, body in shuffled(documents=138, questions=8))
    claims = claims_of(connection)
    claimed = {job.id for job in claims.take(WINDOW)}
    waiting = [job for job in jobs if job.id not in claimed]
    for job in waiting[:200]:
        job.cancel()

    assert waiting_in(connection, [QUEUE]) == [len(waiting) - 200]
    taken = claims.take(WINDOW)
    assert waiting_in(connection, [QUEUE]) == [len(waiting) - 200 - WINDOW]
    assert {job.id for job in taken} <= {job.id for job in waiting[200:]}
    assert len(drain(claims)) == len(waiting) - 200 - WINDOW
    assert waiting_in(connection, [QUEUE]) == [0]


@pytest.mark.parametrize("how", ["answered late", "put back by RQ", "answered and put back by RQ"])
def test_what_waits_is_counted_right_where_a_job_stands_in_the_list_twice(
    redis_url: str, connection: Redis, how: str
) -> None:
    submit_many(body for _, body in shuffled(documents=138, questions=8))
    claims = claims_of(connection)
    job = claims.take(WINDOW)[0]  # out of the middle: one entry is left there
    if how == "answered late":
        claims.hand_back([job])
    if "answered" in how:
        commit(connection, [(job, Outcome(job.id, {"object": "x"}))])
    if "put back" in how:
        connection.hset(RQJob.key_for(job.id), "status", "queued")
        connection.lpush(f"rq:queue:{QUEUE}", job.id)
    claims.take(1)

    assert waiting_in(connection, [QUEUE]) == [138 * 8 - WINDOW - 1]
    assert len(drain(claims)) == 138 * 8 - WINDOW - 1
    assert waiting_in(connection, [QUEUE]) == [0]
    assert lost_from(connection, [QUEUE])[0].jobs == 0


def test_a_queue_that_rq_has_emptied_is_counted_afresh(redis_url: str, connection: Redis) -> None:
    submit_many(body for _, body in shuffled(documents=150, questions=8))
    claims = claims_of(connection)
    claims.take(WINDOW)
    Queue(QUEUE, connection=connection, serializer=SERIALIZER).empty()

    assert claims.take(WINDOW) == []
    more = submit_many(question(d, 0) for d in range(5))
    assert waiting_in(connection, [QUEUE]) == [5]
    assert {job.id for job in claims.take(WINDOW)} == {job.id for job in more}
    assert lost_from(connection, [QUEUE])[0].jobs == 0
    gone = submit_many(question(d, 0) for d in range(5))[:3]
    connection.delete(*(RQJob.key_for(job.id) for job in gone))
    assert len(drain(claims)) == 2
    assert lost_from(connection, [QUEUE])[0].jobs == 3


def test_a_job_that_rq_took_off_its_list_is_none_that_was_lost(
    redis_url: str, connection: Redis
) -> None:
    jobs = submit_many(body for _, body in shuffled(documents=40, questions=8))
    Queue(QUEUE, connection=connection, serializer=SERIALIZER).remove(jobs[300].id)
    assert len(drain(claims_of(connection))) == 320  # see docs/order.md
    assert lost_from(connection, [QUEUE])[0].jobs == 0


def test_rqs_list_is_empty_once_all_is_taken(redis_url: str, connection: Redis) -> None:
    submit_many(body for _, body in shuffled(documents=200, questions=8))
    claims = claims_of(connection)
    taken = drain(claims)
    claims.take(WINDOW)

    assert Queue(QUEUE, connection=connection, serializer=SERIALIZER).count == 0
    assert len(taken) == 1600
    assert connection.exists(f"mlx-rq:backlog:{QUEUE}", f"mlx-rq:backlog-next:{QUEUE}") == 0


@pytest.mark.parametrize("name", ["", "-next", "-state", "-returned", "-newcomers"])
def test_a_key_of_another_type_is_no_end(redis_url: str, connection: Redis, name: str) -> None:
    jobs = submit_many(body for _, body in shuffled(documents=150, questions=8))
    connection.delete(f"mlx-rq:backlog{name}:{QUEUE}")
    connection.set(f"mlx-rq:backlog{name}:{QUEUE}", "something else")

    assert {job.id for job in drain(claims_of(connection))} == {job.id for job in jobs}


def test_a_list_in_which_nothing_waits_is_not_looked_through_for_the_backlog(
    redis_url: str, connection: Redis
) -> None:
    connection.rpush(f"rq:queue:{QUEUE}", *(f"gone{number}" for number in range(300)))
    connection.config_resetstat()
    assert claims_of(connection).take(WINDOW) == []
    assert not connection.exists(f"rq:queue:{QUEUE}")
    assert "cmdstat_lrange" not in connection.info("commandstats")
