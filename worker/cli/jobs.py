"""Commands that look at jobs: result, status, trace. They need Redis, not MLX."""

import json
from pathlib import Path
from tempfile import mkdtemp

import click
from redis import Redis
from rich.console import Console

from mlx_rq.files import replacing
from mlx_rq.jobs.client.job_detail import job_detail
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue.chrome_trace import chrome_trace
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.status import status as status_of_all
from mlx_rq.jobs.queue.trace import trace as trace_of
from mlx_rq.worker.cli.answers import FOLLOW_OR_JSON, follow_job, goes_on, print_result
from mlx_rq.worker.cli.browser import open_page
from mlx_rq.worker.cli.common import (
    json_option,
    option,
    print_json,
    redis_option,
    when_interrupted,
)
from mlx_rq.worker.cli.completion import complete_job
from mlx_rq.worker.cli.job_ids import find_job
from mlx_rq.worker.cli.status_view import life_lines, view
from mlx_rq.worker.cli.value_types import Duration

TRACE_VIEWER = "https://ui.perfetto.dev"


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
    when_interrupted(goes_on(job.id))
    if follow:
        follow_job(job)
        return
    print_result(job.result(timeout=0 if no_wait else timeout), as_json)


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


COMMANDS = (result, status, trace)
