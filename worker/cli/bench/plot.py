"""Draws a benchmark: speeds by rows, and what each way takes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlx_rq.jobs.openai.words import counted
from mlx_rq.worker.cli.bench.report import Report, Sample


def plot(report: Report, file: Path) -> None:
    """Writes a picture, in the form that the file's ending names."""
    from matplotlib.figure import Figure  # the extra `plot`

    panels = 2 if report.sample is None else 3
    figure = Figure(figsize=(4.5 * panels, 4), layout="constrained", dpi=120)
    decode, prefill, *ways = figure.subplots(1, panels)
    _decode(decode, report)
    _prefill(prefill, report)
    if report.sample is not None:
        _ways(ways[0], report.sample)
    figure.suptitle(f"{report.model} on {report.chip}")
    figure.savefig(file)


def _decode(axes: Any, report: Report) -> None:
    """Draws a line for each context, over the rows."""
    speeds = [one for one in report.speeds if one.kind == "decode"]
    for context in sorted({one.context for one in speeds}):
        points = {one.rows: one.tokens_per_second for one in speeds if one.context == context}
        _line(axes, points, f"{context:,} tokens of context")
    if report.best_batch is not None:
        axes.axvline(report.best_batch, color="grey", linewidth=0.8, linestyle=":")
        axes.set_title(f"best batch: {counted(report.best_batch, 'row')}", fontsize="medium")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda rows, _: f"{rows:g}")
    _labelled(axes, "rows", "decoded tokens/s of all rows together")


def _prefill(axes: Any, report: Report) -> None:
    """Draws a line for each number of rows, over the context."""
    speeds = [one for one in report.speeds if one.kind == "prefill"]
    for rows in sorted({one.rows for one in speeds}):
        points = {one.context: one.tokens_per_second for one in speeds if one.rows == rows}
        _line(axes, points, counted(rows, "row"))
    _labelled(axes, "tokens of context", "prefilled tokens/s of all rows together")


def _line(axes: Any, points: Mapping[int, float], label: str) -> None:
    places = sorted(points)
    axes.plot(places, [points[place] for place in places], "o-", label=label)


def _labelled(axes: Any, below: str, beside: str) -> None:
    axes.set_ylim(bottom=0)
    axes.set_xlabel(below)
    axes.set_ylabel(beside)
    if axes.lines:
        axes.legend(fontsize="small")


def _ways(axes: Any, sample: Sample) -> None:
    runs = sample.runs[::-1]
    bars = axes.barh([run.way.replace(", ", ",\n") for run in runs], [run.seconds for run in runs])
    axes.bar_label(bars, fmt="%.1f s", padding=3)
    axes.margins(x=0.2)
    axes.set_xlabel(f"seconds for {sample.jobs} jobs")
