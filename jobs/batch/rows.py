"""A row of a table, and what every table must keep to."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from mlx_rq.jobs.openai.errors import RequestError


class Row(NamedTuple):
    """A row with its number (from 1; of JSON lines: the line's), or what is wrong with it."""

    number: int
    values: Mapping[str, Any]
    fault: RequestError | None = None
    raw: bytes = b""


def check_names(names: Iterable[Any], where: str, code: str = "invalid_value") -> None:
    """Raises RequestError where a name occurs twice: of the two columns, one would be lost."""
    seen: set[Any] = set()
    repeated = {name for name in names if name in seen or seen.add(name)}  # type: ignore[func-returns-value]
    if repeated:
        listed = ", ".join(sorted(map(repr, repeated)))
        raise RequestError(f"{where} repeats {listed}.", code=code)
