"""The command `mlx-rq batch`: a file of requests, or of rows and a template, in; a dataset out."""

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import click

from mlx_rq.files import is_full
from mlx_rq.jobs.batch.batch import Batch, BatchOptions, Order
from mlx_rq.jobs.batch.compression import compress
from mlx_rq.jobs.batch.dataset import Dataset
from mlx_rq.jobs.batch.files import PipedOutputs
from mlx_rq.jobs.batch.lines import Source
from mlx_rq.jobs.batch.state import State, open_state
from mlx_rq.jobs.batch.tally import Tally
from mlx_rq.jobs.openai.errors import RedisUnavailable, RequestError, error_object
from mlx_rq.jobs.queue.options import BATCH_PRIORITY
from mlx_rq.signals import handling
from mlx_rq.worker.cli.batch_end import telling, telling_options
from mlx_rq.worker.cli.batch_files import (
    PIPE,
    Places,
    errors_path,
    open_source_file,
    places_of,
    schema_of,
    source_of,
)
from mlx_rq.worker.cli.batch_forecast import forecast
from mlx_rq.worker.cli.batch_progress import left_of, stopped, watching
from mlx_rq.worker.cli.common import (
    default_of,
    json_option,
    option,
    print_json,
    redis_option,
    words_of,
)
from mlx_rq.worker.cli.completion import complete_served
from mlx_rq.worker.cli.job_options import job_options, take_job_options
from mlx_rq.worker.cli.value_types import WholeNumber
from mlx_rq.worker.process.heard_once import heard_once

NOT_FINISHED = 2

_readable = click.Path(exists=True, dir_okay=False, allow_dash=True)
_schema_file = click.Path(exists=True, dir_okay=False, path_type=Path)


