"""The command `doctor`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.connection import connect, resolve_url
from mlx_rq.jobs.queue.discovery import default_data_dir, embedded_url
from mlx_rq.worker.cli.common import (
    CONFIGURATION,
    json_option,
    needs_extra,
    option,
    print_json,
    redis_option,
)
from mlx_rq.worker.cli.completion import complete_model
from mlx_rq.worker.cli.doctor.finding import Finding, Level
from mlx_rq.worker.cli.doctor.machine import machine_findings, this_machine, try_mlx
from mlx_rq.worker.cli.doctor.model import model_findings
from mlx_rq.worker.cli.doctor.places import place_findings
from mlx_rq.worker.cli.doctor.private import private_findings
from mlx_rq.worker.cli.doctor.queue import queue_findings, worker_findings
from mlx_rq.worker.cli.doctor.services import service_findings
from mlx_rq.worker.cli.value_types import Duration

_MARKS: dict[Level, tuple[str, str]] = {
    "ok": ("ok", "green"),
    "warning": ("warning", "yellow"),
    "error": ("ERROR", "bold red"),
}

_SECRET_FILES = ("api-key-file", "webhook-secret-file")
"""Options that name files with keys."""


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
    type=Duration(0.1),
    default=60.0,
    help="How long to wait for that: seconds, or as in 10m.",
)
@click.option(
    "--fix", is_flag=True, help="Do what is safe: rights, leftovers, the embedded queue's settings."
)
@json_option
@redis_option
@click.pass_context
def doctor(
    context: click.Context,
    model: str | None,
    trust_remote_code: bool,
    job: bool,
    timeout: float,
    fix: bool,
    as_json: bool,
    redis_url: str | None,
) -> None:
    """Look at machine, queue and workers, and say what to do; with --fix, do some of it.

    Nothing is deleted or ended that anybody still has. Exits with 0 where nothing is (still)
    wrong, warnings or not; with 1 where something is.
    """
    if model is not None:
        with needs_extra("worker"):
            import mlx_lm  # noqa: F401 (found missing here)
    secret_files = _secret_files(context)
    found = _look(model, trust_remote_code, timeout if job else None, redis_url, secret_files)
    seen = [(finding, _treated(finding, fix=fix, aloud=not as_json)) for finding in found]
    wrong = any(finding.level == "error" and not fixed for finding, fixed in seen)
    if as_json:
        findings = [{**finding.as_json(), "fixed": fixed} for finding, fixed in seen]
        print_json({"ok": not wrong, "findings": findings})
    sys.exit(1 if wrong else 0)


def _secret_files(context: click.Context) -> list[Path]:
    """Names the files with keys that configuration files and the environment name."""
    told = [one.value for one in context.meta[CONFIGURATION].settings if one.key in _SECRET_FILES]
    told += [os.environ.get(f"MLX_RQ_{key.replace('-', '_').upper()}") for key in _SECRET_FILES]
    return [Path(path) for path in told if path]


def _look(
    model: str | None,
    trust_remote_code: bool,
    seconds: float | None,
    redis_url: str | None,
    secret_files: list[Path],
) -> Iterator[Finding]:
    yield from machine_findings(this_machine(), try_mlx())
    yield from place_findings()
    yield from private_findings(default_data_dir(), secret_files)
    yield from service_findings()
    if model is not None:
        yield from model_findings(model, trust_remote_code=trust_remote_code)
    connection = connect(redis_url)
    try:
        yield from queue_findings(connection, ours=resolve_url(redis_url) == embedded_url())
        yield from worker_findings(connection, redis_url, seconds)
    except RedisUnavailable as error:
        yield Finding("queue", "error", str(error))


def _treated(finding: Finding, *, fix: bool, aloud: bool) -> bool | None:
    """Prints a finding as it comes, since some take a while, and mends it where that is asked.

    Tells whether it is mended; None where nothing was tried.
    """
    if aloud:
        offered = finding.fix is not None and finding.level != "ok" and not fix
        hint = "`mlx-rq doctor --fix` does it" if offered else None
        _print(*_MARKS[finding.level], finding.area, finding.text, finding.advice, hint)
    if not fix or finding.fix is None:
        return None
    if aloud:
        _print("fix", "cyan", finding.area, finding.fix.does)
    try:
        finding.fix.do()
    except (OSError, RedisError) as error:
        if aloud:
            _print(*_MARKS["error"], finding.area, f"it could not be done: {error}")
        return False
    if aloud:
        _print("fixed", "green", finding.area, "it is done")
    return True


def _print(mark: str, style: str, area: str, text: str, *advice: str | None) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=7, style=style)
    table.add_column(width=11)
    table.add_column(overflow="fold")
    table.add_row(mark, area, text)
    for words in filter(None, advice):
        table.add_row("", "", f"→ {words}")
    Console(markup=False, emoji=False, highlight=False).print(table)


COMMANDS = (doctor,)
