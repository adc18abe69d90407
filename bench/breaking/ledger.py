"""What became of each job, by its id: how it was seen to end first, and how it stands now."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import Job
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.record import ended_among, read_outcome

FAULTS = (
    *("undone", "overwritten", "false dead letters", "wrong answers", "no end"),
    *("lost and told", "lost and not told"),
)
"""What may be wrong with a job; all but the last but one is a fault of ours."""

ENDS = dict.fromkeys(("raise in step", "abort", "abort in add", "hang"), "max_attempts_exceeded")
ENDS |= dict.fromkeys(("wrong shape", "wrong id", "forget"), "no_answer")
"""How jobs end that no engine can answer: with this code."""


class Asked(NamedTuple):
    """A job, what it asks the engine to do, and how often it may be tried."""

    job: Job
    does: str
    attempts: int


class Seen(NamedTuple):
    """An end: RQ's word for it, and the whole result."""

    status: str
    outcome: dict[str, Any] | None


IsTold = Callable[[str], bool]


@dataclass
class Ledger:
    """The jobs of one Redis, and what was seen of them."""

    asked: dict[str, Asked]
    chance: random.Random
    seen: dict[str, Seen] = field(default_factory=dict)
    told: Counter[str] = field(default_factory=Counter)
    """How often the stream of ends named a job."""
    undone: set[str] = field(default_factory=set)
    spoilt: set[str] = field(default_factory=set)
    """Jobs of which something was overwritten on purpose: these need an end, no special one."""
    cancelled: set[str] = field(default_factory=set)
    _position: str = "-"

    @classmethod
    def of(cls, asked: Iterable[Asked], seed: int) -> "Ledger":
        return cls({one.job.id: one for one in asked}, random.Random(f"ledger {seed}"))

    @property
    def open(self) -> list[str]:
        """The jobs of which no end was seen."""
        return [job_id for job_id in self.asked if job_id not in self.seen]

    def look(self, connection: Redis) -> None:
        """Notes the ends since the last look, and looks whether some of the earlier ones stand."""
        entries = reading.ask(connection.xrange, keys.COMPLETIONS, self._position, "+")
        for entry_id, fields in () if isinstance(entries, reading.Unreadable) else entries:
            self._position = f"({entry_id.decode()}"
            self.told[reading.text(fields.get(b"job"))] += 1
        for job_id in ended_among(connection, self.open):
            outcome, status = read_outcome(connection, job_id)
            self.seen[job_id] = Seen(status, outcome)
        some = self.chance.sample(sorted(self.seen), min(64, len(self.seen)))
        self.undone.update(set(some).difference(ended_among(connection, some)))

    def reckon(
        self, connection: Redis, began: Counter[str], is_told: IsTold | None = None
    ) -> tuple[Counter[str], list[str]]:
        """Counts what became of the jobs, and describes each that is not as it must be.

        Where Redis may have lost some, `is_told` tells whether its loss of one was told.
        """
        self.look(connection)
        found: Counter[str] = Counter()
        faults = []
        for job_id, asked in self.asked.items():
            outcome, status = read_outcome(connection, job_id)
            last = Seen(status, outcome)
            # A death while it was read by itself is an attempt, too.
            read = reading.ask(connection.hget, RQJob.key_for(job_id), "lost_in_reading")
            begun = began[job_id] + (read == b"1")
            became = self._became(asked, last, begun, is_told)
            found[became] += 1
            if became in FAULTS and became != "lost and told":
                faults.append(
                    f"{became}: {job_id} ({asked.does}, {asked.attempts} attempts): began "
                    f"{began[job_id]} times, told {self.told[job_id]} times, "
                    f"first {self.seen.get(job_id)!s:.300}, last {last!s:.300}"
                )
        return found, faults

    def _became(self, asked: Asked, last: Seen, began: int, is_told: IsTold | None) -> str:
        job_id = asked.job.id
        first = self.seen.get(job_id)
        if job_id in self.spoilt:
            return "spoilt on purpose, and ended" if first else "no end"
        if not last.status or (last.outcome is None and last.status == "finished"):
            told = is_told is not None and is_told(job_id)
            return "lost and told" if told else "lost and not told"
        if first is None:
            return "no end"
        if is_told is None and (job_id in self.undone or last.status == "queued"):
            return "undone"
        if self.told[job_id] > 1 or (last != first and is_told is None):
            return "overwritten"
        return self._judged(asked, last, began)

    def _judged(self, asked: Asked, last: Seen, began: int) -> str:
        outcome, expected = last.outcome or {}, ENDS.get(asked.does)
        code = outcome.get("error", {}).get("code")
        if last.status == "canceled":
            return "cancelled" if asked.job.id in self.cancelled else "wrong answers"
        if last.status == "finished" and expected is None:
            right = outcome["choices"][0]["text"] == f"text for {asked.job.id}"
            return "answered" if right else "wrong answers"
        if code == expected is not None:
            return "failed as they must"
        if code == "max_attempts_exceeded":
            return "dead letters" if began >= asked.attempts else "false dead letters"
        return "wrong answers"


def attempts_lost_beyond(
    connection: Redis, asked: Sequence[Asked], began: Counter[str], retries: int
) -> int:
    """Counts the attempts that jobs have lost without having been begun on as often."""
    beyond = 0
    for job, _, attempts in asked:
        most = attempts - 1 + retries
        left = reading.count(reading.ask(connection.hget, RQJob.key_for(job.id), "retries_left"))
        beyond += max(0, most - left - began[job.id])
    return beyond
