"""The command `up`: a queue of its own, the HTTP server and a worker, in one terminal."""

import shlex
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from mlx_rq.jobs.queue.connection import without_password
from mlx_rq.jobs.queue.discovery import FOLDER, default_data_dir, embedded_url
from mlx_rq.worker.cli.common import data_folder, needs_extra, option
from mlx_rq.worker.cli.living_line import living_line
from mlx_rq.worker.cli.model import ensure_model
from mlx_rq.worker.cli.models import MODEL_OPTIONS, asked_models, models_needed
from mlx_rq.worker.cli.ports import OLD_NAMES, http_port_option, is_free
from mlx_rq.worker.cli.processes import child_process, pipe
from mlx_rq.worker.cli.signals import ToldToStop, stopped_by_signals
from mlx_rq.worker.cli.valkey import DEFAULT_PORT, LOG_FILE, embedded_valkey
from mlx_rq.worker.cli.value_types import WholeNumber
from mlx_rq.worker.cli.worker_options import data_dir_option, worker_options

_LOOK_SECONDS = 0.2
"""How soon the end of one of the children is found out."""

Process = subprocess.Popen[bytes]


@click.command(context_settings=OLD_NAMES)
@worker_options
@http_port_option(1)
@option("--queue-port", type=WholeNumber(1, 65535), default=DEFAULT_PORT, help="Valkey's port.")
@data_dir_option("Where the queue's data lasts.")
@option("--http/--no-http", default=True, help="Open the HTTP server too, on loopback.")
@option("--show-content", is_flag=True, help="Have the server's page show prompts and answers.")
def up(
    port: int,
    queue_port: int,
    data_dir: Path | None,
    http: bool,
    show_content: bool,
    **options: Any,
) -> None:
    """Run a queue, a worker and the HTTP server in this terminal; Ctrl-C ends them all.

    The queue is an embedded Valkey on loopback with an append-only file: what was accepted is
    still there at the next start. SIGTERM and the end of the terminal do as Ctrl-C does; where one
    part ends by itself, or this process is killed, the others end too.
    """
    asked = asked_models(**{name: options[name] for name in MODEL_OPTIONS})
    for name in models_needed(asked):
        ensure_model(name)
    folder = data_folder(data_dir)
    if http:
        with needs_extra("http"):
            import mlx_rq.api_stub.server  # noqa: F401 (found missing here, not in the child)
    with stopped_by_signals(), ExitStack() as running:
        # The queue goes when all who use it have gone: this process, the server and the worker.
        unused, used = running.enter_context(pipe())
        valkey = embedded_valkey(folder / FOLDER, queue_port, stop_after=unused)
        url = running.enter_context(valkey)
        _say_where(url, folder)
        running.enter_context(living_line(url))  # before the children, whose log goes above it
        server = None
        if http:
            _check_http_port(port)
            names = dict.fromkeys(name for one in asked for name in one.known_as)
            serve: dict[str, Any] = {"port": port, "data_dir": folder}
            serve |= {"model": tuple(names), "show_content": show_content}
            server = running.enter_context(
                child_process("serve", url, serve, log_level="warning", holds=[used])
            )
            click.echo(f"server: http://127.0.0.1:{port}/v1", err=True)
            click.echo(f"page:   http://127.0.0.1:{port}/", err=True)
        worker = running.enter_context(
            child_process("worker", url, {**options, "data_dir": folder}, holds=[used])
        )
        code = _until_the_end(worker, server, folder)
    if code:
        raise click.ClickException(f"the worker ended with code {code}")


def _check_http_port(port: int) -> None:
    if not is_free(port):
        raise click.ClickException(
            f"--port {port} is taken, perhaps by an HTTP server that runs already: choose "
            "another port, or --no-http."
        )


def _say_where(url: str, folder: Path) -> None:
    click.echo(f"queue:  {without_password(url)} (`mlx-rq url` tells the password)", err=True)
    if folder != default_data_dir():
        where = shlex.quote(str(folder.resolve()))
        click.echo(f"        others find it with MLX_RQ_DATA_DIR={where}", err=True)


def _until_the_end(worker: Process, server: Process | None, folder: Path) -> int:
    """Returns the worker's exit code once it has ended, by itself or told by a signal.

    Raises ClickException where the HTTP server or the queue ended before.
    """
    try:
        while (code := worker.poll()) is None:
            if server is not None and server.poll() is not None:
                raise click.ClickException(
                    f"the HTTP server ended with code {server.returncode}, and with it all the "
                    "rest; --no-http starts without one"
                )
            if embedded_url(folder) is None:
                log = folder / FOLDER / LOG_FILE
                raise click.ClickException(f"the embedded Valkey ended: {log} may say why")
            time.sleep(_LOOK_SECONDS)
        return code
    except KeyboardInterrupt as stop:
        worker.terminate()
        code = worker.wait()  # it is finishing its jobs
        if code != -signal.SIGTERM:
            return code
        # It was not ready to be told.
        if isinstance(stop, ToldToStop):
            return 0
        raise


COMMANDS = (up,)
