"""The command `doctor`."""

import sys
from collections.abc import Iterator

import click
from rich.console import Console
from rich.table import Table

from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.connection import connect
from mlx_rq.worker.cli.common import json_option, needs_extra, option, print_json, redis_option
from mlx_rq.worker.cli.completion import complete_model
from mlx_rq.worker.cli.doctor.finding import Finding, Level
from mlx_rq.worker.cli.doctor.machine import machine_findings, this_machine, try_mlx
from mlx_rq.worker.cli.doctor.model import model_findings
from mlx_rq.worker.cli.doctor.places import place_findings
from mlx_rq.worker.cli.doctor.queue import queue_findings, worker_findings

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "bold red"),
}


@click.command()
# Not from the environment, where that is the model of a worker, which may be large.
@option(
    "--model",
    envvar=None,
    default=None,
    shell_complete=complete_model,
    help="Load this model, too, and say whether it batches and shares prefixes.",
)
@option("--trust-remote-code", envvar=None, is_flag=True, help="Run code that comes with it.")
@option("--job/--no-job", default=True, help="Have a worker answer one short job.")
@option(
    "--timeout",
    envvar=None,
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="Seconds to wait for that.",
)
@json_option
@redis_option
def doctor(
    model: str | None,
    trust_remote_code: bool,
    job: bool,
    timeout: float,
    as_json: bool,
    redis_url: str | None,
) -> None:
    """Look at machine, queue and workers, and say what to do.

    Exits with 0 where nothing is wrong, warnings or not; with 1 where something is.
    """
    if model is not None:
        with needs_extra("worker"):
            import mlx_lm  # noqa: F401 (found missing here)
    found = _look(model, trust_remote_code, timeout if job else None, redis_url)
    findings = list(found) if as_json else list(_printed(found))
    wrong = any(finding.level == "error" for finding in findings)
    if as_json:
        print_json({"ok": not wrong, "findings": [finding._asdict() for finding in findings]})
    sys.exit(1 if wrong else 0)


def _look(
    model: str | None, trust_remote_code: bool, seconds: float | None, redis_url: str | None
) -> Iterator[Finding]:
    yield from machine_findings(this_machine(), try_mlx())
    yield from place_findings()
    if model is not None:
        yield from model_findings(model, trust_remote_code=trust_remote_code)
    connection = connect(redis_url)
    try:
        yield from queue_findings(connection)
        yield from worker_findings(connection, redis_url, seconds)
    except RedisUnavailable as error:
        yield Finding("queue", "error", str(error))


def _printed(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Prints each as it comes: some take a while."""
    console = Console(markup=False, emoji=False, highlight=False)
    for finding in findings:
        mark, style = _MARKS[finding.level]
        table = Table.grid(padding=(0, 1))
        table.add_column(width=7, style=style)
        table.add_column(width=11)
        table.add_column(overflow="fold")
        table.add_row(mark, finding.area, finding.text)
        if finding.advice:
            table.add_row("", "", f"→ {finding.advice}")
        console.print(table)
        yield finding


COMMANDS = (doctor,)
