"""What is done to the workers and to Redis, and what the jobs ask for: all of it by a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from breaking.ledger import ENDS, Asked
from breaking.workers import STALL
from mlx_rq import submit_many

ATTEMPTS = (100, 100, 100, 1)
"""Of innocent jobs: mostly so many that none is given up for what it had to live through. One that
may be tried once must not be given up unless it was begun."""

KINDS = {
    "kill worker": 30,
    "kill supervisor": 10,
    "kill both": 8,
    "kill Valkey": 12,
    "cut connections": 15,
    "pause worker": 12,
    "stop for over two leases": 5,
    "set clock": 10,
    "other PID namespace": 10,
    "pause Valkey": 5,
    "cancel": 8,
    "odd value": 50,
}
"""What is done, and how often in so many times as these are together."""

SIDES, ELSEWHERE = ("0", "1"), "elsewhere"


@dataclass(frozen=True)
class Blow:
    """One thing that is done: when, what, to which worker, and for how long."""

    at: float
    kind: str
    side: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.at:6.1f} s  {self.kind:24} {self.side}  {self.seconds:.1f}"


def schedule(seed: int, seconds: float) -> list[Blow]:
    """What will be done; the same for the same seed. Each kind once, to begin with."""
    chance, at, blows = random.Random(seed), 1.0, []
    first = chance.sample(list(KINDS), len(KINDS))
    while (at := at + chance.uniform(0.4, 1.2)) < seconds:
        (kind,) = first[:1] or chance.choices(list(KINDS), list(KINDS.values()))
        del first[:1]
        blows.append(Blow(at, kind, chance.choice(SIDES), chance.uniform(0.2, 1.5 * STALL)))
    return blows


def prompts(seed: int, count: int) -> list[str]:
    """What the jobs ask for: one in eight is slow, one in sixty cannot be answered."""
    chance = random.Random(f"prompts {seed}")
    asked = [*ENDS]
    while len(asked) < count:
        kinds = ["answer", f"slow {chance.randrange(2, 12)}", chance.choice(list(ENDS))]
        asked += chance.choices(kinds, [104, 15, 2])
    chance.shuffle(asked)
    return asked[:count]


def submitted(url: str, asked: Sequence[str]) -> list[Asked]:
    """Submits them; killers are given up after three deaths."""
    by_attempts: dict[int, list[str]] = {}
    for number, does in enumerate(asked):
        kills = ENDS.get(does) == "max_attempts_exceeded"
        attempts = 3 if kills else ATTEMPTS[number % len(ATTEMPTS)]
        by_attempts.setdefault(attempts, []).append(does)
    jobs = []
    for attempts, some in by_attempts.items():
        bodies = [{"prompt": f"{does} | {number}"} for number, does in enumerate(some)]
        made = submit_many(bodies, max_attempts=attempts, redis_url=url)
        jobs += [Asked(job, does, attempts) for job, does in zip(made, some, strict=True)]
    return jobs
