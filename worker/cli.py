"""The command line: `mlx-rq`. Every option can also come from the environment (MLX_RQ_…).

This module and `cli_jobs` need no MLX; commands that do import it when they are run.
"""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from mlx_rq.jobs.connection import DEFAULT_URL
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


def option(*names: str, **settings: Any) -> Callable[[Command], Command]:
    """Declares an option that the environment can also set, as MLX_RQ_<ITS NAME>."""
    long_name = next(name for name in names if name.startswith("--"))
    variable = long_name.split("/")[0].removeprefix("--").replace("-", "_").upper()
    settings.setdefault("show_default", True)
    return click.option(*names, envvar=f"{ENVIRONMENT_PREFIX}_{variable}", **settings)


redis_option = option(
    "--redis-url",
    metavar="URL",
    default=None,
    show_default=f"that of a running `mlx-rq up`, else {DEFAULT_URL}",
    help="Where the queue is: redis://, rediss:// or unix://.",
)


class ByteCount(click.ParamType[int]):
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
            sys.exit(1)


class _NoError(Exception):
    """Never raised."""


def _user_errors() -> type[Exception]:
    """The engine's error class, where the engine was imported at all."""
    models = sys.modules.get("mlx_rq.engine.models")
    return _NoError if models is None else models.ModelError


def _print_error(error: Exception, *, as_json: bool) -> None:
    details = getattr(error, "error", None) or error_object(str(error), code=None)
    if as_json:
        click.echo(json.dumps({"error": details}, ensure_ascii=False))
    elif isinstance(error, JobFailed):
        click.echo(f"Error: {error} [{details.get('code')}]", err=True)
    else:
        click.echo(f"Error: {error}", err=True)


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
    )

    for module in (cli_run, cli_serve, cli_demo, cli_jobs, cli_batch, cli_queue, cli_model):
        for command in module.COMMANDS:
            main.add_command(command)


_register()
