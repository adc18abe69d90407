"""What a look at something found, and what is to be done about it."""

from typing import Literal, NamedTuple

Level = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """`area` names what was looked at; `advice` says what to do, where there is something."""

    area: str
    level: Level
    text: str
    advice: str | None = None


def gigabytes(nbytes: float) -> str:
    """Writes a number of bytes for people."""
    return f"{nbytes / 1e9:.1f} GB"
