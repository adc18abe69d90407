"""One configuration: the user's file, then the folder's, both before the environment and options.

    redis-url = "redis://queue.example:6379/0"   # for every command that has the option
    [worker]                                     # for one command; `up` takes it, too
    kv-bits = 8
    [profile.night.worker]                       # with --profile night
    batch = 64

A key is an option's long name. At the top stand those that the environment may set as well; what
is asked of single jobs, where another command's option of that name would be taken for it, stands
in the command's own table.
"""

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from mlx_rq.worker.cli.common import ConfigurableOption, long_name

FILES_VARIABLE = "MLX_RQ_CONFIG"
"""Names a file that is read instead of both; where it is empty, none is."""

SHARED = ""
"""In place of a command: for all that have the option."""

PROFILE = "profile"

EXPORTED = ("data-dir", "max-body", "cache")
"""What is read from the environment only, or in places that know no options."""

_TAKES_TOO = {"up": ("worker",)}
"""Commands that run others take these tables, too, before their own."""

_NOT_OF_A_FOLDER = ("trust-remote-code",)
"""What a folder that one has only stepped into may not decide."""

Options = Mapping[str, ConfigurableOption]


class Setting(NamedTuple):
    """One value of one file. `source` names the file, and the profile."""

    command: str
    key: str
    value: Any
    source: str


@dataclass(frozen=True)
class Configuration:
    """All that the files say, in rising order of what counts."""

    files: tuple[Path, ...]
    settings: tuple[Setting, ...]

    def of(self, command: str, options: Options) -> dict[str, Setting]:
        """Gives what counts for a command, by the names of its options."""
        tables = (SHARED, *_TAKES_TOO.get(command, ()), command)
        return {
            one.key: one._replace(value=_for(options[one.key], one.value))
            for one in self.settings
            if one.command in tables and one.key in options and _may(one, options[one.key])
        }

    def shared(self, key: str) -> Setting | None:
        """Gives what counts for all commands."""
        found = [one for one in self.settings if (one.command, one.key) == (SHARED, key)]
        return found[-1] if found else None


def _may(setting: Setting, option: ConfigurableOption) -> bool:
    """Tells whether a setting is for an option: one of all commands may not be for each."""
    if setting.command == SHARED and option.envvar is None:
        return False
    return option.multiple or not isinstance(setting.value, list) or len(setting.value) == 1


def _for(option: ConfigurableOption, value: Any) -> Any:
    """Gives a value as an option takes it: commands differ in whether it may be given twice."""
    if option.multiple:
        return value if isinstance(value, list) else [value]
    return value[0] if isinstance(value, list) else value


def config_files() -> tuple[Path, ...]:
    """Names the files that are read where they are there, the one that counts most last."""
    if (given := os.environ.get(FILES_VARIABLE)) is not None:
        return (Path(given),) if given else ()
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "mlx-rq" / "config.toml", Path("mlx-rq.toml")


def read_configuration(commands: Mapping[str, Options], profile: str | None) -> Configuration:
    """Reads the files. `commands` are the options of each, those of all under SHARED.

    A profile counts more than what stands outside of profiles, in whichever file. Raises
    ClickException where a file cannot be read or holds what is not known.
    """
    files = tuple(path for path in config_files() if path.is_file())
    if given := os.environ.get(FILES_VARIABLE):
        files = (Path(given),)
        if not files[0].is_file():
            raise click.ClickException(f"{FILES_VARIABLE}: there is no file {given}")
    plain: list[Setting] = []
    of_profile: list[Setting] = []
    profiles: set[str] = set()
    for path in files:
        document = _parse(path)
        named = document.pop(PROFILE, {})
        tables = named.values() if isinstance(named, dict) else [named]
        if not all(isinstance(table, dict) for table in tables):
            raise _wrong(path, f"profiles are tables, as in [{PROFILE}.night]")
        plain += _settings(path, document, commands, str(path))
        for name, table in named.items():
            settings = _settings(path, table, commands, f"{path}, profile {name}")
            of_profile += settings if name == profile else ()
            profiles.add(name)
    if profile is not None and profile not in profiles and config_files():
        where = ", ".join(map(str, files)) or "no configuration file is there"
        raise click.ClickException(
            f"--profile {profile}: there is no [{PROFILE}.{profile}] ({where})"
            f"{_suggestion(profile, profiles)}"
        )
    return Configuration(files, (*plain, *of_profile))


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise _wrong(path, error.strerror or str(error)) from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise _wrong(path, f"not TOML: {error}") from None


