"""The command line: `mlx-rq`. Options can also come from the environment (MLX_RQ_…).

Not so those that say what is asked of single jobs, where another command's option of that name
would be taken for it (`batch --model`), nor those that change what lasts (`limits`).

This module and `cli_jobs` need no MLX; commands that do import it when they are run.
"""

import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mlx_rq.jobs.connection import DEFAULT_URL
from mlx_rq.jobs.embedded_url import default_data_dir
from mlx_rq.jobs.errors import (
    JobFailed,
    JobNotFound,
    RedisUnavailable,
    RequestError,
    ResultTimeout,
    error_object,
)
from mlx_rq.jobs.sizes import max_body_bytes, parse_bytes

ENVIRONMENT_PREFIX = "MLX_RQ"

Command = TypeVar("Command", bound=Callable[..., Any])

if TYPE_CHECKING:
    Number = click.ParamType[int]
    NumberOrWord = click.ParamType[int | str]
else:  # generic only from click 8.4 on
    Number = NumberOrWord = click.ParamType


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """Declares an option that the environment can also set, as MLX_RQ_<ITS NAME>.

    `envvar=None` makes one that it cannot set.
    """
    long_name = next(name for name in names if name.startswith("--"))
    variable = long_name.split("/")[0].removeprefix("--").replace("-", "_").upper()
    settings.setdefault("show_default", True)
    settings.setdefault("envvar", f"{ENVIRONMENT_PREFIX}_{variable}")
    return click.option(*names, **settings)


redis_option = option(
    "--redis-url",
    metavar="URL",
    default=None,
    show_default=f"that of a running `mlx-rq up`, else {DEFAULT_URL}",
    help="Where the queue is: redis://, rediss:// or unix://.",
)


class ByteCount(Number):
    """A number of bytes, with a unit if wanted: 500MB, 8GB."""

    name = "bytes"

    def convert(self, value: Any, param: Any, context: Any) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)


_AS_JSON = "mlx_rq.as_json"


def _remember(context: click.Context, _: click.Parameter, as_json: bool) -> bool:
    """Lets errors, too, be printed in the form that was asked for."""
    context.meta[_AS_JSON] = as_json  # shared with the group's context
    return as_json


json_option = option(
    "--json", "as_json", is_flag=True, callback=_remember, help="Print JSON, for machines."
)


def print_json(value: Any) -> None:
    """Prints one JSON document on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


@contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around imports that a bare install cannot do: says what to install instead of failing."""
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


class _Group(click.Group):
    """Prints errors that a person can act on as one line, and exits with 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except (
            RequestError,
            JobFailed,
            JobNotFound,
            RedisUnavailable,
            ResultTimeout,
            _user_errors(),
        ) as error:
            _print_error(error, as_json=context.meta.get(_AS_JSON, False))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever reads has enough: click ends without a word
            _print_error(error, as_json=context.meta.get(_AS_JSON, False))
        sys.exit(1)


class _NoError(Exception):
    """Never raised."""


def _user_errors() -> type[Exception]:
    """The engine's error class, where the engine was imported at all."""
    models = sys.modules.get("mlx_rq.engine.models")
    return _NoError if models is None else models.ModelError


def _print_error(error: Exception, *, as_json: bool) -> None:
    words = _words(error)
    details = getattr(error, "error", None) or error_object(words, code=None)
    if as_json:
        click.echo(json.dumps({"error": details}, ensure_ascii=False))
    elif isinstance(error, JobFailed):
        click.echo(f"Error: {words} [{details.get('code')}]", err=True)
    else:
        click.echo(f"Error: {words}", err=True)


def _words(error: Exception) -> str:
    """Says an error without the number that the system gives it."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-rq")
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="How much is said on standard error.",
)
def main(log_level: str) -> None:
    """Asynchronous language-model jobs on Apple silicon.

    Start with `mlx-rq demo`, or `mlx-rq up` and then `mlx-rq submit "Hello"`.
    """
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    max_body_bytes()  # a wrong MLX_RQ_MAX_BODY is said at once, not by every job
    # These speak once for every request or connection.
    for noisy in ("rq.worker", "rq.registry", "httpx", "filelock", "transformers"):
        logging.getLogger(noisy).setLevel("WARNING")


def _register() -> None:
    from mlx_rq.worker import (
        cli_batch,
        cli_demo,
        cli_jobs,
        cli_model,
        cli_queue,
        cli_run,
        cli_serve,
        cli_up,
    )

    for module in (
        *(cli_up, cli_run, cli_serve, cli_demo),
        *(cli_jobs, cli_batch, cli_queue, cli_model),
    ):
        for command in module.COMMANDS:
            main.add_command(command)


_register()
