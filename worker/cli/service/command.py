"""The commands `service …`."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click

from mlx_rq.files import replacing
from mlx_rq.worker.cli.common import json_option, print_json, when_interrupted
from mlx_rq.worker.cli.config import EXPORTED_HERE, PROFILE_VARIABLE
from mlx_rq.worker.cli.service.definition import (
    Service,
    needed,
    our_program,
    why_it_may_go,
)
from mlx_rq.worker.cli.service.launchd import Launchd
from mlx_rq.worker.cli.service.logged import run_logged
from mlx_rq.worker.cli.service.manager import manager as system_manager
from mlx_rq.worker.cli.service.systemd import Systemd
from mlx_rq.worker.cli.value_types import WholeNumber

_RUN = ("up", "worker", "serve")

_ANOTHERS_OPTIONS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings of a command at whose end another stands, with options of its own."""

_name_option = click.option(
    "--name", default=None, help="What it is called.", show_default="the command's name"
)
_named = click.argument("name", default="up")


@click.group()
def service() -> None:
    """Keep mlx-rq running: by launchd on macOS, by systemd on Linux.

    \b
        mlx-rq service install up --model mlx-community/Qwen3-4B-4bit
        mlx-rq service logs -f
    """


@service.command(context_settings=_ANOTHERS_OPTIONS)
@_name_option
@click.option("--yes", is_flag=True, help="Write without asking.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[up|worker|serve] [OPTIONS]")
@click.pass_context
def install(context: click.Context, name: str | None, yes: bool, command: tuple[str, ...]) -> None:
    """Show the file that makes a service of a command, write it, and start it.

    Options of `service install` itself stand before the COMMAND. What the shell's environment says
    to mlx-rq, and where models lie, is written into the file, which only you can read.
    """
    program = command or ("up",)
    _check(context, program)
    name = _checked_name(name or program[0])
    exported = context.meta.get(EXPORTED_HERE, frozenset()) - {PROFILE_VARIABLE}
    made = Service(name, program, needed(os.environ, exported), Path.cwd())
    manager, ours = system_manager(), our_program()
    path = manager.file(name)
    click.echo(f"# {path}\n{manager.text(made.without_secrets(), ours)}")
    if (why := why_it_may_go(ours)) is not None:
        click.echo(f"note: {why}", err=True)
    when_interrupted("Stopped. Nothing was written.")
    if not yes and not click.confirm("Write it, and start it?", default=True, err=True):
        click.echo("Nothing was written.", err=True)
        sys.exit(1)
    when_interrupted(f"Stopped. `mlx-rq service status {name}` says whether it runs.")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode=0o600) as file:
        file.write(manager.text(made, ours).encode())
    try:
        note = manager.installed(name)
    except click.ClickException as error:
        then = f"{path} is written, and does not run yet: `mlx-rq service start {name}` starts it."
        raise click.ClickException(f"{error.message}\n{then}") from None
    click.echo(f"Started: `mlx-rq service logs {name}` shows what it says.")
    if note:
        click.echo(f"note: {note}", err=True)


def _check(context: click.Context, program: tuple[str, ...]) -> None:
    """Raises UsageError for a command line that would fail each time it is started."""
    name, *arguments = program
    if name not in _RUN:
        raise click.BadParameter(f"{name!r} is none of {', '.join(_RUN)}", param_hint="COMMAND")
    group = context.find_root().command
    assert isinstance(group, click.Group)
    if {"-h", "--help"} & set(arguments):
        raise click.UsageError(f"`mlx-rq {name} --help` tells the options of {name}")
    group.commands[name].make_context(name, arguments, parent=context.find_root())


def _checked_name(name: str) -> str:
    if not name.replace("-", "").replace("_", "").isalnum() or not name.isascii():
        raise click.BadParameter(f"{name!r}: take letters, digits, - and _", param_hint="--name")
    return name


def _installed(name: str) -> Launchd | Systemd:
    """Gives what manages a service; raises ClickException where there is none of that name."""
    manager = system_manager()
    if not manager.file(_checked_name(name)).exists():
        path = manager.file(name)
        raise click.ClickException(
            f"there is no service {name!r} ({path}): `mlx-rq service install` makes one"
        )
    return manager


@service.command()
@_named
def uninstall(name: str) -> None:
    """Stop a service and remove its file; the queue's data stay."""
    manager = _installed(name)
    try:
        manager.removed(name)
    except click.ClickException as error:
        click.echo(f"note: it may still run: {error.message}", err=True)
    manager.file(name).unlink()
    click.echo(f"{manager.file(name)} is removed")


@service.command()
@_named
def start(name: str) -> None:
    """Start a service."""
    _installed(name).start(name)


@service.command()
@_named
def stop(name: str) -> None:
    """Stop a service, in good order; at the next login it runs again."""
    _installed(name).stop(name)


@service.command()
@_named
@json_option
def status(name: str, as_json: bool) -> None:
    """Say whether a service runs; exits with 0 if it does, else with 1."""
    manager = _installed(name)
    runs, line = manager.status(name)
    if as_json:
        print_json({"name": name, "running": runs, "text": line, "file": str(manager.file(name))})
    else:
        click.echo(f"{name}: {line}")
    sys.exit(0 if runs else 1)


@service.command()
@_named
@click.option("-n", "--lines", type=WholeNumber(1), default=100, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on as the log grows.")
def logs(name: str, lines: int, follow: bool) -> None:
    """Show the log of a service."""
    program = _installed(name).logs(name, lines, follow)
    if shutil.which(program[0]) is None:
        raise click.ClickException(f"{program[0]} is not here")
    sys.exit(subprocess.run(program, check=False).returncode)


@service.command(hidden=True, context_settings=_ANOTHERS_OPTIONS)
@click.option("--log", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def run(log: Path, command: tuple[str, ...]) -> None:
    """Run a command with its output in a rotated file."""
    sys.exit(run_logged([*our_program(), *command], log))


COMMANDS = (service,)
