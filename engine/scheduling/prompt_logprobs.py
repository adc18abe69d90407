"""Goes through prompts whose own logprobs are asked for, a chunk at a time beside other work."""

from collections import deque
from collections.abc import Iterable

from mlx_rq.engine.scheduling.sequence import Row


class Scoring:
    """The rows whose prompts are to be scored, and those that generate nothing at all."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def head(self) -> Row | None:
        """The row that `advance` works on."""
        return self._rows[0] if self._rows else None

    def add(self, rows: Iterable[Row]) -> None:
        """Takes in those rows for which there is something to do here."""
        self._rows.extend(row for row in rows if row.score is not None or row.budget == 0)

    def remove(self, rows: Iterable[Row]) -> None:
        """Forgets rows."""
        gone = set(rows)
        self._rows = deque(row for row in self._rows if row not in gone)

    def advance(self) -> int:
        """Scores a chunk of the head's prompt; returns how many tokens that was."""
        score = self._rows[0].score
        scored = 0 if score is None or score.done else score.advance()
        if score is None or score.done:
            self._rows.popleft()
        return scored