def _settings(
    path: Path, table: Mapping[str, Any], commands: Mapping[str, Options], source: str
) -> list[Setting]:
    """Reads the keys at the top first: a command's own count more."""
    found = []
    for key, value in table.items():
        if not isinstance(value, dict):
            found.append(_setting(path, SHARED, key, value, commands, source))
    for name, inner in table.items():
        if isinstance(inner, dict):
            if name not in commands or name == SHARED:
                raise _wrong(path, f"unknown table [{name}]{_suggestion(name, commands)}")
            found += [_setting(path, name, key, inner[key], commands, source) for key in inner]
    return found


def _setting(
    path: Path,
    command: str,
    key: str,
    value: Any,
    commands: Mapping[str, Options],
    source: str,
) -> Setting:
    where = f"[{command}] {key}" if command else key
    options = commands[command]
    if key in EXPORTED and command == SHARED:
        return Setting(command, key, _text(path, where, value), source)
    if key not in options:
        raise _wrong(path, f"unknown key {key!r}{_hint(command, key, commands)}")
    if key in _NOT_OF_A_FOLDER and path == Path("mlx-rq.toml"):
        raise _wrong(path, f"{key} is not taken from a folder's file: give it as an option")
    return Setting(command, key, _value(path, where, options[key], value), source)


def _hint(command: str, key: str, commands: Mapping[str, Options]) -> str:
    """Says what would be right instead of a key that is not known there."""
    if suggestion := _suggestion(key, (*commands[command], *(EXPORTED if not command else ()))):
        return suggestion + (f" (of {command})" if command else "")
    tables = [f"[{name}]" for name, options in commands.items() if name and key in options]
    if tables:
        return f": it goes into {' or '.join(tables)}"
    return f"; `mlx-rq config show {command or 'COMMAND'}` lists what there is"


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, [name for name in known if name], n=1)
    return f": did you mean {close[0]!r}?" if close else ""


def _value(path: Path, where: str, option: ConfigurableOption, value: Any) -> Any:
    """Gives a value as the command line would have it; what it may be, the option knows."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise _wrong(path, f"{where} is true or false, not {value!r}")
        return value
    if option.multiple:
        return [_text(path, where, one) for one in (value if isinstance(value, list) else [value])]
    return _text(path, where, value)


def _text(path: Path, where: str, value: Any) -> str:
    if isinstance(value, bool | list | dict):
        raise _wrong(path, f"{where} takes one text or number, not {value!r}")
    text = str(value)
    return os.path.expanduser(text) if text.startswith("~/") else text


def _wrong(path: Path, message: str) -> click.ClickException:
    return click.ClickException(f"{path}: {message}")


def configurable(group: click.Group) -> dict[str, Options]:
    """Names the options of each command that files may set; those of all under SHARED."""
    commands = {name: _options(command) for name, command in _commands(group)}
    shared: dict[str, ConfigurableOption] = {}
    for options in (_options(group), *commands.values()):
        for key, one in options.items():
            if one.envvar is not None and (key not in shared or one.multiple):
                shared[key] = one
    return {SHARED: shared, **commands}


def _commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def _options(command: click.Command) -> dict[str, ConfigurableOption]:
    return {long_name(one): one for one in command.params if isinstance(one, ConfigurableOption)}


def default_map(group: click.Group, configuration: Configuration) -> dict[str, Any]:
    """Gives the configuration as click takes it: by commands, and the names of parameters."""
    commands = configurable(group)
    found: dict[str, Any] = _by_parameter(
        configuration.of(SHARED, _options(group)), _options(group)
    )
    for name, options in commands.items():
        if name and (settings := configuration.of(name, options)):
            inner = found
            for part in name.split():
                inner = inner.setdefault(part, {})
            inner.update(_by_parameter(settings, options))
    return found


def _by_parameter(settings: Mapping[str, Setting], options: Options) -> dict[str, Any]:
    return {str(options[key].name): setting.value for key, setting in settings.items()}
