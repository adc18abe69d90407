"""Runs programs of the system; where one fails, what it said is the error."""

import subprocess

import click


def call(*program: str) -> None:
    """Runs a program; raises ClickException where it fails."""
    done = _run(program)
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"it ended with code {done.returncode}"
        raise click.ClickException(f"{' '.join(program)}: {said}")


def quietly(*program: str) -> None:
    """Runs a program whose failure means that there was nothing to do."""
    _run(program)


def output(*program: str) -> str:
    """Gives what a program says; nothing where it fails."""
    done = _run(program)
    return "" if done.returncode else done.stdout


def _run(program: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(program, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise click.ClickException(
            f"{program[0]} is not here: this system starts services in another way. Have it run "
            "`mlx-rq up`, `mlx-rq worker` or `mlx-rq serve`, and end it by SIGTERM."
        ) from None
