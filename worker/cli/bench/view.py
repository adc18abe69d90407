"""How a benchmark looks: on a terminal, in 80 columns, and as Markdown."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mlx_rq.jobs.openai.words import counted
from mlx_rq.worker.cli.bench.report import JobsPerHour, Kind, Report, Run, Sample, Work
from mlx_rq.worker.cli.status_view import count, line

_KINDS: tuple[Kind, ...] = ("decode", "prefill")

Rows = list[list[str]]
"""Of a table, with its heading first."""


def view(report: Report) -> RenderableType:
    """Draws all that was measured."""
    parts: list[RenderableType] = [line(title(report), "bold"), line(_versions(report))]
    if report.speeds:
        parts += ["", line("tokens/s", "bold"), _drawn(speed_rows(report))]
    parts += [line(text, cut=False) for text in batch_words(report)]
    if report.work is not None:
        parts += ["", line(report.work.source, "bold")]
        parts += [line(text, cut=False) for text in work_words(report.work)]
        parts += [line(text) for text in _prefix_words(report.work)]
    if report.sample is not None:
        parts += ["", line(sample_words(report.sample), cut=False), _drawn(run_rows(report.sample))]
    if report.jobs_per_hour is not None:
        parts += ["", line(rate_words(report.jobs_per_hour), cut=False)]
    parts += [line(f"note: {note}", cut=False) for note in report.notes]
    return Group(*parts)


def markdown(report: Report) -> str:
    """Writes the same as Markdown, but for the texts of prompts."""
    parts = [f"**{title(report)}**, {_versions(report)}"]
    if report.speeds:
        parts += ["Tokens a second:", _table(speed_rows(report))]
    parts += batch_words(report)
    if report.work is not None:
        parts += [f"**{report.work.source}**: {' '.join(work_words(report.work))}"]
    if report.sample is not None:
        parts += [sample_words(report.sample), _table(run_rows(report.sample))]
    if report.jobs_per_hour is not None:
        parts += [rate_words(report.jobs_per_hour)]
    parts += [f"Note: {note}." for note in report.notes]
    return "\n\n".join(parts) + "\n"


def title(report: Report) -> str:
    """Says what was measured, and where."""
    return f"{report.model} on {report.chip}"


def _versions(report: Report) -> str:
    return ", ".join(f"{name} {version}" for name, version in report.versions.items())


def speed_rows(report: Report) -> Rows:
    """Lists speeds: a line for each number of rows, a column for each kind and context."""
    columns = [
        (kind, context)
        for kind in _KINDS
        for context in sorted({one.context for one in report.speeds if one.kind == kind})
    ]
    rows = sorted({one.rows for one in report.speeds})
    heading = ["rows", *(f"{kind}\nat {count(context)}" for kind, context in columns)]
    return [
        heading,
        *(
            [str(number), *(_number(report.speed(kind, number, at)) for kind, at in columns)]
            for number in rows
        ),
    ]


def batch_words(report: Report) -> Iterator[str]:
    """Says what `--batch auto` goes by from now on."""
    if report.best_batch is not None:
        yield (
            f"Best batch: {counted(report.best_batch, 'row')}, the fewest with nearly the most "
            "tokens/s; --batch auto takes it."
        )


def work_words(work: Work) -> Iterator[str]:
    """Says what the prompts share."""
    refused = f" ({work.refused:,} more cannot be answered)" if work.refused else ""
    yield (
        f"{counted(work.jobs, 'job')}{refused}: {count(work.prompt_tokens)} prompt tokens, of "
        f"which {count(work.computed_tokens)} are computed "
        f"({work.prompt_tokens / max(1, work.computed_tokens):.1f} x fewer; "
        f"{count(work.distinct_tokens)} are distinct)."
    )
    if work.left_out:
        yield f"The {work.left_out:,} after those are taken to be like them."
    if work.duplicates:
        yield f"Duplicates among them: {work.duplicates:,}, answered by what others are answered."


def _prefix_words(work: Work) -> Iterator[str]:
    for prefix in work.prefixes:
        begins = " ".join(prefix.begins.split())
        yield f"  {count(prefix.tokens)} tokens x {prefix.prompts:,}: {begins}"


def sample_words(sample: Sample) -> str:
    """Says what was tried."""
    cut = f", {sample.cut:,} of them cut off" if sample.cut else ""
    return (
        f"Tried: {sample.jobs:,} of them, {count(sample.prompt_tokens)} prompt tokens, answers of "
        f"at most {sample.answer_limit:,} tokens{cut}."
    )


def run_rows(sample: Sample) -> Rows:
    """Lists what each way took, and how many times as long as the first."""
    least = sample.runs[0].seconds
    return [
        ["way", "seconds", "prompt tokens computed", "takes"],
        *([*_run_words(run), f"{run.seconds / least:.2f} x"] for run in sample.runs),
    ]


def _run_words(run: Run) -> Sequence[str]:
    computed = "?" if run.computed_tokens is None else f"{run.computed_tokens:,}"
    return run.way, f"{run.seconds:.1f}", computed


def rate_words(rate: JobsPerHour) -> str:
    """Says how many jobs an hour are to be expected, and how that is known."""
    return (
        f"About {_rough(rate.shared)} jobs an hour; {_rough(rate.unshared)} if nothing were "
        "shared. Estimated for all jobs by the plan of their prompts, with the sample's speeds "
        "and answers."
    )


def _rough(number: float) -> str:
    return count(float(f"{number:.2g}"))


def _number(speed: float | None) -> str:
    return "" if speed is None else count(speed) if speed >= 10 else f"{speed:.1f}"


def _drawn(rows: Rows) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for place, name in enumerate(rows[0]):
        text = place == 0 and name != "rows"
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _table(rows: Rows) -> str:
    lines = [rows[0], ["---", *("---:" for _ in rows[0][1:])], *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |".replace("\n", " ") for cells in lines)
