"""The command that puts one job into the queue. It needs Redis, not MLX."""

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import click

from mlx_rq.jobs.client import submit as submit_module
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.errors import RedisUnavailable, RequestError
from mlx_rq.jobs.openai.validation import RepeatedKey, unique_keys
from mlx_rq.worker.cli.answers import FOLLOW_OR_JSON, follow_job, goes_on, print_result
from mlx_rq.worker.cli.common import (
    json_option,
    option,
    print_json,
    redis_option,
    when_interrupted,
)
from mlx_rq.worker.cli.completion import complete_served
from mlx_rq.worker.cli.job_ids import STDIN, read_stdin
from mlx_rq.worker.cli.job_options import job_options


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
        when_interrupted(goes_on(job.id))
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


@contextmanager
def _named(job_id: str) -> Iterator[None]:
    """Says which job was accepted, where Redis goes away before its id was printed."""
    try:
        yield
    except RedisUnavailable as error:
        raise RedisUnavailable(
            f"{error} The job was accepted: `mlx-rq result {job_id}` has its answer."
        ) from error


COMMANDS = (submit,)
