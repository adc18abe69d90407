"""Commands for producers: submit, result, status. They need Redis, not MLX."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import click
from rich.console import Console
from rich.table import Table

from mlx_rq.jobs.client import submit as submit_module
from mlx_rq.jobs.client.job import fetch
from mlx_rq.jobs.openai.answers import said_in
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.overview import overview
from mlx_rq.worker.cli.common import json_option, option, print_json, redis_option
from mlx_rq.worker.cli.job_options import job_options
from mlx_rq.worker.cli.queue import limit_lines


def parse_parameters(pairs: tuple[str, ...]) -> dict[str, Any]:
    """Reads `name=value` pairs; a value is JSON where it is JSON, else a string."""
    parameters: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not name or not equals:
            raise click.BadParameter(f"{pair!r} is not name=value", param_hint="-p")
        try:
            parameters[name] = json.loads(text)
        except ValueError:
            parameters[name] = text
    return parameters


def _read_body(file: TextIO) -> dict[str, Any]:
    try:
        body = json.load(file)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("The body is not a JSON object.", code="invalid_type")
    return body


@click.command()
@click.argument("text", required=False)
@option(
    "--body", type=click.File(encoding="utf-8-sig"), help="The whole body as JSON; - for pipes."
)
@option("--system", metavar="TEXT", help="A system message before the text.")
@option("--completion", is_flag=True, help="Continue TEXT as it stands, instead of a chat turn.")
@option("--model", metavar="ID", help="Which model answers; without it, any worker's.")
@click.option(
    "-p", "--parameter", multiple=True, metavar="NAME=VALUE", help="Any field of the body."
)
@job_options()
@option("--idempotency-key", metavar="KEY", help="Same key and body: the same job, not a second.")
@option("--wait", is_flag=True, help="Wait for the answer and print it.")
@json_option
@redis_option
def submit(
    text: str | None,
    body: TextIO | None,
    system: str | None,
    completion: bool,
    model: str | None,
    parameter: tuple[str, ...],
    wait: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Put one job into the queue and print its id.

    TEXT is a chat turn, or with --completion a text to be continued. Example:

        mlx-rq submit "Name a colour" -p max_completion_tokens=20 --wait
    """
    fields = _read_body(body) if body else {}
    if completion and system is not None:
        raise click.UsageError("--system goes with a chat, not with --completion")
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
    job = submit_module.submit(fields, **options)
    if wait:
        _print_result(job.result(), as_json)
        return
    info = job.info()
    if as_json:
        print_json(info)
        return
    click.echo(job.id)
    if info["note"]:
        click.echo(f"note: {info['note']}", err=True)


@click.command()
@click.argument("job_id")
# Not from the environment, where that is how long a submitted job's attempt may take.
@option(
    "--timeout",
    envvar=None,
    type=float,
    default=None,
    help="Seconds to wait.",
    show_default="no limit",
)
@option("--no-wait", is_flag=True, help="Only look: exit 1 where there is no result yet.")
@json_option
@redis_option
def result(
    job_id: str, timeout: float | None, no_wait: bool, as_json: bool, redis_url: str | None
) -> None:
    """Wait for the answer of a job and print it: its text, or where it calls tools, the calls.

    With --json, the whole object.
    """
    job = fetch(job_id, redis_url=redis_url)
    _print_result(job.result(timeout=0 if no_wait else timeout), as_json)


def _print_result(response: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(response)
        return
    for answer in _answers(response):
        click.echo(answer)


def _answers(response: Mapping[str, Any]) -> Iterator[str]:
    """Gives the text of each choice, or the tool calls as JSON where it has no text."""
    for said in said_in(response):
        yield _text_or_calls(said.text, said.calls)


def _text_or_calls(text: str | None, calls: Any) -> str:
    return json.dumps(calls, ensure_ascii=False, indent=2) if calls and not text else text or ""


@click.command()
@click.argument("job_id", required=False)
@json_option
@redis_option
def status(job_id: str | None, as_json: bool, redis_url: str | None) -> None:
    """Show one job, or the queues and the workers."""
    if job_id is not None:
        info = fetch(job_id, redis_url=redis_url).info()
        if as_json:
            print_json(info)
        else:
            for name, value in info.items():
                if value is not None:
                    click.echo(f"{name + ':':12} {value}")
        return
    connection = connect(redis_url)
    with reachable(connection):
        state = overview(connection)
    if as_json:
        print_json(state)
    else:
        _print_overview(state)


def _print_overview(state: dict[str, Any]) -> None:
    # Names of models are anybody's: nothing in them is markup.
    console = Console(markup=False, emoji=False)
    queues = Table("model", "priority", "queued", "in progress", "completed", "failed", "cancelled")
    for queue in state["queues"]:
        queues.add_row(*(str(value) for value in queue.values()))
    console.print(queues if state["queues"] else "No queue yet: nothing was submitted.")
    workers = Table(
        *("worker", "model", "host", "batch", "waiting", "ended", "prompt tokens computed"),
        *("memory", "shared prefixes"),
    )
    for worker in state["workers"]:
        totals = worker["totals"]
        prompt = totals["prompt_tokens"]
        computed = f"{totals['prefilled_tokens']:,} of {prompt:,}"
        if distinct := totals.get("distinct_tokens"):
            computed += f", {totals['prefilled_tokens'] / distinct:.2f} x distinct"
        workers.add_row(
            worker["name"][:8],
            _loaded(worker),
            f"{worker['host']}:{worker['pid']}",
            f"{worker['running']}/{worker['capacity']}",
            str(worker["waiting"]),
            f"{worker['ended']:,}",
            computed,
            _memory(worker.get("memory") or {}),
            worker.get("prefix_sharing", ""),
        )
    console.print(
        workers if state["workers"] else "No live worker: start one with `mlx-rq worker`."
    )
    for line in limit_lines(state["limits"]):
        console.print(line, highlight=False)
    for note in state["notes"]:
        console.print(f"note: {note}", highlight=False)


def _memory(held: Mapping[str, int | None]) -> str:
    """Says how much of its memory a worker's MLX holds."""
    if held.get("active") is None:
        return ""
    said = f"{held['active'] / 1e9:.1f}"  # type: ignore[operator]
    ceiling = held.get("ceiling")
    return f"{said} GB" if ceiling is None else f"{said} of {ceiling / 1e9:.1f} GB"


def _loaded(worker: Mapping[str, Any]) -> str:
    """Names the model that a worker has loaded, or those that it could."""
    others = [model["id"] for model in worker["models"] if model["id"] != worker["model"]]
    if not any(model["state"] == "loaded" for model in worker["models"]) and worker["models"]:
        return f"none of {', '.join([worker['model'], *others])}"
    return f"{worker['model']} (or {', '.join(others)})" if others else str(worker["model"])


COMMANDS = (submit, result, status)
