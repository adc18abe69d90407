"""The command line: `mlx-rq`. Options can also come from the environment (MLX_RQ_…) and from files.

Not so those that say what is asked of single jobs, where another command's option of that name
would be taken for it (`batch --model`), nor those that change what lasts (`limits`).

Nothing here needs MLX when it is imported; commands that do import it when they are run.
"""

import errno
import logging
import os
import sys
from typing import Any

import click

from mlx_rq.jobs.openai.errors import (
    JobFailed,
    JobNotFound,
    RedisUnavailable,
    RequestError,
    ResultTimeout,
    error_object,
)
from mlx_rq.jobs.openai.json_line import json_line
from mlx_rq.jobs.openai.sizes import max_body_bytes
from mlx_rq.worker.cli import (
    backup,
    batch,
    cancel,
    completion,
    config,
    demo,
    jobs,
    model,
    queue,
    serve,
    submit,
    top,
    up,
    worker,
)
from mlx_rq.worker.cli.bench import command as bench
from mlx_rq.worker.cli.common import AS_JSON, WHEN_INTERRUPTED, option, words_of
from mlx_rq.worker.cli.config import profile_option
from mlx_rq.worker.cli.doctor import command as doctor
from mlx_rq.worker.cli.processes import stop_with_parent
from mlx_rq.worker.cli.service import command as service
from mlx_rq.worker.cli.signals import INTERRUPTED, ToldToStop, hear_interrupts

_QUEUE_LASTS = "Stopped. Jobs that were accepted stay in the queue, and go on at the next start."

_INTERRUPTED_WORDS = {
    "cancel": "Stopped. Look with `mlx-rq status` which jobs are cancelled.",
    "demo": "Stopped. The demo's queue and its jobs are gone.",
    "model": "Stopped. No model was changed; the same command begins again.",
    "serve": "Stopped the HTTP server. Jobs that it took stay in the queue, and go on.",
    "up": _QUEUE_LASTS,
    "worker": _QUEUE_LASTS,
}


class _Group(click.Group):
    """Prints errors that a person can act on as one line, and exits with 1."""

    def invoke(self, context: click.Context) -> Any:
        try:
            hear_interrupts()
            return super().invoke(context)
        except (
            RequestError,
            JobFailed,
            JobNotFound,
            RedisUnavailable,
            ResultTimeout,
            _user_errors(),
        ) as error:
            _print_error(error, as_json=context.meta.get(AS_JSON, False))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever reads has enough: click ends without a word
            _print_error(error, as_json=context.meta.get(AS_JSON, False))
        except (KeyboardInterrupt, click.Abort) as interrupt:  # Abort: at a question
            click.echo(f"\n{_interrupted(context)}", err=True)
            sys.exit(INTERRUPTED if not isinstance(interrupt, ToldToStop) else 1)
        sys.exit(1)


def _interrupted(context: click.Context) -> str:
    """Says what becomes of the work of a command that Ctrl-C ended."""
    words: str | None = context.meta.get(WHEN_INTERRUPTED)
    return words or _INTERRUPTED_WORDS.get(context.invoked_subcommand or "", "Stopped.")


class _NoError(Exception):
    """Never raised."""


def _user_errors() -> type[Exception]:
    """The engine's error class, where the engine was imported at all."""
    models = sys.modules.get("mlx_rq.engine.models.load")
    return _NoError if models is None else models.ModelError


def _print_error(error: Exception, *, as_json: bool) -> None:
    words = words_of(error)
    details = getattr(error, "error", None) or error_object(words, code=None)
    if as_json:
        click.echo(json_line({"error": details}))
    elif isinstance(error, JobFailed):
        click.echo(f"Error: {words} [{details.get('code')}]", err=True)
    else:
        click.echo(f"Error: {words}", err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="mlx-rq")
@profile_option
@option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    help="How much is said on standard error.",
)
@click.pass_context
def main(context: click.Context, log_level: str) -> None:
    """Asynchronous language-model jobs on Apple silicon.

    Start with `mlx-rq demo`, or `mlx-rq up` and then `mlx-rq submit "Hello"`.

    Exits with 0 where all went well, 1 where something failed, which standard error (with --json,
    standard output) says, 2 where the command line is wrong, 130 where Ctrl-C ended it (`up` and
    `worker`: 0, they stop in good order). NO_COLOR is heeded.
    """
    if os.environ.get("NO_COLOR"):
        context.color = False
    logging.basicConfig(
        level=log_level.upper(), format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    stop_with_parent()
    max_body_bytes()  # a wrong MLX_RQ_MAX_BODY is said at once, not by every job
    # These speak once for every request or connection.
    for noisy in ("rq.worker", "rq.registry", "httpx", "filelock", "transformers"):
        logging.getLogger(noisy).setLevel("WARNING")


_RUNNING = (up, worker, serve, demo)
_ASKING = (submit, jobs, top, cancel, batch, queue)
_SETTING_UP = (model, bench, config, completion, doctor, service, backup)

for module in (*_RUNNING, *_ASKING, *_SETTING_UP):
    for command in module.COMMANDS:
        main.add_command(command)
