"""The command `mlx-rq batch`: a file of requests, or of rows and a template, in; a dataset out."""

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, get_args

import click

from mlx_rq.jobs.batch.batch import Batch, BatchOptions, Order, Tally
from mlx_rq.jobs.batch.dataset import Dataset
from mlx_rq.jobs.batch.files import Outputs, PipedOutputs
from mlx_rq.jobs.batch.lines import BatchFile, Source
from mlx_rq.jobs.batch.state import State, open_state, state_of
from mlx_rq.jobs.batch.tables import TemplatedRows, needs_pyarrow, open_table
from mlx_rq.jobs.batch.templates import ChatTemplate, Template
from mlx_rq.jobs.openai.errors import RedisUnavailable, RequestError, error_object
from mlx_rq.jobs.queue.options import BATCH_PRIORITY
from mlx_rq.jobs.queue.prepare import response_format
from mlx_rq.worker.cli.batch_forecast import forecast
from mlx_rq.worker.cli.batch_progress import watching
from mlx_rq.worker.cli.common import default_of, json_option, option, print_json, redis_option
from mlx_rq.worker.cli.job_options import job_options, take_job_options
from mlx_rq.worker.cli.jobs import parse_parameters

PIPE = "-"
NOT_FINISHED = 2

_readable = click.Path(exists=True, dir_okay=False, allow_dash=True)
_schema_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("input_name", metavar="INPUT", type=_readable)
@option(
    "-o",
    "--output",
    metavar="OUTPUT",
    help="Where the answers go: .jsonl, .parquet, .csv, a dataset folder, or - for a pipe.",
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
@option("--model", envvar=None, metavar="ID", help="Which model answers, over what the lines say.")
@click.option(
    "-p", "--parameter", multiple=True, metavar="NAME=VALUE", help="Any field of all bodies."
)
@option("--dry-run", is_flag=True, help="Show the first prompts and what it takes; run nothing.")
@option(
    "--in-flight",
    type=click.IntRange(1),
    default=default_of(BatchOptions, "window"),
    help="Most jobs at once.",
)
@job_options(priority={"envvar": None, "default": BATCH_PRIORITY}, timeout={"envvar": None})
@option("--quiet", is_flag=True, help="Show no progress.")
@json_option
@redis_option
def batch(
    input_name: str, output: str | None, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Run a file of requests and write the answers.

    INPUT holds OpenAI batch lines, or with --prompt the rows of a table (.csv, .tsv, .jsonl,
    .parquet); - reads a pipe. Stopped at any moment, the same command goes on where it was.

    \b
        mlx-rq batch requests.jsonl -o answers.jsonl
        mlx-rq batch reviews.csv --prompt 'Name the mood of: {text}' -o moods.parquet

    Exits with 0 where all were answered, 1 where some ended with an error, 2 where it did not
    finish.
    """
    if not dry_run and output is None:
        raise click.UsageError("say where the answers go with -o")
    try:
        with _input(input_name) as path:
            source = _source(path, input_name, options)
            if dry_run or output is None:
                forecast(source, redis_url=options["redis_url"], as_json=as_json)
                return
            tally = _run(source, input_name, output, options, as_json)
    except BrokenPipeError:  # whoever read the answers has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(NOT_FINISHED)
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)
        sys.exit(NOT_FINISHED)
    except (RequestError, RedisUnavailable, OSError) as error:
        _print_error(error, as_json)
        sys.exit(NOT_FINISHED)
    sys.exit(tally.exit_code)


@contextmanager
def _input(name: str) -> Iterator[Path]:
    """Gives the file to read, which is read more than once: a pipe is written down first."""
    if name != PIPE:
        yield Path(name)
        return
    with tempfile.NamedTemporaryFile(prefix="mlx-rq-batch-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


@contextmanager
def _stopping(batch: Batch) -> Iterator[None]:
    """Lets Ctrl-C and SIGTERM end a batch in good order; a second one ends it at once."""

    def stop(signum: int, frame: FrameType | None) -> None:
        batch.stop()
        signal.signal(signum, signal.default_int_handler)

    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _source(path: Path, input_name: str, options: Mapping[str, Any]) -> Source:
    name = "standard input" if input_name == PIPE else input_name
    settings = {} if options["model"] is None else {"model": options["model"]}
    # In one order: whoever gives them in another has changed nothing.
    settings |= dict(sorted(parse_parameters(options["parameter"]).items()))
    if options["prompt"] is None:
        for option_name in ("system", "schema", "id_column"):
            if options[option_name] is not None:
                flag = f"--{option_name.replace('_', '-')}"
                raise click.UsageError(f"{flag} goes with --prompt: INPUT then holds rows")
        if input_name != PIPE and Path(input_name).suffix in (".csv", ".tsv", ".parquet"):
            raise click.UsageError(f"{name} holds rows: say with --prompt what to ask of each")
        return BatchFile(path, name, settings)
    if (schema := _schema(options)) is not None:
        settings["response_format"] = response_format(schema)
    system = options["system"]
    template = ChatTemplate(
        Template(options["prompt"], "--prompt"),
        None if system is None else Template(system, "--system"),
        settings,
    )
    suffix = Path(input_name).suffix.lower() if input_name != PIPE else _sniff(path)
    return TemplatedRows(open_table(path, name, suffix), name, template, options["id_column"])


def _sniff(path: Path) -> str:
    """Tells JSON lines from CSV in what came through a pipe."""
    with path.open("rb") as file:
        return ".jsonl" if file.read(16).lstrip(b"\xef\xbb\xbf \r\n").startswith(b"{") else ".csv"


def _schema(options: Mapping[str, Any]) -> dict[str, Any] | None:
    path: Path | None = options["schema"]
    if path is None:
        return None
    try:
        schema = json.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise click.UsageError(f"--schema: {path} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise click.UsageError(f"--schema: {path} is not a JSON object")
    return schema


class _Places(NamedTuple):
    """Where things are written. A dataset is made of the answers when all are there."""

    answers: Path
    errors: Path | None
    state: Path
    dataset: Path | None


def _places(input_name: str, output: str, options: Mapping[str, Any]) -> _Places:
    path, errors = Path(output), _errors_path(input_name, output, options)
    if not path.name or not path.parent.is_dir():
        raise click.UsageError(f"-o: there is no folder {path.parent} to write {output} into")
    state = state_of(path)
    if path.suffix == ".jsonl":
        apart = None if options["together"] else errors or path.with_suffix(".errors.jsonl")
        for other, name in ((Path(input_name), "INPUT"), (apart, "--errors")):
            if other is not None and _same(other, path):
                raise click.UsageError(f"-o and {name} name the same file, {output}")
        return _Places(path, apart, state, None)
    if path.suffix not in ("", ".parquet", ".csv"):
        raise click.UsageError(
            f"-o: {output} ends in {path.suffix}; known are .jsonl, .parquet, .csv, and no ending "
            "for a dataset folder"
        )
    if errors is not None or options["order"] == "finished":
        raise click.UsageError("a dataset has its errors in a column, and the order of the input")
    if any(pair.partition("=")[0] == "n" for pair in options["parameter"]):
        raise click.UsageError(
            "a dataset has one answer in a row: leave -p n=… out, or take .jsonl"
        )
    if path.exists() and not state.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise click.UsageError(f"{output} is there already: choose another name, or move it away")
    return _Places(path.with_name(f"{path.name}.answers.jsonl"), None, state, path)


def _errors_path(input_name: str, output: str, options: Mapping[str, Any]) -> Path | None:
    """Says where --errors wants the errors; None where it was not given."""
    if options["errors"] is None:
        return None
    path = Path(options["errors"])
    if not path.name or not path.parent.is_dir():
        raise click.UsageError(f"--errors: there is no folder {path.parent} to write {path} into")
    if path.is_dir() or (output != PIPE and path.exists() and not path.is_file()):
        raise click.UsageError(f"--errors: {path} is there already and no regular file")
    if _same(path, Path(input_name)):
        raise click.UsageError(f"--errors and INPUT name the same file, {path}")
    return path


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def _run(
    source: Source, input_name: str, output: str, options: Mapping[str, Any], as_json: bool
) -> Tally:
    if output == PIPE:
        piped = PipedOutputs(sys.stdout.buffer, _errors_path(input_name, output, options))
        batch = Batch(source, piped, State(), _batch_options(options))
        _run_batch(batch, options)
        _print_summary(batch, None, as_json, to_stderr=True)
        return batch.tally
    places = _places(input_name, output, options)
    if places.dataset is not None and places.dataset.suffix != ".csv":
        needs_pyarrow("pyarrow")  # before a night's work, not after
    with open_state(places.state, output) as state:
        outputs = Outputs(places.answers, places.errors)
        batch = Batch(source, outputs, state, _batch_options(options))
        _run_batch(batch, options)
        if places.dataset is not None and batch.tally.exit_code != NOT_FINISHED:
            Dataset(source, places.answers, _schema(options)).write(places.dataset)
    _print_summary(batch, places, as_json, to_stderr=False)
    return batch.tally


def _run_batch(batch: Batch, options: Mapping[str, Any]) -> None:
    """Runs to the end or until it is stopped, which the tally shows as missing lines."""
    with _stopping(batch), watching(quiet=options["quiet"]) as watch:
        batch.run(watch)
    if batch.tally.exit_code == NOT_FINISHED:
        waiting = batch.flight.running + batch.flight.held
        click.echo(
            f"Stopped. {waiting:,} jobs stay in the queue; the same command takes them up again.",
            err=True,
        )


def _batch_options(options: Mapping[str, Any]) -> BatchOptions:
    return BatchOptions(
        order=options["order"],
        skip_bad_lines=options["skip_bad_lines"],
        retry_errors=options["retry_errors"],
        window=options["in_flight"],
        job=take_job_options(options),
        redis_url=options["redis_url"],
    )


def _print_summary(batch: Batch, places: _Places | None, as_json: bool, *, to_stderr: bool) -> None:
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
        "resumed": tally.resumed,
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cached,
        "completion_tokens": usage.completion,
    }
    click.echo(json.dumps(summary, indent=2), err=to_stderr)


def _print_error(error: Exception, as_json: bool) -> None:
    if as_json:
        print_json({"error": getattr(error, "error", None) or error_object(str(error), code=None)})
    else:
        click.echo(f"Error: {error}", err=True)


COMMANDS = (batch,)
