"""The option `--profile`, which reads the configuration files, and the command `config show`."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from mlx_rq.jobs.queue.connection import without_password
from mlx_rq.worker.cli.common import (
    CONFIGURATION,
    ENVIRONMENT_PREFIX,
    Command,
    ConfigurableOption,
    json_option,
    print_json,
)
from mlx_rq.worker.cli.config_files import (
    EXPORTED,
    SHARED,
    Configuration,
    Options,
    config_files,
    configurable,
    default_map,
    read_configuration,
)

PROFILE_VARIABLE = "MLX_RQ_PROFILE"
EXPORTED_HERE = "mlx_rq.exported"


def profile_option(command: Command) -> Command:
    """Declares `--profile` of the program: before any other option, it has the files read."""
    return click.option(
        "--profile",
        metavar="NAME",
        envvar=PROFILE_VARIABLE,
        is_eager=True,
        expose_value=False,
        callback=_configure,
        help="Take [profile.NAME] of the configuration files.",
    )(command)


def _configure(context: click.Context, _: click.Parameter, profile: str | None) -> None:
    group = context.command
    assert isinstance(group, click.Group)
    try:
        configuration = read_configuration(configurable(group), profile or None)
    except click.ClickException:
        if context.resilient_parsing:
            return  # the shell asks what to complete
        raise
    context.meta[CONFIGURATION] = configuration
    context.default_map = default_map(group, configuration)
    exported = {
        _variable(key): str(setting.value)
        for key in EXPORTED
        if (setting := configuration.shared(key)) and not os.environ.get(_variable(key))
    }
    if profile:
        exported[PROFILE_VARIABLE] = profile  # for the server that `up` starts
    before = {name: os.environ.get(name) for name in exported}
    os.environ.update(exported)
    context.meta[EXPORTED_HERE] = frozenset(exported)
    context.call_on_close(lambda: _restore(before))


def _restore(environment: Mapping[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _variable(key: str) -> str:
    return f"{ENVIRONMENT_PREFIX}_{key.replace('-', '_').upper()}"


class _Row(NamedTuple):
    """A value and where it comes from; `used` is false where something else counts more."""

    command: str
    option: str
    value: Any
    source: str
    used: bool = True


@click.group()
def config() -> None:
    """Show the configuration: files, environment, defaults."""


@config.command()
@click.argument("command", nargs=-1)
@json_option
@click.pass_context
def show(context: click.Context, command: tuple[str, ...], as_json: bool) -> None:
    """Show what is set, and where; with a COMMAND, all of its options.

    \b
        ~/.config/mlx-rq/config.toml  <  ./mlx-rq.toml  <  environment  <  options
    """
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    commands, configuration = configurable(root.command), context.meta[CONFIGURATION]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(f"{ENVIRONMENT_PREFIX}_") and name not in context.meta[EXPORTED_HERE]
    }
    name = " ".join(command)
    if name and name not in commands:
        known = ", ".join(sorted(filter(None, commands)))
        raise click.BadParameter(f"{name!r} is none of {known}", param_hint="COMMAND")
    if name:
        rows = list(_of_command(name, commands[name], configuration, environment))
    else:
        rows = list(_all_set(commands, configuration, environment))
    if as_json:
        print_json([row._asdict() | {"command": row.command or None} for row in rows])
        return
    _print(rows, configuration, of_command=bool(name))


def _of_command(
    command: str,
    options: Options,
    configuration: Configuration,
    environment: Mapping[str, str],
) -> Iterator[_Row]:
    settings = configuration.of(command, options)
    value: Any
    for key, option in options.items():
        if (variable := _set_in(option, environment)) is not None:
            value, source = environment[variable], f"{variable} of the environment"
        elif key in settings:
            value, source = settings[key].value, settings[key].source
        else:
            value, source = option.to_info_dict()["default"], "default"
            if value is None and isinstance(option.show_default, str):
                value = f"({option.show_default})"
        yield _Row(command, key, _shown(key, value), source)


def _all_set(
    commands: Mapping[str, Options], configuration: Configuration, environment: Mapping[str, str]
) -> Iterator[_Row]:
    variables = {name: key for key, one in commands[SHARED].items() for name in _variables(one)}
    variables |= {_variable(key): key for key in EXPORTED}
    last = {(one.command, one.key): one for one in configuration.settings}
    for one in configuration.settings:
        option = commands[one.command].get(one.key)
        names = _variables(option) if option else [_variable(one.key)]
        over = last[one.command, one.key] is not one or any(map(environment.get, names))
        yield _Row(one.command, one.key, _shown(one.key, one.value), one.source, not over)
    for name, value in environment.items():
        if name in variables:
            key = variables[name]
            yield _Row(SHARED, key, _shown(key, value), f"{name} of the environment")


def _variables(option: ConfigurableOption) -> list[str]:
    named = option.envvar or []
    return [named] if isinstance(named, str) else list(named)


def _set_in(option: ConfigurableOption, environment: Mapping[str, str]) -> str | None:
    return next((name for name in _variables(option) if environment.get(name)), None)


def _shown(key: str, value: Any) -> Any:
    """Hides passwords; gives the rest as JSON has it."""
    if isinstance(value, str) and key == "redis-url":
        return without_password(value)
    if isinstance(value, tuple | list):
        return [str(one) for one in value]
    return value if isinstance(value, bool | int | float | None) else str(value)


def _print(rows: list[_Row], configuration: Configuration, *, of_command: bool) -> None:
    console = Console(markup=False, emoji=False, highlight=False)
    for path in config_files():
        there = "" if path in configuration.files else " (not there)"
        console.print(f"file: {path}{there}", soft_wrap=True)
    if not rows:
        console.print("Nothing is set: every option has its default.")
        return
    table = Table("option", "value", "from", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        where = f"[{row.command}] " if row.command and not of_command else ""
        value = " ".join(row.value) if isinstance(row.value, list) else row.value
        said = (
            ""
            if value is None
            else str(value).lower()
            if value is True or value is False
            else str(value)
        )
        source = row.source if row.used else f"{row.source} (something else counts more)"
        table.add_row(f"{where}{row.option}", said, source)
    console.print(table)


COMMANDS = (config,)
