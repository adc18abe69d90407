"""Commands for producers: submit, result, status. They need Redis, not MLX."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, TextIO

import click
from redis import Redis
from rich.console import Console

from mlx_rq.files import replacing
from mlx_rq.jobs.client import submit as submit_module
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.client.job_detail import job_detail
from mlx_rq.jobs.openai.errors import RedisUnavailable, RequestError
from mlx_rq.jobs.openai.validation import RepeatedKey, unique_keys
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue.chrome_trace import chrome_trace
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.status import status as status_of_all
from mlx_rq.jobs.queue.trace import trace as trace_of
from mlx_rq.worker.cli.answers import follow_job, print_result
from mlx_rq.worker.cli.browser import open_page
from mlx_rq.worker.cli.common import (
    json_option,
    option,
    print_json,
    redis_option,
    when_interrupted,
)
from mlx_rq.worker.cli.completion import complete_job, complete_served
from mlx_rq.worker.cli.job_ids import STDIN, find_job, read_stdin
from mlx_rq.worker.cli.job_options import job_options
from mlx_rq.worker.cli.status_view import life_lines, view
from mlx_rq.worker.cli.value_types import Duration

TRACE_VIEWER = "https://ui.perfetto.dev"

FOLLOW_OR_JSON = "--follow prints text as it comes, --json one object at the end: take one of them"


def parse_parameters(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Reads `name=value` pairs; a value is JSON where it is JSON, else a string."""
    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{pair!r} is not name=value", param_hint="-p")
        try:
            parameters[name] = json.loads(text, object_pairs_hook=unique_keys)
        except (RepeatedKey, RecursionError) as error:
            raise click.BadParameter(f"{name}: {error}", param_hint="-p") from None
        except ValueError:
            parameters[name] = text
    return parameters


