"""A wall clock that is wrong, and can be set, for one process and its children.

The file that WALL_CLOCK names says by how many seconds. To be imported before whatever takes
`datetime` or `time` as it is then.
"""

import datetime
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "WALL_CLOCK"


def install(file: Path) -> None:
    """From now on this process goes by the file's clock."""
    real_time = time.time

    def ahead() -> float:
        return float(file.read_text() or 0)

    class Datetime(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls.fromtimestamp(time.time(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(datetime.UTC).replace(tzinfo=None)

    time.time = lambda: real_time() + ahead()
    datetime.datetime = Datetime  # type: ignore[misc]


if named := os.environ.get(VARIABLE):
    install(Path(named))
