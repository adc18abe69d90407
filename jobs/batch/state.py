"""What a batch keeps beside its output: the name of its run, and whose turn it is.

The state file holds one small JSON object. All keys under which lines are submitted are made of the
run's name, so that what a killed run submitted is found again. The file is also what two runs on
one output lock each other out with. Which lines are done stands in the output itself.
"""

import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mlx_rq.files import lock, sync, sync_path
from mlx_rq.jobs.openai.errors import RequestError


class State:
    """The name of a run. Without a file (the output is a pipe) it is for this once."""

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self._file = file
        self.run: str | None = None
        if file is not None:
            file.seek(0)
            # Otherwise new, or torn off before anything was submitted.
            with suppress(ValueError, KeyError, TypeError):
                self.run = str(json.load(file)["run"])

    def start(self) -> None:
        """Starts a run of its own: nothing that was submitted before is found again."""
        self.run = secrets.token_hex(8)
        if self._file is not None:
            self._file.truncate(0)
            self._file.write(json.dumps({"run": self.run}).encode() + b"\n")
            sync(self._file)


def state_of(output: Path) -> Path:
    """Names the state file of an output."""
    return output.with_name(f"{output.name}.state")


@contextmanager
def open_state(path: Path, output: str) -> Iterator[State]:
    """Opens the state of an output and keeps others from it while the block runs.

    Raises RequestError where another run holds it. A file that no run was started in is removed.
    """
    with path.open("a+b") as file:
        if not _lock(file, path):
            raise RequestError(
                f"Another `mlx-rq batch` is writing {output}. Wait for it, or stop it first.",
                code="output_in_use",
            )
        sync_path(path.parent)
        state = State(file)
        try:
            yield state
        finally:
            if state.run is None:
                path.unlink()


def _lock(file: IO[bytes], path: Path) -> bool:
    """Takes the lock that goes with the process; says whether it was free."""
    # Who held it before may have removed the file that was opened here.
    return lock(file) and path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
