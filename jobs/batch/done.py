"""What earlier runs of a batch have done, as their files tell."""

from dataclasses import dataclass, field
from typing import NamedTuple

from mlx_rq.jobs.batch.records import Stored


class Failure(NamedTuple):
    """The last error of a line, and the job that ended in it (empty: it never became one)."""

    code: str
    job_id: str


@dataclass
class Done:
    """What the files of earlier runs hold: which lines have answers, and which have errors."""

    answered: set[bytes] = field(default_factory=set)
    failed: dict[bytes, Failure] = field(default_factory=dict)

    def add(self, stored: Stored) -> None:
        """Counts a record. An answer stands, whatever else there is of its line."""
        if stored.code is None:
            self.answered.add(stored.fingerprint)
            self.failed.pop(stored.fingerprint, None)
        elif stored.fingerprint not in self.answered:
            self.failed[stored.fingerprint] = Failure(stored.code, stored.job_id)
