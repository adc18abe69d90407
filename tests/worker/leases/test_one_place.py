"""Whatever happens, and in whatever order: a job is in exactly one place and has at most one end.

Hypothesis plays producers, workers, dying workers and cancellations against a real Valkey, and
keeps a model of what must come of it: also who is suspect, whose attempts count, and which late
answers do. Nothing but our scripts and RQ's clean-up changes Redis.
"""

import json
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis import Redis
from rq.job import Job as RQJob
from rq.registry import StartedJobRegistry

from mlx_rq import Job, submit_many
from mlx_rq.jobs.client.job import STATUSES
from mlx_rq.jobs.openai.priority import PRIORITIES, Priority
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.finish import finish_job
from mlx_rq.jobs.queue.options import DEFAULT_MAX_ATTEMPTS
from mlx_rq.jobs.queue.payload import SERIALIZER, InertJob
from mlx_rq.worker.leases.claim import SUSPECT_AFTER, ClaimedJob, Claims
from mlx_rq.worker.leases.recovery import reap, recover_expired

QUEUES = [keys.queue_name("default", priority) for priority in PRIORITIES]
LONG = "A beginning that many share. " * 20
END = {"finished": "completed", "failed": "failed", "canceled": "cancelled"}


@dataclass
class Known:
    """What the model knows of a job."""

    job: Job
    holder: str | None = None
    end: str | None = None
    result: Any = None
    died: int = 0
    """Attempts that died with a worker, as far as was seen at the last claim or by us."""
    put_back_from: "Worker | None" = None
    """Who had it when RQ put it back: whether it died of that is seen at the next claim."""

    @property
    def lost(self) -> int:
        worker = self.put_back_from
        return self.died + (worker is not None and worker.counts(self.job.id))

    @property
    def waits(self) -> bool:
        return self.end is None and self.holder is None

    @property
    def suspect(self) -> bool:
        return SUSPECT_AFTER <= self.lost < DEFAULT_MAX_ATTEMPTS


@dataclass
class Worker:
    """A worker: its claims, what it believes to hold, and what it said that it generates."""

    name: str
    claims: Claims
    held: list[ClaimedJob] = field(default_factory=list)
    in_flight: set[str] | None = None

    def counts(self, job_id: str) -> bool:
        """Whether its death is an attempt of a job: where it said nothing, it is."""
        return self.in_flight is None or job_id in self.in_flight


