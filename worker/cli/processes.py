"""Our own commands as child processes of another one: of `worker`, `up` and `demo`.

A part of `up` or `demo` stops when that is gone, also where it was killed: a pipe between the two
tells.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.worker.cli.config_files import FILES_VARIABLE
from mlx_rq.worker.cli.signals import undisturbed

PARENT_VARIABLE = "MLX_RQ_PARENT_PIPE"
"""Names the file descriptor of a pipe that ends with the parent."""


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """Gives the two ends of a pipe, to read and to write, for as long as the block runs."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


def stop_with_parent() -> None:
    """From now on this process gets a SIGTERM when the command that it is a part of is gone."""
    if (number := os.environ.pop(PARENT_VARIABLE, None)) is not None:
        watch = threading.Thread(target=_watch, args=(int(number),), name="parent", daemon=True)
        watch.start()


def _watch(line: int) -> None:
    with suppress(OSError):
        os.read(line, 1)  # nothing is ever written: this returns when the other end is closed
    os.kill(os.getpid(), signal.SIGTERM)


def program_of(command: str, options: Mapping[str, Any], log_level: str) -> list[str]:
    """The command line that runs one of our commands."""
    # -P: the folder that the user stands in may hold a `worker` or an `mlx_rq` of its own.
    program = [sys.executable, "-P", "-m", "mlx_rq.worker", "--log-level", log_level, command]
    return program + _arguments(options)


def environment_with(redis_url: str, command: str) -> dict[str, str]:
    """Our own, with the URL: that may hold a password, and command lines are for all to see.

    A worker's command line says all that counts: it reads no configuration files of its own.
    """
    unread = {FILES_VARIABLE: ""} if command == "worker" else {}
    return {**os.environ, **unread, URL_VARIABLE: redis_url}


@contextmanager
def child_process(
    command: str,
    redis_url: str,
    options: Mapping[str, Any],
    log_level: str = "info",
    *,
    holds: Sequence[int] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs one of our commands as a child while the block runs; it then stops in good order.

    `holds` are file descriptors that stay open for as long as it lives.
    """
    program = program_of(command, options, log_level)
    process = None
    with pipe() as (told, _):
        environment = {**environment_with(redis_url, command), PARENT_VARIABLE: str(told)}
        try:
            with undisturbed():
                process = subprocess.Popen(
                    program,
                    env=environment,
                    pass_fds=[told, *holds],
                    # Signals of the terminal, or to our group, come to us: we end our children one
                    # after the other.
                    start_new_session=True,
                )
            yield process
        finally:
            if process is not None:
                if process.poll() is None:
                    process.terminate()
                process.wait()


def _arguments(options: Mapping[str, Any]) -> list[str]:
    """Writes options as the command line that means the same."""
    arguments = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is not False and value is not None:
            values = value if isinstance(value, tuple) else (value,)
            arguments += [part for single in values for part in (flag, str(single))]
    return arguments
