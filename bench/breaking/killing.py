"""Everything is killed, about every second, while jobs are answered.

Workers, supervisors and Valkey (append-only file, written at once) are killed with `kill -9`,
paused (workers also for more than two leases) and continued; the wall clocks of workers are set; a
third worker comes and goes in a PID namespace of its own; connections are cut; jobs are cancelled;
odd values are put into keys and fields; RQ's clean-up runs all the while, over a slow link and by a
clock of its own.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import OTHER_NAMESPACE, Server
from redis import Redis
from redis.exceptions import RedisError
from rq_clean_up import rq_cleaning_up

from breaking.blows import ELSEWHERE, SIDES, Blow, prompts, schedule, submitted
from breaking.ledger import Ledger, attempts_lost_beyond
from breaking.spoiling import OddValue, odd_value
from breaking.workers import LEASE, Workers
from mlx_rq import RedisUnavailable
from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.options import RECOVERY_RETRIES

PATIENCE, STUCK = 240.0, 45.0
"""Seconds that are left when the killing has ended: in all, and without any end."""

OF_WORKERS = ("kill worker", "kill both", "pause worker", "stop for over two leases")


def other_namespace() -> Sequence[str]:
    """Gives the command that runs another in a PID namespace of its own; nothing, where not so."""
    if shutil.which(OTHER_NAMESPACE[0]) is None:
        return ()
    tried = subprocess.run([*OTHER_NAMESPACE, "true"], capture_output=True)
    return OTHER_NAMESPACE if tried.returncode == 0 else ()


@dataclass
class Arena:
    """The server, the workers, and what was done to them."""

    server: Server
    workers: Workers
    ledger: Ledger
    done: Counter[str] = field(default_factory=Counter)
    namespace: Sequence[str] = field(default_factory=other_namespace)
    resumes: list[tuple[float, int | None]] = field(default_factory=list)
    """When what is paused goes on: a process id, or None for Valkey."""
    spoilt: list[OddValue] = field(default_factory=list)

    def strike(self, blow: Blow) -> bool:
        """Does one thing, and notes it; says whether there was anything to do it to."""
        program = self.workers.newest(blow.side)
        worker = program.worker if program.said("started") else 0
        if not worker and blow.kind in OF_WORKERS:
            return False
        try:
            self.done[blow.kind] += self._do(blow, worker)
        except ProcessLookupError:
            return False  # it died of something else, and the next one is not here yet
        except (RedisError, RedisUnavailable):
            self.done[f"{blow.kind}, no reply"] += 1
        if blow.kind in ("kill supervisor", "kill both"):
            program.kill()
            self.workers.start(blow.side)
        return True

    def _do(self, blow: Blow, worker: int) -> bool:
        match blow.kind:
            case "kill worker" | "kill both":
                os.kill(worker, signal.SIGKILL)
            case "pause worker":
                self._pause(worker, blow.seconds)
            case "stop for over two leases":  # all of its machine
                for process in filter(None, (worker, self.workers.newest(blow.side).process.pid)):
                    self._pause(process, 2 * LEASE + blow.seconds)
            case "set clock":
                ahead = random.Random(blow.seconds).choice((-86400, -70, 0, 70, 300, 86400))
                self.workers.clock(blow.side).write_text(str(ahead))
            case "other PID namespace":
                return self._elsewhere()
            case "pause Valkey":
                self.server.send(signal.SIGSTOP)
                self.resumes.append((time.monotonic() + blow.seconds / 4, None))
            case "kill Valkey":
                self.resume(everything=True)
                self.server.kill()
                time.sleep(blow.seconds / 8)
                self.server.start()
            case _:
                with Redis.from_url(self.server.url, socket_timeout=2) as connection:
                    self._do_to_data(blow, connection)
        return True

    def _do_to_data(self, blow: Blow, connection: Redis) -> None:
        chance = random.Random(blow.seconds)
        match blow.kind:
            case "cut connections":
                connection.client_kill_filter(_type="normal", skipme=True)
                connection.client_kill_filter(_type="pubsub", skipme=True)
            case "cancel":
                job_id = chance.choice(sorted(self.ledger.asked))
                self.ledger.cancelled.add(job_id)  # whether or not the reply comes
                self.ledger.asked[job_id].job.cancel()
            case "odd value":
                odd = odd_value(connection, chance)
                self.spoilt.append(odd)
                self.ledger.spoilt |= odd.about
                odd.write(connection)

    def _pause(self, process: int, seconds: float) -> None:
        os.kill(process, signal.SIGSTOP)
        self.resumes.append((time.monotonic() + seconds, process))

    def _elsewhere(self) -> bool:
        """Starts a worker in a PID namespace of its own; kills it where there is one."""
        if not self.namespace:
            return False
        running = self.workers.programs.get(ELSEWHERE)
        if running and running[-1].process.poll() is None:
            running[-1].kill()
        else:
            self.workers.start(ELSEWHERE, "work", prefix=self.namespace)
        return True

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

    @property
    def is_away(self) -> bool:
        """Whether Valkey is paused."""
        return any(process is None for _, process in self.resumes)

    def close(self) -> None:
        self.resume(everything=True)
        self.workers.close()
        self.server.close()


def fight(arena: Arena, blows: Sequence[Blow], seconds: float) -> None:
    """Strikes until the schedule ends, then waits for the rest."""
    began, left = time.monotonic(), list(blows)
    open_jobs, changed = 0, 0.0
    while arena.ledger.open and (took := time.monotonic() - began) < seconds + PATIENCE:
        if len(arena.ledger.open) != open_jobs or left:
            open_jobs, changed = len(arena.ledger.open), took
        if took > changed + STUCK:
            break
        if left and left[0].at <= took and (arena.strike(left[0]) or took > left[0].at + LEASE):
            del left[0]
        arena.resume(everything=not left)
        for side in SIDES:
            arena.done["(ended by itself)"] += arena.workers.tend(side)
        time.sleep(0.1)
        if not arena.is_away:
            with (
                suppress(RedisError),
                Redis.from_url(arena.server.url, socket_timeout=5) as connection,
            ):
                arena.ledger.look(connection)


def kill(folder: Path, jobs: int, seed: int, seconds: float, pace: float, logs: Path) -> Any:
    """Runs it; gives what was done, what became of jobs, what was wrong, and more figures."""
    (folder / "valkey").mkdir(parents=True)
    server = Server(folder / "valkey")
    server.start()
    ledger = Ledger.of(submitted(server.url, prompts(seed, jobs)), seed)
    with closing(Arena(server, Workers(folder, server.url, pace), ledger)) as arena:
        for side in SIDES:
            arena.workers.start(side)
        with rq_cleaning_up(server.url, arena.done):
            fight(arena, schedule(seed, seconds), seconds)
        began = Counter(found[2] for found in arena.workers.said(r"began (\w+)"))
        with Redis.from_url(server.url) as connection:
            found, faults = ledger.reckon(connection, began)
            figures = _figures(arena, connection, began)
        if faults or figures["attempts_lost_unbegun"]:
            arena.workers.keep_log(logs)
            (logs / "odd-values.log").write_text("\n".join(map(str, arena.spoilt)))
        return arena.done, found, faults, figures


def _listed(connection: Redis) -> set[str]:
    """Gives what stands in lists of jobs that wait or run."""
    listed: set[str] = set()
    for priority in PRIORITIES:
        name = keys.queue_name("default", priority)
        listed.update(reading.texts(reading.ask(connection.lrange, f"rq:queue:{name}", 0, -1)))
        leases = reading.texts(reading.ask(connection.zrange, f"rq:wip:{name}", 0, -1))
        listed.update(lease.partition(":")[0] for lease in leases)
    return listed


def _figures(arena: Arena, connection: Redis, began: Counter[str]) -> dict[str, int]:
    workers, ledger = arena.workers, arena.ledger
    answered = Counter(found[2] for found in workers.said(r"answered (\w+)"))
    answered_jobs = [
        one
        for job_id, one in ledger.asked.items()
        if job_id in answered and job_id not in ledger.spoilt
    ]
    return {
        "left_in_lists": len(_listed(connection).intersection(ledger.asked) - ledger.spoilt),
        "workers_started": sum(1 for _ in workers.said("started")),
        "generated_again": sum(answered.values()) - len(answered),
        "said_to_have_slept": sum(1 for _ in workers.said("log this worker slept for")),
        "falsely_said_lost": sum(1 for _ in workers.said("log Redis lost its data")),
        "discarded": sum(1 for _ in workers.said("log job .*: answer discarded")),
        "errors_of_renewals": sum(1 for _ in workers.said("log leases: going on after")),
        "attempts_lost_unbegun": attempts_lost_beyond(
            connection, answered_jobs, began, RECOVERY_RETRIES
        ),
    }
