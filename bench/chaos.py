"""Everything is killed, about every second, while jobs are answered; then each id is reconciled.

    python bench/chaos.py [--jobs 2000] [--seed 1] [--seconds 120] [--json]

Two supervised workers with a fake engine answer slowly, wrongly, raise, abort or hang, as their
jobs say. Workers, supervisors and Valkey (append-only file, written at once) are killed with
`kill -9`, paused (workers also for more than two leases) and continued; the wall clocks of workers
are set; connections are cut; jobs are cancelled; RQ's clean-up runs all the while, over a slow link
and by a clock of its own. After so many `--seconds` the killing ends and the rest is answered. The
seed decides the jobs and the schedule, which is printed.

Ends with exit code 1 where a job has no end, two ends, or another answer than its own, or where a
worker says that Redis lost its data.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "reliability")]

from harness import Program, Server  # noqa: E402
from redis import Redis  # noqa: E402
from redis.exceptions import RedisError  # noqa: E402
from rq.job import Job as RQJob  # noqa: E402
from rq_clean_up import rq_cleaning_up  # noqa: E402

from mlx_rq import Job, RedisUnavailable, submit_many  # noqa: E402
from mlx_rq.jobs.client.job import ended_among  # noqa: E402
from mlx_rq.jobs.openai.priority import PRIORITIES  # noqa: E402
from mlx_rq.jobs.queue import keys  # noqa: E402
from mlx_rq.jobs.queue.options import RECOVERY_RETRIES  # noqa: E402

LEASE, STALL = 2, 4
PATIENCE = 240.0
"""Seconds that are left to answer the rest when the killing has ended."""
INNOCENT_ATTEMPTS = 100
"""So many that an innocent job is never given up for what it had to live through."""

ENDS = {"raise in step": "max_attempts_exceeded", "abort": "max_attempts_exceeded"}
ENDS |= {"abort in add": "max_attempts_exceeded", "hang": "max_attempts_exceeded"}
ENDS |= dict.fromkeys(("wrong shape", "wrong id", "forget"), "no_answer")
"""How jobs end that no engine can answer: with this code."""

KINDS = {
    "worker": 30,
    "supervisor": 10,
    "both": 8,
    "valkey": 12,
    "connections": 15,
    "pause worker": 12,
    "sleep": 5,
    "set clock": 10,
    "pause valkey": 5,
    "cancel": 8,
}
"""What is done, and how often in a hundred times."""


@dataclass(frozen=True)
class Blow:
    """One thing that is done: when, what, to which worker, and for how long."""

    at: float
    kind: str
    which: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  {self.kind:13} {self.which}  {self.seconds:.1f}"


def schedule(seed: int, seconds: float) -> list[Blow]:
    """What will be done; the same for the same seed."""
    chance, at, blows = random.Random(seed), 1.0, []
    while (at := at + chance.uniform(0.5, 1.5)) < seconds:
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        blows.append(Blow(at, kind, chance.randrange(2), chance.uniform(0.2, 1.5 * STALL)))
    return blows


def prompts(seed: int, count: int) -> list[str]:
    """What the jobs ask for: one in eight is slow, one in sixty cannot be answered."""
    chance = random.Random(f"prompts {seed}")
    asked = [*ENDS]
    while len(asked) < count:
        kinds = ["answer", f"slow {chance.randrange(2, 12)}", chance.choice(list(ENDS))]
        asked += chance.choices(kinds, [104, 15, 2])
    chance.shuffle(asked)
    return [f"{what} | {number}" for number, what in enumerate(asked[:count])]


@dataclass
class Arena:
    """The server, the workers, and what was done to them."""

    folder: Path
    server: Server
    jobs: list[Job]
    pace: float
    done: Counter[str] = field(default_factory=Counter)
    cancelled: set[str] = field(default_factory=set)
    programs: list[list[Program]] = field(default_factory=lambda: [[], []])
    resumes: list[tuple[float, int | None]] = field(default_factory=list)
    """When what is paused goes on: a process id, or None for Valkey."""

    def clock(self, which: int) -> Path:
        """The file that says how wrong the wall clock of one side's processes is."""
        return self.folder / f"clock-{which}"

    def start(self, which: int) -> None:
        """Starts a supervisor and its worker, as whoever runs it as a service does."""
        self.programs[which].append(
            Program(
                "supervise",
                url=self.server.url,
                name=f"worker-{which}-{len(self.programs[which])}",
                capacity=16,
                pace=self.pace,
                spool=str(self.folder / f"spool-{which}"),
                data=str(self.folder / "data"),
                clock=self.clock(which),
                options={"lease": LEASE, "window": 64, "grace": 1.0, "max_wait": 5.0},
                supervisor={"stall": STALL, "first_pause": 0.05},
            )
        )

    def strike(self, blow: Blow) -> None:
        """Does one thing."""
        program = self.programs[blow.which][-1]
        worker = program.worker if program.said("started") else None
        self.done[blow.kind] += 1
        with suppress(ProcessLookupError, RedisError, RedisUnavailable):
            match blow.kind:
                case "worker" | "both" if worker:
                    os.kill(worker, signal.SIGKILL)
                case "pause worker" if worker:
                    os.kill(worker, signal.SIGSTOP)
                    self.resumes.append((time.monotonic() + blow.seconds, worker))
                case "sleep" if worker:  # all of its machine does
                    for process in (worker, program.process.pid):
                        os.kill(process, signal.SIGSTOP)
                        self.resumes.append((time.monotonic() + 2 * LEASE + blow.seconds, process))
                case "set clock":
                    ahead = random.Random(blow.seconds).choice((-86400, -70, 0, 70, 300, 86400))
                    self.clock(blow.which).write_text(str(ahead))
                case "pause valkey":
                    self.server.send(signal.SIGSTOP)
                    self.resumes.append((time.monotonic() + blow.seconds / 4, None))
                case "valkey":
                    self.resume(everything=True)
                    self.server.kill()
                    time.sleep(blow.seconds / 8)
                    self.server.start()
                case "connections":
                    with Redis.from_url(self.server.url, socket_timeout=2) as connection:
                        connection.client_kill_filter(_type="normal", skipme=True)
                        connection.client_kill_filter(_type="pubsub", skipme=True)
                case "cancel":
                    job = self.jobs[int(blow.seconds * 1e6) % len(self.jobs)]
                    self.cancelled.add(job.id)  # whether or not the reply comes
                    job.cancel()
        if blow.kind in ("supervisor", "both"):
            program.kill()
            self.start(blow.which)

    def resume(self, *, everything: bool = False) -> None:
        """Lets go on what was paused long enough."""
        now = time.monotonic()
        for due in [due for due in self.resumes if everything or due[0] <= now]:
            self.resumes.remove(due)
            with suppress(ProcessLookupError):
                if due[1] is None:
                    self.server.send(signal.SIGCONT)
                else:
                    os.kill(due[1], signal.SIGCONT)

    def tend(self) -> None:
        """Starts again what has ended by itself (it found no Redis), as a service manager does."""
        for which, programs in enumerate(self.programs):
            if programs[-1].process.poll() is not None:
                self.done["(ended by itself)"] += 1
                self.start(which)

    def said(self, pattern: str) -> Iterator[re.Match[str]]:
        for programs in self.programs:
            for program in programs:
                yield from program.said(pattern)

    def close(self) -> None:
        self.resume(everything=True)
        for programs in self.programs:
            for program in programs:
                program.close()
        self.server.close()


