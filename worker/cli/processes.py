"""Our own commands as child processes of another one: of `worker`, `up` and `demo`."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.worker.cli.signals import undisturbed, unheard_by_children


def program_of(command: str, options: Mapping[str, Any], log_level: str) -> list[str]:
    """The command line that runs one of our commands."""
    # -P: the folder that the user stands in may hold a `worker` or an `mlx_rq` of its own.
    program = [sys.executable, "-P", "-m", "mlx_rq.worker", "--log-level", log_level, command]
    return program + _arguments(options)


def environment_with(redis_url: str) -> dict[str, str]:
    """Our own, with the URL: that may hold a password, and command lines are for all to see."""
    return {**os.environ, URL_VARIABLE: redis_url}


@contextmanager
def child_process(
    command: str, redis_url: str, options: Mapping[str, Any], log_level: str = "info"
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs one of our commands as a child while the block runs; it then stops in good order."""
    program = program_of(command, options, log_level)
    process = None
    try:
        with undisturbed():
            process = _start(program, environment_with(redis_url))
        yield process
    finally:
        if process is not None:
            if process.poll() is None:
                process.terminate()
            process.wait()


def _start(program: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # A terminal that closes says so to everybody in it, but we end our children one after the
    # other.
    with unheard_by_children(signal.SIGHUP):
        return subprocess.Popen(program, env=environment)


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
