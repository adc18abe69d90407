"""What the commands share: options, the environment, output, and the folder for data."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from mlx_rq.jobs.queue.connection import DEFAULT_URL
from mlx_rq.jobs.queue.discovery import default_data_dir
from mlx_rq.worker.cli.machine import why_not_here

ENVIRONMENT_PREFIX = "MLX_RQ"

Command = TypeVar("Command", bound=Callable[..., Any])


CONFIGURATION = "mlx_rq.configuration"
"""Where the contexts of commands have what the configuration files say."""


class ConfigurableOption(click.Option):
    """An option that configuration files can set; errors about their values name the file."""

    def process_value(self, ctx: click.Context, value: Any) -> Any:
        """Converts a value; raises BadParameter."""
        try:
            return super().process_value(ctx, value)
        except click.BadParameter as error:
            if (file := self.file_of_value(ctx)) is not None:
                raise click.BadParameter(f"{error.message} (from {file})", ctx, self) from None
            raise

    def file_of_value(self, context: click.Context) -> str | None:
        """Says which file the value comes from; None where it comes from none."""
        if (
            context.get_parameter_source(str(self.name))
            is not click.core.ParameterSource.DEFAULT_MAP
        ):
            return None
        words: list[str] = []
        at: click.Context | None = context
        while at is not None and at.parent is not None:
            words.insert(0, str(at.info_name))
            at = at.parent
        configuration = context.meta[CONFIGURATION]
        setting = configuration.of(" ".join(words), {long_name(self): self})[long_name(self)]
        return str(setting.source)


def long_name(option: click.Option) -> str:
    """Gives an option's name without its dashes, as configuration files have it."""
    return next(name for name in option.opts if name.startswith("--")).removeprefix("--")


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """Declares an option that files and the environment can also set, as MLX_RQ_<ITS NAME>.

    `envvar=None` makes one that the environment cannot set.
    """
    flag = next(name for name in names if name.startswith("--"))
    variable = flag.split("/")[0].removeprefix("--").replace("-", "_").upper()
    settings.setdefault("cls", ConfigurableOption)
    settings.setdefault("show_default", True)
    settings.setdefault("envvar", f"{ENVIRONMENT_PREFIX}_{variable}")
    return click.option(*names, **settings)


def default_of(options: type, name: str) -> Any:
    """Reads the default of an option where it stands: in the dataclass that the option goes to."""
    return next(field.default for field in fields(options) if field.name == name)


redis_option = option(
    "--redis-url",
    metavar="URL",
    default=None,
    show_default=f"that of a running `mlx-rq up`, else {DEFAULT_URL}",
    help="Where the queue is: redis://, rediss://, unix:// or redis+sentinel://.",
)


AS_JSON = "mlx_rq.as_json"


def _remember(context: click.Context, _: click.Parameter, as_json: bool) -> bool:
    """Lets errors, too, be printed in the form that was asked for."""
    context.meta[AS_JSON] = as_json  # shared with the group's context
    return as_json


json_option = option(
    "--json", "as_json", is_flag=True, callback=_remember, help="Print JSON, for machines."
)


WHEN_INTERRUPTED = "mlx_rq.when_interrupted"


def when_interrupted(words: str) -> None:
    """Says what Ctrl-C will say from now on: what becomes of the work."""
    if (context := click.get_current_context(silent=True)) is not None:
        context.meta[WHEN_INTERRUPTED] = words  # shared with the group's context


def print_json(value: Any) -> None:
    """Prints one JSON document on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports that a bare install cannot do: says what to install instead of failing.

    Those of the worker cannot be had on every machine: then that is said.
    """
    if extra == "worker" and (why := why_not_here()):
        raise click.ClickException(why)
    try:
        yield
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"{error.name} is not installed: pip install 'mlx-rq[{extra}]'"
        ) from None


def data_folder(given: Path | None) -> Path:
    """Makes the data folder, where it is not there yet, and gives its path.

    Raises ClickException where it cannot be written to.
    """
    folder = given or default_data_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise click.ClickException(
            f"--data-dir {folder}: {error.strerror}. Choose a folder that you may write to."
        ) from None
    return folder


def words_of(error: Exception) -> str:
    """Says an error without the number that the system gives it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
