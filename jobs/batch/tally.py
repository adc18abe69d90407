"""Accounts for every line of an input."""

from collections import Counter
from dataclasses import dataclass, field

from mlx_rq.jobs.openai.words import counted


@dataclass
class Tally:
    """How many lines there are, and what became of them.

    `resumed` lines were done before this run; `outdated` answers belong to no line any more.
    """

    total: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    outdated: int = 0

    @property
    def done(self) -> int:
        """Lines that have an answer or an error."""
        return self.answered + self.errors.total()

    @property
    def missing(self) -> int:
        """Lines that have neither."""
        return self.total - self.done

    @property
    def exit_code(self) -> int:
        """0: all answered. 1: all done, some with errors. 2: not finished."""
        if self.missing or not self.total:
            return 2
        return 1 if self.errors else 0

    def count(self, code: str | None) -> None:
        """Counts a line that ended with this error code, or without one with an answer."""
        if code is None:
            self.answered += 1
        else:
            self.errors[code] += 1

    def __str__(self) -> str:
        errors = self.errors.total()
        kinds = ", ".join(f"{count:,} {code}" for code, count in self.errors.most_common())
        return (
            f"{self.total:,} in: {self.answered:,} answered, "
            f"{counted(errors, 'error')}{f' ({kinds})' if kinds else ''}, "
            f"{self.missing:,} missing"
        )