def _one_character(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    if value is not None and (len(value) != 1 or value in '"\r\n'):
        raise click.BadParameter(f"expected one character, but got {value!r}")
    return value


@click.command(context_settings={"allow_extra_args": True})
@click.pass_context
@click.argument("input_name", metavar="INPUT", type=_readable)
@option(
    "-o",
    "--output",
    metavar="OUTPUT",
    help="Where answers go: .jsonl or .csv (also .gz, .zst), .parquet, a folder, or - for a pipe.",
)
@option("--errors", metavar="FILE", help="Where errors go.", show_default="OUTPUT.errors.jsonl")
@option("--together", is_flag=True, help="Write errors among the answers.")
@option("--skip-bad-lines", is_flag=True, help="Make error records of lines that are no requests.")
@option("--retry-errors", is_flag=True, help="Run the lines again that ended with an error.")
@option("--order", type=click.Choice(get_args(Order)), default=default_of(BatchOptions, "order"))
@option("--prompt", metavar="TEMPLATE", help="INPUT has rows: what to ask of each, with {column}s.")
@option("--system", envvar=None, metavar="TEMPLATE", help="A system message before the prompt.")
@option("--schema", type=_schema_file, help="A JSON schema that the answers follow.")
@option("--id-column", metavar="NAME", help="The column that names a row.", show_default="row-<n>")
@option(
    "--model",
    envvar=None,
    metavar="ID",
    shell_complete=complete_served,
    help="Which model answers, over what the lines say.",
)
@click.option(
    "-p", "--parameter", multiple=True, metavar="NAME=VALUE", help="Any field of all bodies."
)
@option(
    "--delimiter",
    envvar=None,
    metavar="CHARACTER",
    callback=_one_character,
    help="What parts the values of a CSV file.",
    show_default="a comma, in .tsv a tab",
)
@option("--dry-run", is_flag=True, help="Show the first prompts and what it takes; run nothing.")
@option(
    "--in-flight",
    type=WholeNumber(1),
    default=default_of(BatchOptions, "window"),
    help="Most jobs at once.",
)
@job_options(priority={"envvar": None, "default": BATCH_PRIORITY}, timeout={"envvar": None})
@option("--quiet", is_flag=True, help="Show no progress.")
@telling_options
@json_option
@redis_option
def batch(
    context: click.Context,
    /,
    input_name: str,
    output: str | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a file of requests and write the answers.

    INPUT holds OpenAI batch lines, or with --prompt the rows of a table (.csv, .tsv, .jsonl,
    .parquet), compressed (.gz, .zst) or not; - reads a pipe. Stopped at any moment, the same
    command goes on where it was.

    \b
        mlx-rq batch requests.jsonl -o answers.jsonl
        mlx-rq batch reviews.csv --prompt 'Name the mood of: {text}' -o moods.parquet

    Exits with 0 where all were answered, 1 where some ended with an error, 2 where it did not
    finish.
    """
    if context.args:
        raise click.UsageError(_one_too_many(input_name, output, context.args[0]))
    if not dry_run and output is None:
        raise click.UsageError("say where the answers go with -o")
    try:
        with open_source_file(input_name) as path:
            source = source_of(path, input_name, options)
            if dry_run or output is None:
                _check_outputs(input_name, output, options)
                sys.exit(forecast(source, _batch_options(options), as_json=as_json))
            tally = _run(source, input_name, output, options, as_json)
    except BrokenPipeError:  # whoever read the answers has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(NOT_FINISHED)
    except KeyboardInterrupt:
        click.echo(
            "Stopped. What was submitted stays in the queue; the same command goes on from there.",
            err=True,
        )
        sys.exit(NOT_FINISHED)
    except (RequestError, RedisUnavailable, OSError) as error:
        _print_error(error, as_json)
        sys.exit(NOT_FINISHED)
    sys.exit(tally.exit_code)


def _one_too_many(input_name: str, output: str | None, second: str) -> str:
    """Says what to write instead of an argument behind INPUT."""
    if output is None:
        command = shlex.join(["mlx-rq", "batch", input_name, "-o", second])
        return f"say where the answers go with -o (--output): {command}"
    return f"{second!r} is one argument too many: INPUT is one file, here {input_name!r}"


@contextmanager
def _stopping(batch: Batch) -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM end a batch in good order; a second one ends it at once."""
    told = False

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal told
        if told:
            raise KeyboardInterrupt
        told = True
        batch.stop()

    with handling(heard_once(stop), signal.SIGINT, signal.SIGTERM):
        yield


def _check_outputs(input_name: str, output: str | None, options: Mapping[str, Any]) -> None:
    """Refuses what a run would refuse of its outputs, and leaves them as they are."""
    if output == PIPE:
        PipedOutputs(sys.stdout.buffer, errors_path(input_name, output, options)).check(ours=False)
    elif output is not None:
        places_of(input_name, output, options).check()


def _run(
    source: Source, input_name: str, output: str, options: Mapping[str, Any], as_json: bool
) -> Tally:
    if output == PIPE:
        piped = PipedOutputs(sys.stdout.buffer, errors_path(input_name, output, options))
        batch = Batch(source, piped, State(), _batch_options(options))
        with telling(batch, input_name, output, options):
            _run_batch(batch, options)
            _print_summary(batch, None, as_json, to_stderr=True)
        return batch.tally
    places = places_of(input_name, output, options)
    places.check_packages()  # before a night's work, not after
    with _full_disk_of(output), open_state(places.state, output) as state:
        batch = Batch(source, places.outputs(), state, _batch_options(options))
        with telling(batch, input_name, output, options), _full_disk_of(output):
            _run_batch(batch, options)
            if batch.tally.exit_code != NOT_FINISHED:
                if places.dataset is not None:
                    Dataset(source, places.answers, schema_of(options)).write(places.dataset)
                if places.compressed is not None:
                    compress(places.answers, places.compressed)
            _print_summary(batch, places, as_json, to_stderr=False)
    return batch.tally


@contextmanager
def _full_disk_of(output: str) -> Iterator[None]:
    """Says what to do about a full disk; who writes into a file that is open names none."""
    try:
        yield
    except OSError as error:
        if is_full(error) and error.filename != output:
            advice = "make room, and run the same command again: it goes on where it was"
            raise OSError(error.errno, f"{error.strerror}: {advice}", output) from error
        raise


def _run_batch(batch: Batch, options: Mapping[str, Any]) -> None:
    """Runs to the end or until it is stopped, which the tally shows as missing lines."""
    with _stopping(batch), watching(quiet=options["quiet"]) as watch:
        batch.run(watch)
    if batch.tally.exit_code == NOT_FINISHED:
        click.echo(stopped(batch), err=True)


def _batch_options(options: Mapping[str, Any]) -> BatchOptions:
    return BatchOptions(
        order=options["order"],
        skip_bad_lines=options["skip_bad_lines"],
        retry_errors=options["retry_errors"],
        window=options["in_flight"],
        job=take_job_options(options),
        redis_url=options["redis_url"],
    )


def _print_summary(batch: Batch, places: Places | None, as_json: bool, *, to_stderr: bool) -> None:
    tally, usage = batch.tally, batch.flight.usage
    if not as_json:
        click.echo(tally, err=to_stderr)
        if tally.errors and places is not None and places.dataset is None:
            click.echo(f"errors: {places.errors or places.answers}", err=True)
        return
    summary = {
        "total": tally.total,
        "answered": tally.answered,
        "errors": dict(tally.errors.most_common()),
        "missing": tally.missing,
        **left_of(batch)._asdict(),
        "resumed": tally.resumed,
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cached,
        "completion_tokens": usage.completion,
    }
    click.echo(json.dumps(summary, indent=2), err=to_stderr)


def _print_error(error: Exception, as_json: bool) -> None:
    words = words_of(error)
    if as_json:
        print_json({"error": getattr(error, "error", None) or error_object(words, code=None)})
    else:
        click.echo(f"Error: {words}", err=True)


COMMANDS = (batch,)
