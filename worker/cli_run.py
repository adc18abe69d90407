"""Commands that run things: worker, up, demo; and `model`, which gets models."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from mlx_rq.jobs.connection import new_connection, reachable
from mlx_rq.worker.cli import Command, json_option, option, print_json, redis_option
from mlx_rq.worker.embedded import DEFAULT_PORT, default_data_dir, embedded_valkey
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

if TYPE_CHECKING:
    from mlx_rq.engine.models import LoadedModel

logger = logging.getLogger("mlx_rq.worker")

DEMO_MODEL = "smollm2"


class _MissingExtra(click.ClickException):
    """A command needs packages that a bare install leaves out."""

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'mlx-rq[{extra}]'")


@contextmanager
def _needs(extra: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise _MissingExtra(extra, str(error.name)) from None


def _load(model: str, trust_remote_code: bool) -> "LoadedModel":
    with _needs("worker"):
        from mlx_rq.engine import models
    return models.load(model, trust_remote_code=trust_remote_code)


_worker_options = (
    option("--model", default=DEMO_MODEL, help="A known name, a folder, or a hub id."),
    option("--served-name", multiple=True, metavar="NAME", help="Another name that it answers to."),
    option("--trust-remote-code", is_flag=True, help="Run code that comes with the model."),
    option("--batch", type=click.IntRange(1), default=16, help="Rows that decode together."),
    option("--window", type=click.IntRange(1), default=256, help="Jobs planned together."),
    option(
        "--lease",
        type=click.IntRange(2),
        default=60,
        help="Seconds until a dead worker's jobs go back to the queue.",
    ),
    option(
        "--grace",
        type=click.FloatRange(0),
        default=30.0,
        help="Seconds to finish after a stop signal; what is left goes back to the queue.",
    ),
    option(
        "--max-wait",
        type=click.FloatRange(0),
        default=30.0,
        help="Seconds after which a job goes before all others.",
    ),
)


def worker_options(function: Command) -> Command:
    """Adds the options that `worker`, `up` and `demo` have in common."""
    for decorate in reversed(_worker_options):
        function = decorate(function)
    return function


@click.command()
@worker_options
@option("--burst", is_flag=True, help="Stop when the queues are empty.")
@option("--max-jobs", type=click.IntRange(1), default=None, help="Stop after so many jobs.")
@option("--name", default=None, help="The worker's name in RQ.", show_default="random")
@redis_option
def worker(
    model: str,
    served_name: tuple[str, ...],
    trust_remote_code: bool,
    batch: int,
    max_wait: float,
    name: str | None,
    redis_url: str | None,
    **options: Any,
) -> None:
    """Generate the jobs of one model until told to stop (Ctrl-C or SIGTERM)."""
    connection = new_connection(redis_url)
    with reachable(connection):
        connection.ping()  # before minutes are spent on loading a model
    loaded = _load(model, trust_remote_code)
    from mlx_rq.engine.generate import EngineOptions, MLXEngine
    from mlx_rq.worker.worker import MLXWorker, WorkerOptions

    engine = MLXEngine(loaded, EngineOptions(rows=batch, max_wait=max_wait))
    names = [*served_name, model] if "/" not in model or not Path(model).exists() else served_name
    mlx_worker = MLXWorker(
        engine,
        connection,
        new_connection(redis_url),
        served_names=names,
        options=WorkerOptions(**options),
        name=name,
    )
    with reachable(connection):
        mlx_worker.run()


@contextmanager
def _worker_process(redis_url: str, arguments: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a worker as a child while the block runs; at the end it stops in good order."""
    command = [
        sys.executable,
        "-m",
        "mlx_rq.worker",
        "worker",
        "--redis-url",
        redis_url,
        *arguments,
    ]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()


def _arguments(options: dict[str, Any]) -> list[str]:
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


@click.command()
@worker_options
@option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, help="Valkey's port.")
@option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Where the queue's data lasts.",
    show_default="the system's place for user data",
)
def up(port: int, data_dir: Path | None, **options: Any) -> None:
    """Run a queue and a worker in this terminal; Ctrl-C ends both.

    The queue is an embedded Valkey on loopback with an append-only file: what was accepted is
    still there at the next start.
    """
    ensure_model(options["model"])
    with embedded_valkey((data_dir or default_data_dir()) / "valkey", port) as url:
        click.echo(f"queue:  {url}", err=True)
        with _worker_process(url, _arguments(options)) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                # The worker got the same signal and is finishing its jobs.
                code = process.wait()
    if code:
        raise click.ClickException(f"the worker ended with code {code}")


def ensure_model(name: str) -> None:
    """Gets a known model that is not there yet, showing progress; leaves other names alone."""
    with _needs("worker"):
        from mlx_rq.engine import pull
    if name in pull.KNOWN_MODELS and not pull.is_pulled(name):
        _pull(name, None)


def _pull(name: str, dtype: Any) -> Path:
    from mlx_rq.engine import pull

    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), transient=True
    ) as bar:
        task = bar.add_task(name, total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {stage}", completed=done, total=total or None)

        return pull.pull(name, dtype=dtype, progress=show)


@click.group()
def model() -> None:
    """Get models, and see which are here."""


@model.command("pull")
@click.argument("name")
@option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "4bit"]),
    default=None,
    show_default="what is fastest on this machine",
)
@json_option
def pull_command(name: str, dtype: str | None, as_json: bool) -> None:
    """Get a known model (smollm2) once and convert it to MLX."""
    with _needs("worker"):
        path = _pull(name, dtype)
    if as_json:
        print_json({"name": name, "path": str(path)})
    else:
        click.echo(path)


@model.command("list")
@json_option
def list_command(as_json: bool) -> None:
    """List the known models and what of them is here."""
    with _needs("worker"):
        from mlx_rq.engine import pull
    models = pull.list_models()
    if as_json:
        print_json([entry.as_dict() for entry in models])
        return
    for entry in models:
        click.echo(entry)


COMMANDS = (worker, up, model)