def fight(arena: Arena, blows: Sequence[Blow], seconds: float) -> float:
    """Strikes until the schedule ends, then waits for the rest; gives the seconds that it took."""
    began = time.monotonic()
    left, open_ids = list(blows), [job.id for job in arena.jobs]
    while open_ids and (took := time.monotonic() - began) < seconds + PATIENCE:
        if left and left[0].at <= took:
            arena.strike(left.pop(0))
        arena.resume(everything=not left)
        arena.tend()
        time.sleep(0.1)
        if not arena.resumes or all(process for _, process in arena.resumes):
            with (
                suppress(RedisError),
                Redis.from_url(arena.server.url, socket_timeout=5) as connection,
            ):
                ended = set(ended_among(connection, open_ids))
                open_ids = [job_id for job_id in open_ids if job_id not in ended]
    return time.monotonic() - began


def reconcile(arena: Arena, asked: Sequence[str], connection: Redis) -> dict[str, Any]:
    """Looks at every id: its end, its answer, its attempts."""
    entries: Any = connection.xrange(keys.COMPLETIONS)
    told = Counter(fields[b"job"].decode() for _, fields in entries)
    began = Counter(found[2] for found in arena.said(r"began (\w+)"))
    statuses: Counter[str] = Counter()
    wrong: list[str] = []
    lost = beyond = 0
    for job, prompt in zip(arena.jobs, asked, strict=True):
        status, does = job.status(), prompt.partition(" |")[0]
        statuses[status] += 1
        text = connection.get(keys.result(job.id))
        result = json.loads(text) if text else {}
        expected = ENDS.get(does)
        if status == "completed":
            right = expected is None and result["choices"][0]["text"] == f"text for {job.id}"
        elif status == "cancelled":
            right = job.id in arena.cancelled
        else:
            right = expected is not None and result.get("error", {}).get("code") == expected
        if not right or told[job.id] != 1 or connection.xlen(f"rq:results:{job.id}") != 1:
            wrong.append(f"{job.id} ({does}): {status}, told {told[job.id]} times, {text!r:.200}")
        if expected is None:
            attempts = INNOCENT_ATTEMPTS - 1 + RECOVERY_RETRIES
            retries = int(connection.hget(RQJob.key_for(job.id), "retries_left") or attempts)
            lost += attempts - retries
            beyond += max(0, attempts - retries - began[job.id])
    answered = Counter(found[2] for found in arena.said(r"answered (\w+)"))
    return {
        "submitted": len(arena.jobs),
        **{status: statuses[status] for status in sorted(statuses)},
        "wrong": wrong,
        "left_in_lists": sum(
            connection.llen(f"rq:queue:{name}") + connection.zcard(f"rq:wip:{name}")
            for name in (keys.queue_name("default", priority) for priority in PRIORITIES)
        ),
        "workers_started": sum(1 for _ in arena.said("started")),
        "generated_again": sum(answered.values()) - len(answered),
        "said_to_have_slept": sum(1 for _ in arena.said("log this worker slept for")),
        "falsely_said_lost": sum(1 for _ in arena.said("log Redis lost its data")),
        "discarded": sum(1 for _ in arena.said("log job .*: answer discarded")),
        "attempts_lost_by_innocents": lost,
        "of_which_never_begun": beyond,
    }


