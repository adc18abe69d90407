"""Tells people, and programs, how a batch ended: a notice on the desktop, a webhook."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import click
from redis.exceptions import RedisError

from mlx_rq.jobs.batch.batch import Batch
from mlx_rq.jobs.batch.tally import Tally
from mlx_rq.jobs.openai.errors import RedisUnavailable, RequestError
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.webhook_events import tell
from mlx_rq.jobs.queue.webhooks import anybody_delivers, check_url
from mlx_rq.worker.cli.batch_files import PIPE
from mlx_rq.worker.cli.common import Command, option, words_of
from mlx_rq.worker.cli.desktop_notice import show_notice, why_no_notices

_LONGEST_REASON = 200
_WORDS = {"completed": "done", "stopped": "stopped", "failed": "failed"}


def telling_options(command: Command) -> Command:
    """Declares the options that say who is told of a batch's end."""
    for declare in (
        option(
            "--webhook",
            metavar="URL",
            callback=_a_url,
            help="Call this URL at the end; an HTTP server with --webhook-secret-file does it.",
        ),
        option("--notify", is_flag=True, callback=_able, help="A desktop notice at the end."),
    ):
        command = declare(command)
    return command


def _a_url(_: click.Context, __: click.Parameter, url: str | None) -> str | None:
    if url is not None:
        try:
            check_url(url)
        except RequestError as error:
            fault = str(error).removeprefix(f"Invalid '{error.param}': ")  # click says which
            raise click.BadParameter(fault) from None
    return url


def _able(_: click.Context, __: click.Parameter, notify: bool) -> bool:
    """Refuses before a night's work what could not be done after it."""
    if notify and (why := why_no_notices()) is not None:
        raise click.BadParameter(f"{why}; or have --webhook call a URL.")
    return notify


@contextmanager
def telling(
    batch: Batch, input_name: str, output: str, options: Mapping[str, Any]
) -> Iterator[None]:
    """Tells whom the options name how the block ended. Ctrl-C that came twice is not told."""
    if options["webhook"] is not None:
        _warn_where_nobody_delivers(options["redis_url"])
    try:
        yield
    except Exception as error:
        _tell(_End(batch, input_name, output, error), options)
        raise
    _tell(_End(batch, input_name, output), options)


def _warn_where_nobody_delivers(redis_url: str | None) -> None:
    connection = connect(redis_url)
    with suppress(RedisError, RedisUnavailable), reachable(connection):  # the run says it itself
        if not anybody_delivers(connection):
            click.echo(
                "note: no HTTP server delivers webhooks now. It waits up to a week for one: "
                "mlx-rq serve --webhook-secret-file FILE",
                err=True,
            )


@dataclass(frozen=True)
class _End:
    batch: Batch
    input_name: str
    output: str
    error: Exception | None = None

    @property
    def tally(self) -> Tally:
        return self.batch.tally

    @property
    def status(self) -> str:
        if self.error is not None:
            return "failed"
        return "stopped" if self.tally.missing or not self.tally.total else "completed"

    def title(self) -> str:
        name = "standard input" if self.input_name == PIPE else os.path.basename(self.input_name)
        return f"mlx-rq: {name} {'is ' if self.status == 'completed' else ''}{_WORDS[self.status]}"

    def words(self) -> str:
        """Says what became of the lines, and why it failed."""
        tally, errors = self.tally, self.tally.errors.total()
        if tally.total:
            words = [f"{tally.answered:,} of {tally.total:,} answered"]
            words += [counted(errors, "error")] if errors else []
            words += [f"{tally.missing:,} still to do"] if tally.missing else []
        else:
            words = ["nothing was submitted"]
        reason = "" if self.error is None else f". {words_of(self.error)}"[:_LONGEST_REASON]
        return ", ".join(words) + reason

    def data(self) -> dict[str, Any]:
        """Says the same to a program: as OpenAI's Batch, as far as that goes."""
        run = self.batch.flight.batch
        data = {
            "id": run and f"batch_{run}",
            "object": "batch",
            "status": self.status,
            "input": _text(self.input_name),
            "output": _text(self.output),
            "request_counts": {
                "total": self.tally.total,
                "completed": self.tally.answered,
                "failed": self.tally.errors.total(),
            },
        }
        return data if self.error is None else {**data, "error": words_of(self.error)}


def _text(path: str) -> str:
    """A path, whose bytes may be no text."""
    return os.fsencode(path).decode(errors="replace")


def _tell(end: _End, options: Mapping[str, Any]) -> None:
    """Tells everybody; who cannot be told costs the batch nothing but a line of text."""
    if options["notify"] and (fault := show_notice(end.title(), end.words())) is not None:
        click.echo(f"The notice could not be shown: {fault}", err=True)
    if options["webhook"] is not None:
        connection = connect(options["redis_url"])
        try:
            with reachable(connection):
                tell(connection, options["webhook"], "batch", end.status, end.data())
        except (RedisError, RedisUnavailable) as error:
            click.echo(f"The webhook could not be queued: {error}", err=True)