def _read_body(file: TextIO) -> dict[str, Any]:
    try:
        body = json.load(file, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object.", code="invalid_type")
    return body


@click.command(context_settings={"allow_extra_args": True})
@click.pass_context
@click.argument("text", required=False)
@option(
    "-f",
    "--body",
    type=click.File(encoding="utf-8-sig"),
    help="The whole body as JSON; - for pipes.",
)
@option("--system", metavar="TEXT", help="A system message before the text.")
@option("--completion", is_flag=True, help="Continue TEXT as it stands, instead of a chat turn.")
@option(
    "--model",
    metavar="ID",
    shell_complete=complete_served,
    help="Which model answers; without it, any worker's.",
)
@click.option(
    "-p", "--parameter", multiple=True, metavar="NAME=VALUE", help="Any field of the body."
)
@job_options()
@option("--idempotency-key", metavar="KEY", help="Same key and body: the same job, not a second.")
@option("--wait", is_flag=True, help="Wait for the answer and print it.")
@option("--follow", is_flag=True, help="Print the answer's text as it is generated.")
@json_option
@redis_option
def submit(
    context: click.Context,
    /,
    text: str | None,
    body: TextIO | None,
    system: str | None,
    completion: bool,
    model: str | None,
    parameter: tuple[str, ...],
    wait: bool,
    follow: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Put one job into the queue and print its id.

    TEXT is a chat turn, or with --completion a text to be continued; - reads a pipe.

    \b
        mlx-rq submit "Name a colour" -p max_completion_tokens=20 --wait
        mlx-rq submit -f body.json --follow
        git diff | mlx-rq submit - --system "Write a commit message." --wait

    Exits with 0 where the job was taken (with --wait or --follow: answered), else with 1.
    """
    if text is not None and context.args:
        whole = shlex.quote(" ".join([text, *context.args]))
        raise click.UsageError(f"TEXT is one argument: put it in quotes: mlx-rq submit {whole}")
    if follow and as_json:
        raise click.UsageError(FOLLOW_OR_JSON)
    if completion and system is not None:
        raise click.UsageError("--system goes with a chat, not with --completion")
    if text is None and body is not None and (completion or system is not None):
        flag = "--completion" if completion else "--system"
        raise click.UsageError(f"{flag} goes with a TEXT, not with --body alone")
    when_interrupted("Stopped. Nothing was submitted.")  # as while a pipe is read
    if text == STDIN:
        text = read_stdin() if completion else read_stdin().rstrip("\n")
    fields = _read_body(body) if body else {}
    if text is not None and (asked := "prompt" if completion else "messages") in fields:
        raise click.UsageError(f"TEXT and --body both say {asked!r}: give one of them")
    if text is not None and completion:
        fields["prompt"] = text
    elif text is not None:
        turns = [] if system is None else [{"role": "system", "content": system}]
        fields["messages"] = [*turns, {"role": "user", "content": text}]
    elif body is None:
        raise click.UsageError("give the TEXT of a job, or a whole body with --body")
    if model is not None:
        fields["model"] = model
    fields.update(parse_parameters(parameter))
    when_interrupted("Stopped before it was known whether the job is in the queue.")
    job = submit_module.submit(fields, stream=follow, **options)
    with _named(job.id):
        _show_submitted(job, wait=wait, follow=follow, as_json=as_json)


def _show_submitted(job: Job, *, wait: bool, follow: bool, as_json: bool) -> None:
    if wait or follow:
        when_interrupted(_goes_on(job.id))
    if follow:
        follow_job(job)
        return
    if wait:
        print_result(job.result(), as_json)
        return
    info = job.info()
    if as_json:
        print_json(info)
        return
    click.echo(job.id)
    if info["note"]:
        click.echo(f"note: {info['note']}", err=True)


@click.command()
@click.argument("job_id", shell_complete=complete_job)
# Not from the environment, where that is how long a submitted job's attempt may take.
@option(
    "--timeout",
    envvar=None,
    type=Duration(),
    default=None,
    help="How long to wait: seconds, or as in 10m.",
    show_default="no limit",
)
@option("--no-wait", is_flag=True, help="Only look: exit 1 where there is no result yet.")
@option("--follow", is_flag=True, help="Print the text as it comes, if submitted with --follow.")
@json_option
@redis_option
def result(
    job_id: str,
    timeout: float | None,
    no_wait: bool,
    follow: bool,
    as_json: bool,
    redis_url: str | None,
) -> None:
    """Wait for the answer of a job and print it: its text, or where it calls tools, the calls.

    With --json, the whole object. The first characters of the id are enough; - reads it from a
    pipe.

    Exits with 0 where there is an answer, 1 where the job failed, was cancelled, is not known, or
    has no result in time.
    """
    if follow and as_json:
        raise click.UsageError(FOLLOW_OR_JSON)
    if follow and (no_wait or timeout is not None):
        raise click.UsageError("--follow waits for the end: leave --no-wait and --timeout out")
    job = find_job(job_id, redis_url)
    when_interrupted(_goes_on(job.id))
    if follow:
        follow_job(job)
        return
    print_result(job.result(timeout=0 if no_wait else timeout), as_json)


@contextmanager
def _named(job_id: str) -> Iterator[None]:
    """Says which job was accepted, where Redis goes away before its id was printed."""
    try:
        yield
    except RedisUnavailable as error:
        raise RedisUnavailable(
            f"{error} The job was accepted: `mlx-rq result {job_id}` has its answer."
        ) from error


def _goes_on(job_id: str) -> str:
    return f"Stopped waiting. The job goes on: `mlx-rq result {job_id}` has its answer."


@click.command()
@click.argument("job_id", required=False, shell_complete=complete_job)
@json_option
@redis_option
def status(job_id: str | None, as_json: bool, redis_url: str | None) -> None:
    """Show one job, by its id or how that begins, or the queues and the workers."""
    if job_id is not None:
        info = find_job(job_id, redis_url).info()
        if as_json:
            print_json(info)
        else:
            for name, value in info.items():
                if value is not None:
                    click.echo(f"{name + ':':12} {value}")
            if info["status"] == "failed":
                error = job_detail(info["id"], redis_url, content=False)["error"]
                click.echo(f"{'error:':12} {error['message']} [{error['code']}]")
        return
    connection = connect(redis_url)
    with reachable(connection):
        state = status_of_all(connection)
    if as_json:
        print_json(state)
    else:
        Console(highlight=False).print(view(state))


@click.command()
@click.argument("job_id", required=False, shell_complete=complete_job)
@option(
    "--chrome",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    metavar="FILE",
    help="Write what the batch did, as ui.perfetto.dev and chrome://tracing show it.",
)
@option("--open", "opens", is_flag=True, help="Write it, and open the page that shows it.")
@option(
    "--last",
    type=Duration(1),
    default="15m",
    help="Of how long, for --chrome and --open.",
)
@json_option
@redis_option
def trace(
    job_id: str | None,
    chrome: Path | None,
    opens: bool,
    last: float,
    as_json: bool,
    redis_url: str | None,
) -> None:
    """Show what happened to a job, step by step, and when.

    With --chrome or --open, what happened to all that ended lately, for trace viewers.
    """
    connection = connect(redis_url)
    if (job_id is None) == (chrome is None and not opens):
        raise click.UsageError("name a job, or a file for all of them with --chrome, or --open")
    if job_id is None:
        _draw(connection, chrome, last, opens=opens)
        return
    job = find_job(job_id, redis_url)
    with reachable(connection):
        events = trace_of(connection, job.id)
    if as_json:
        print_json([event._asdict() for event in events])
        return
    for said in life_lines(events):
        click.echo(said)


def _draw(connection: Redis, path: Path | None, seconds: float, *, opens: bool) -> None:
    """Writes a trace file, a temporary one where none is named, and opens the page for it."""
    with reachable(connection):
        drawn = chrome_trace(connection, seconds)
    path = path or Path(mkdtemp(prefix="mlx-rq-")) / "trace.json"
    with replacing(path) as file:
        file.write(json.dumps(drawn).encode())
    spans = counted(sum(event["ph"] == "X" for event in drawn["traceEvents"]), "span")
    where = f"open it at {TRACE_VIEWER}"
    if opens:  # a page can read no file of this machine by its name
        where = f"at {TRACE_VIEWER}, drop it on the page, or take “Open trace file”"
    click.echo(f"{path}: {spans}; {where}")
    if opens:
        open_page(TRACE_VIEWER)


COMMANDS = (submit, result, status, trace)