def run(
    jobs: int, seed: int, seconds: float, pace: float, folder: Path, show: bool
) -> dict[str, Any]:
    """Runs it all and gives the figures."""
    blows, asked = schedule(seed, seconds), prompts(seed, jobs)
    if show:
        print(*blows, sep="\n")
    (folder / "valkey").mkdir()
    server = Server(folder / "valkey")
    server.start()
    submitted: dict[str, Job] = {}
    for attempts, killers in ((INNOCENT_ATTEMPTS, False), (3, True)):
        some = [
            prompt
            for prompt in asked
            if (ENDS.get(prompt.partition(" |")[0]) == "max_attempts_exceeded") is killers
        ]
        bodies = [{"prompt": prompt} for prompt in some]
        made = submit_many(bodies, max_attempts=attempts, redis_url=server.url)
        submitted |= dict(zip(some, made, strict=True))
    with closing(Arena(folder, server, [submitted[prompt] for prompt in asked], pace)) as arena:
        for which in (0, 1):
            arena.clock(which).touch()
            arena.start(which)
        with rq_cleaning_up(server.url, arena.done):
            took = fight(arena, blows, seconds)
        with Redis.from_url(server.url) as connection:
            figures = reconcile(arena, asked, connection)
        if figures["wrong"]:
            for programs in arena.programs:
                for number, program in enumerate(programs):
                    name = f"chaos-{os.getpid()}-{number}-{program.process.pid}.log"
                    Path(folder.parent, name).write_text("\n".join(program.lines))
    return {"seed": seed, "seconds": round(took, 1), "blows": dict(arena.done), **figures}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that a step takes")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        figures = run(
            arguments.jobs,
            arguments.seed,
            arguments.seconds,
            arguments.pace,
            Path(folder),
            not arguments.json,
        )
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        for name, value in figures.items():
            print(f"{name.replace('_', ' '):27} {value}")
    ends = sum(figures.get(status, 0) for status in ("completed", "failed", "cancelled"))
    faults = figures["left_in_lists"] + figures["falsely_said_lost"]
    return int(bool(figures["wrong"]) or ends != figures["submitted"] or faults > 0)


if __name__ == "__main__":
    sys.exit(main())
