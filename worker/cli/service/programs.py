"""Runs programs of the system; where one fails, what it said is the error."""

import os
import subprocess
from collections.abc import Mapping

import click

Environment = Mapping[str, str] | None
"""Of a program; None: that of this process."""


def call(*program: str, environment: Environment = None) -> str:
    """Runs a program and gives what it says; raises ClickException where it fails."""
    done = _run(program, environment)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"it ended with code {done.returncode}"
        raise click.ClickException(f"{' '.join(program)}: {said}")
    return done.stdout


def quietly(*program: str) -> None:
    """Runs a program whose failure means that there was nothing to do."""
    _run(program, None)


def output(*program: str) -> str:
    """Gives what a program says; nothing where it fails."""
    done = _run(program, None)
    return "" if done.returncode else done.stdout


def _run(program: tuple[str, ...], environment: Environment) -> subprocess.CompletedProcess[str]:
    variables = None if environment is None else {**os.environ, **environment}
    try:
        return subprocess.run(program, capture_output=True, text=True, check=False, env=variables)
    except FileNotFoundError:
        raise click.ClickException(
            f"{program[0]} is not here: this system starts services in another way. Have it run "
            "`mlx-rq up`, `mlx-rq worker` or `mlx-rq serve`, and end it by SIGTERM."
        ) from None