class OnePlace(RuleBasedStateMachine):
    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.connection = Redis.from_url(self.url)
        self.connection.flushall()
        self.known: dict[str, Known] = {}
        self.results = 0
        self.workers = [
            Worker(
                name, Claims(self.connection, name, ["default"], lease_seconds=60, max_wait=30.0)
            )
            for name in ("a", "b")
        ]

    def teardown(self) -> None:
        self.connection.close()

    @rule(
        count=st.integers(1, 4),
        priority=st.sampled_from(PRIORITIES),
        prefix=st.sampled_from(["", "first ", "second "]),
    )
    def submit(self, count: int, priority: Priority, prefix: str) -> None:
        prompt = prefix + LONG if prefix else "short"
        bodies = [{"prompt": prompt}] * count
        for job in submit_many(bodies, priority=priority, redis_url=self.url):
            self.known[job.id] = Known(job)

    @rule(
        which=st.sampled_from([0, 1]),
        limit=st.integers(1, 5),
        enough=st.integers(1, 3),
        alone=st.booleans(),
        idle=st.booleans(),
    )
    def claim(self, which: int, limit: int, enough: int, alone: bool, idle: bool) -> None:
        worker = self.workers[which]
        waiting = [known for known in self.known.values() if known.waits]
        suspects = any(known.suspect for known in waiting)
        claimed = worker.claims.take(limit, enough=enough, alone=alone, idle=idle)
        assert len(claimed) <= limit
        assert len({job.id for job in claimed}) == len(claimed)
        if alone and not suspects:
            assert len(claimed) == min(limit, len(waiting))
        if alone and idle and waiting:
            assert claimed, "a suspect holds up nothing for ever"
        if any(self.known[job.id].suspect for job in claimed):
            assert idle
            assert len(claimed) == 1, "a suspect is generated alone"
        for job in claimed:
            known = self.known[job.id]
            assert known.end is None
            assert known.holder is None, "claimed while another holds it"
            assert job.attempt == known.lost + 1
            assert job.suspect is known.suspect
            known.holder = job.lease.execution_id
            known.died, known.put_back_from = known.lost, None
            if job.attempt > job.max_attempts:
                self.commit(job, "failed")
            else:
                worker.held.append(job)

    def commit(self, job: ClaimedJob, ending: Any) -> None:
        known = self.known[job.id]
        self.results += 1
        outcome = {"error": {}} if ending == "failed" else {"object": "x"}
        outcome["number"] = self.results
        reply = finish_job(
            self.connection,
            self.connection,
            job_id=job.id,
            queue_name=job.queue_name,
            ending=ending,
            outcome=outcome,
            result_ttl=60,
            lease=job.lease,
        )
        # An answer that comes late counts as long as nobody else has begun.
        late = known.waits and ending == "finished"
        if known.holder == job.lease.execution_id or late:
            assert reply[0] == b"ended"
            known.end, known.result, known.holder = ending, outcome, None
        elif known.end is not None:
            assert reply == [known.end.encode()]
        else:
            assert reply == [b"lost"]

    @rule(which=st.sampled_from([0, 1]), data=st.data(), fails=st.booleans())
    def end(self, which: int, data: st.DataObject, fails: bool) -> None:
        held = self.workers[which].held
        if held:
            job = held.pop(data.draw(st.integers(0, len(held) - 1)))
            self.commit(job, "failed" if fails else "finished")

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.known:
            known = data.draw(st.sampled_from(list(self.known.values())))
            assert known.job.cancel() is (known.end is None)
            if known.end is None:
                error = json.loads(self.connection.get(keys.result(known.job.id)))
                known.end, known.result, known.holder = "canceled", error, None

    @rule(data=st.data(), ours=st.booleans())
    def lose_a_lease(self, data: st.DataObject, ours: bool) -> None:
        held = [known for known in self.known.values() if known.holder is not None]
        if held:
            known = data.draw(st.sampled_from(held))
            name = self.connection.hget(RQJob.key_for(known.job.id), "worker_name").decode()
            (holder,) = (worker for worker in self.workers if worker.name == name)
            for queue in QUEUES:
                registry = StartedJobRegistry(
                    queue,
                    connection=self.connection,
                    serializer=SERIALIZER,
                    job_class=InertJob,
                )
                self.connection.zadd(registry.key, {f"{known.job.id}:{known.holder}": 1}, xx=True)
                if not ours:
                    registry.cleanup()
            if ours:
                assert recover_expired(self.connection, self.workers[0].claims.queues) == 1
            known.holder = None
            if ours:
                known.died += holder.counts(known.job.id)
            else:
                known.put_back_from = holder

    @rule(which=st.sampled_from([0, 1]), data=st.data())
    def say_what_is_in_flight(self, which: int, data: st.DataObject) -> None:
        worker = self.workers[which]
        worker.in_flight = {job.id for job in worker.held if data.draw(st.booleans())}
        self.connection.set(keys.in_flight(worker.name), " ".join(worker.in_flight))

    @rule(which=st.sampled_from([0, 1]))
    def die(self, which: int) -> None:
        """Its supervisor gives back all that it held; a worker of that name begins anew."""
        worker = self.workers[which]
        mine = [
            known
            for job in worker.held
            if (known := self.known[job.id]).holder == job.lease.execution_id
        ]
        assert reap(self.connection, worker.name) == len(mine)
        for known in mine:
            known.holder = None
            known.died += worker.counts(known.job.id)
        worker.held = []

    @rule(which=st.sampled_from([0, 1]), data=st.data())
    def hand_back(self, which: int, data: st.DataObject) -> None:
        worker = self.workers[which]
        if worker.held:
            number = data.draw(st.integers(1, len(worker.held)))
            back, worker.held = worker.held[:number], worker.held[number:]
            mine = [job for job in back if self.known[job.id].holder == job.lease.execution_id]
            assert worker.claims.hand_back(back) == len(mine)
            for job in mine:
                self.known[job.id].holder = None

    @invariant()
    def every_job_is_in_one_place_and_has_the_result_that_it_should(self) -> None:
        seen = self.look()
        jobs = self.known.values()
        waiting = [known.job.id for known in jobs if known.waits]
        held = [f"{known.job.id}:{known.holder}" for known in jobs if known.holder is not None]
        assert sorted(seen["queue"]) == sorted(waiting)
        assert sorted(seen["wip"]) == sorted(held)
        for ending in END:
            assert sorted(seen[ending]) == sorted(
                known.job.id for known in jobs if known.end == ending
            )
        assert sorted(seen["told"]) == sorted(known.job.id for known in jobs if known.end)
        for known, status, text in zip(jobs, seen["statuses"], seen["results"], strict=True):
            if known.end is not None:
                assert (status, STATUSES[status]) == (known.end, END[known.end])
                assert json.loads(text) == known.result, "the first result stands"
            else:
                assert status == ("queued" if known.holder is None else "started")
                assert text is None

    def look(self) -> dict[str, list[Any]]:
        """What is where in Redis, in one round trip."""
        with self.connection.pipeline() as pipe:
            for queue in QUEUES:
                pipe.lrange(f"rq:queue:{queue}", 0, -1)
                for registry in ("wip", *END):
                    pipe.zrange(f"rq:{registry}:{queue}", 0, -1)
            for job_id in self.known:
                pipe.hget(RQJob.key_for(job_id), "status")
                pipe.get(keys.result(job_id))
            pipe.xrange(keys.COMPLETIONS)
            *answers, told = pipe.execute()
        places = ("queue", "wip", *END)
        seen: dict[str, list[Any]] = {place: [] for place in places}
        for place in places * len(QUEUES):
            seen[place] += [value.decode() for value in answers.pop(0)]
        seen["statuses"] = [status.decode() for status in answers[::2]]
        seen["results"] = answers[1::2]
        seen["told"] = [fields[b"job"].decode() for _, fields in told]
        return seen


@pytest.mark.usefixtures("connection")
def test_a_job_is_always_in_one_place_and_ends_once(redis_url: str) -> None:
    machine = type("OnePlaceHere", (OnePlace,), {"url": redis_url})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
