"""What a look at something found, and what is to be done about it."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Level = Literal["ok", "warning", "error"]


class Fix(NamedTuple):
    """What can safely be done at once: `does` says it, as a command where there is one.

    Nothing is deleted or ended that anybody still has. `do` raises what goes wrong.
    """

    does: str
    do: Callable[[], object]


class Finding(NamedTuple):
    """`area` names what was looked at; `advice` says what to do, where there is something."""

    area: str
    level: Level
    text: str
    advice: str | None = None
    fix: Fix | None = None

    def as_json(self) -> dict[str, Any]:
        """Writes it for machines."""
        return {**self._asdict(), "fix": self.fix and self.fix.does}


def gigabytes(nbytes: float) -> str:
    """Writes a number of bytes for people."""
    return f"{nbytes / 1e9:.1f} GB"
