"""The command `cancel`: single jobs by their ids, or many at once."""

import sys
from pathlib import Path

import click

from mlx_rq.jobs.batch.state import open_state, state_of
from mlx_rq.jobs.openai.errors import JobNotFound
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue.cancel import cancel_jobs
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.unfinished import unfinished_jobs
from mlx_rq.worker.cli.common import json_option, option, print_json, redis_option, when_interrupted
from mlx_rq.worker.cli.completion import complete_job, complete_served
from mlx_rq.worker.cli.job_ids import whole_ids

_NOTHING = "Nothing was cancelled."


# Not from the environment: what is cancelled is said each time.
@click.command()
@click.argument("job_ids", nargs=-1, shell_complete=complete_job)
@click.option("--queued", is_flag=True, help="All jobs that wait; what runs goes on.")
@click.option(
    "--model", metavar="ID", shell_complete=complete_served, help="All jobs of this model."
)
@click.option(
    "--batch",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="All jobs of the `mlx-rq batch` that writes FILE (its -o), once that is stopped.",
)
@option("--yes", envvar=None, is_flag=True, help="Do not ask before many are cancelled.")
@json_option
@redis_option
def cancel(
    job_ids: tuple[str, ...],
    queued: bool,
    model: str | None,
    batch: Path | None,
    yes: bool,
    as_json: bool,
    redis_url: str | None,
) -> None:
    """End jobs without an answer, whether they wait or run.

    \b
        mlx-rq cancel JOB_ID JOB_ID                or how their ids begin; - for a pipe
        mlx-rq cancel --queued                     all that wait
        mlx-rq cancel --model ID [--queued]        all of a model
        mlx-rq cancel --batch answers.jsonl        all of a batch

    Exits with 0, also where jobs had ended before; 1 where one is not known.
    """
    many = queued or model is not None or batch is not None
    if many == bool(job_ids):
        raise click.UsageError("name jobs by their ids, or many with --queued, --model or --batch")
    if not many:
        _cancel_named(job_ids, as_json, redis_url)
        return
    if as_json and not yes:
        raise click.UsageError("--json asks nothing: add --yes")
    if batch is None:
        _cancel_many(model, None, queued, yes, as_json, redis_url)
        return
    path = state_of(batch)
    if not path.exists():
        raise click.UsageError(
            f"--batch: there is no {path}; name the file that `mlx-rq batch -o` writes"
        )
    with open_state(path, str(batch)) as state:  # a batch that runs would go on submitting
        _cancel_many(model, state.run or "", queued, yes, as_json, redis_url)


def _cancel_many(
    model: str | None,
    batch: str | None,
    only_waiting: bool,
    yes: bool,
    as_json: bool,
    redis_url: str | None,
) -> None:
    connection = connect(redis_url)
    with reachable(connection):
        found = unfinished_jobs(connection, model=model, batch=batch, only_waiting=only_waiting)
        if found and not yes:
            which = (
                counted(len(found), "job that waits", "jobs that wait")
                if only_waiting
                else counted(len(found), "job that waits or runs", "jobs that wait or run")
            )
            when_interrupted(_NOTHING)
            if not click.confirm(f"Cancel {which}?", err=True):
                click.echo(_NOTHING, err=True)
                sys.exit(1)
            when_interrupted("Stopped. Look with `mlx-rq status` which jobs are cancelled.")
        ended = cancel_jobs(connection, found, only_waiting=only_waiting).ended
    if as_json:
        print_json({"cancelled": len(ended)})
    else:
        click.echo(f"{counted(len(ended), 'job')} cancelled")


def _cancel_named(job_ids: tuple[str, ...], as_json: bool, redis_url: str | None) -> None:
    connection = connect(redis_url)
    distinct = whole_ids(job_ids, redis_url)
    with reachable(connection):
        cancelled = cancel_jobs(connection, distinct)
    known = [job_id for job_id in distinct if job_id not in cancelled.unknown]
    if as_json and known:
        print_json([{"id": job_id, "cancelled": job_id in cancelled.ended} for job_id in known])
    elif not as_json:
        for job_id in known:
            now = job_id in cancelled.ended
            click.echo(f"{job_id} {'cancelled' if now else 'had ended before'}")
    unknown = [job_id for job_id in distinct if job_id in cancelled.unknown]
    if unknown and as_json and known:
        sys.exit(1)  # they are not in the list
    if unknown:
        raise JobNotFound(unknown[0])


COMMANDS = (cancel,)
