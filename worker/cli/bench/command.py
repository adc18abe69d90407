"""The command `bench`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from mlx_rq.worker.cli.bench.report import Report, Run
from mlx_rq.worker.cli.bench.view import markdown, view
from mlx_rq.worker.cli.common import (
    data_folder,
    json_option,
    needs_extra,
    option,
    print_json,
    when_interrupted,
)
from mlx_rq.worker.cli.completion import complete_model
from mlx_rq.worker.cli.model import ensure_model
from mlx_rq.worker.cli.models import DEMO_MODEL
from mlx_rq.worker.cli.value_types import WholeNumber
from mlx_rq.worker.cli.worker_options import data_dir_option

if TYPE_CHECKING:
    from mlx_rq.engine.models.device import MLXDevice
    from mlx_rq.engine.models.load import LoadedModel
    from mlx_rq.worker.cli.bench.sample import Chosen
    from mlx_rq.worker.cli.bench.speeds import Say

_SECONDS = (25.0, 60.0)
"""For the speeds beside those that `--batch auto` goes by, and for the sample."""

_QUICK_SECONDS = (5.0, 15.0)


@click.command()
@click.argument("model", default=DEMO_MODEL, shell_complete=complete_model)
@option(
    "--file",
    envvar=None,
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="A batch file: what its jobs share, and how long they take.",
    show_default="made-up jobs",
)
@option("--quick", envvar=None, is_flag=True, help="Measure less: a third of the time.")
@option("--peers", envvar=None, is_flag=True, help="Try mlx-lm's batch_generate and server, too.")
@option(
    "--answer-tokens",
    envvar=None,
    type=WholeNumber(1),
    default=64,
    help="The most tokens of an answer in the sample: as long as yours are.",
)
@option(
    "--plot",
    envvar=None,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Draw it, too: a .png, .svg or .pdf.",
)
@option("--markdown", "as_markdown", envvar=None, is_flag=True, help="Print Markdown.")
@option("--trust-remote-code", envvar=None, is_flag=True, help="Run code that comes with it.")
@data_dir_option("Where what --batch auto goes by is kept.")
@json_option
def bench(
    model: str,
    file: Path | None,
    quick: bool,
    peers: bool,
    answer_tokens: int,
    plot: Path | None,
    as_markdown: bool,
    trust_remote_code: bool,
    data_dir: Path | None,
    as_json: bool,
) -> None:
    """Measure MODEL on this machine, and what sharing gains on your own FILE.

    It takes a minute or two, in which nothing else should compute. What --batch auto goes by is
    measured afresh. Ctrl-C ends it with what was measured so far.
    """
    with needs_extra("worker"):
        from mlx_rq.engine.models.device import MLXDevice
        from mlx_rq.engine.models.load import load
    if plot is not None:
        _check_plot(plot)
    folder = data_folder(data_dir)
    ensure_model(model)
    device = MLXDevice()
    device.limit()
    loaded = load(model, trust_remote_code=trust_remote_code)
    device.wire(None, loaded.model)
    versions = {name: version(name) for name in ("mlx-rq", "mlx", "mlx-lm")}
    report = Report(loaded.model_id, device.name, versions)
    started = time.monotonic()
    try:
        with _saying() as say:
            _measure(report, loaded, device, folder, file, answer_tokens, quick, peers, say)
        report.complete = True
    except KeyboardInterrupt:
        when_interrupted("Stopped: that is what was measured so far.")
        raise
    finally:
        report.seconds = round(time.monotonic() - started, 1)
        if report.complete or report.speeds:
            _show(report, as_json=as_json, as_markdown=as_markdown)
        if report.complete and plot is not None:
            _draw(report, plot)


def _measure(
    report: Report,
    model: "LoadedModel",
    device: "MLXDevice",
    folder: Path,
    file: Path | None,
    answer_tokens: int,
    quick: bool,
    peers: bool,
    say: "Say",
) -> None:
    from mlx_rq.engine.kv.trial import Batching, verdict_on
    from mlx_rq.worker.cli.bench.sample import choose, run_sample
    from mlx_rq.worker.cli.bench.speeds import measure_batch, measure_others
    from mlx_rq.worker.cli.bench.work import read_work

    for_speeds, for_sample = _QUICK_SECONDS if quick else _SECONDS
    verdict = verdict_on(model.model)
    say("the jobs")
    report.work, jobs = read_work(file, model)
    measure_batch(report, model, folder, device, say)
    if verdict.batching is Batching.ALONE:
        report.best_batch = 1
        report.notes.append(f"{report.model} generates one sequence at a time: {verdict.why}")
    until = time.monotonic() + for_speeds
    measure_others(report, model, device, say, until, time.monotonic)
    chosen = choose(jobs, report, answer_limit=answer_tokens, seconds=for_sample)
    if not chosen.jobs:
        report.notes.append(
            f"no jobs were tried: at these speeds not even a few end within {for_sample:.0f} s"
        )
        return
    run_sample(chosen, report, model, device, say)
    if peers:
        _run_peers(report, chosen, model, say)


def _run_peers(report: Report, chosen: "Chosen", model: "LoadedModel", say: "Say") -> None:
    from mlx_rq.worker.cli.bench.peers import (
        BATCH_GENERATE,
        SERVER,
        Prompt,
        run_batch_generate,
        run_server,
    )

    rows = report.best_batch or 1
    prompts = [
        Prompt(tokens, budget)
        for job, budget in zip(chosen.jobs, chosen.budgets, strict=True)
        for tokens in job.prompts
    ]
    say(BATCH_GENERATE)
    seconds, _ = run_batch_generate(model, prompts, rows=rows)
    _add_run(report, Run(BATCH_GENERATE, seconds))
    say(SERVER)
    texts = [Prompt(model.tokenizer.decode(tokens), budget) for tokens, budget in prompts]
    _add_run(report, Run(SERVER, run_server(model.path, texts, rows=rows)))
    report.notes.append("the peers answer greedily, and heed no schema")


def _add_run(report: Report, run: Run) -> None:
    if report.sample is not None:
        report.sample = replace(report.sample, runs=(*report.sample.runs, run))


def _check_plot(file: Path) -> None:
    """Raises ClickException where no picture could be written in the end."""
    with needs_extra("plot"):
        from matplotlib.backend_bases import FigureCanvasBase
    kinds = FigureCanvasBase.get_supported_filetypes()
    if file.suffix.removeprefix(".") not in kinds:
        raise click.ClickException(f"--plot {file}: its ending must be one of {', '.join(kinds)}")
    if not file.parent.is_dir():
        raise click.ClickException(f"--plot {file}: there is no folder {file.parent}")


def _draw(report: Report, file: Path) -> None:
    from mlx_rq.worker.cli.bench.plot import plot

    plot(report, file)
    click.echo(f"drawn: {file}", err=True)


@contextmanager
def _saying() -> Iterator["Say"]:
    """Shows on standard error what is being measured: one line on a terminal, else a line each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: click.echo(f"measuring: {what}", err=True)
        return
    with console.status("") as status:
        yield lambda what: status.update(what)


def _show(report: Report, *, as_json: bool, as_markdown: bool) -> None:
    if as_json:
        print_json(report.as_json())
    elif as_markdown:
        click.echo(markdown(report), nl=False)
    else:
        Console(highlight=False).print(view(report))


COMMANDS = (bench,)
