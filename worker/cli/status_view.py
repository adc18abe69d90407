"""How the state of queues and workers looks on a terminal, in 80 columns."""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue.trace import Event
from mlx_rq.worker.cli.batch_progress import duration
from mlx_rq.worker.cli.queue import limit_lines

NO_WORKER = "No live worker: start one with `mlx-rq worker`."
_SHOWN_BYTES = 5e7
"""What holds less is nothing in GB with one digit."""
NO_QUEUE = "No queue yet: nothing was submitted."


def view(state: Mapping[str, Any], *, brief: bool = False) -> RenderableType:
    """Draws all of it (`mlx_rq.jobs.queue.status`); `brief`: two lines for each worker."""
    workers = worker_lines(state["workers"], brief=brief)
    return Group(
        *(workers if state["workers"] else [Text(NO_WORKER)]),
        queue_table(state["queues"]) if state["queues"] else Text(NO_QUEUE),
        *sharing_lines(state["sharing"]),
        *failure_lines(state["failures"]),
        *(line(text) for text in limit_lines(state["limits"])),
        *(line(f"note: {note}", cut=False) for note in state["notes"]),
    )


def plain(text: str) -> str:
    """Takes out of a text what would be an order to the terminal: names are anybody's."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def line(text: str, style: str = "", *, cut: bool = True) -> Text:
    """Makes one line of a text, in which nothing is markup; what is too long is cut off."""
    return Text(plain(text), style, no_wrap=cut, overflow="ellipsis" if cut else "fold")


def count(number: float) -> str:
    """Writes a number in few characters: 999, 12.3k, 4.56M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 10 * size or (size > 1e3 and number >= size):
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"


def worker_lines(workers: Sequence[Mapping[str, Any]], *, brief: bool) -> Iterator[Text]:
    """Says of each worker where it is, what it does, how fast, and why it waits."""
    for worker in workers:
        yield line(f"worker {worker['name'][:12]} · {loaded(worker)}", "bold")
        if brief:
            yield line("  " + " · ".join(_briefly(worker)), "yellow" if worker["paused"] else "")
            continue
        where = [f"{worker['host']}:{worker['pid']}", worker["chip"]]
        yield line("  on " + ", ".join(filter(None, where)))
        yield line("  " + " · ".join(_doing(worker)))
        yield line("  " + " · ".join(_speed(worker["rates"])))
        if held := memory(worker):
            yield line("  " + held)
        if worker["prefix_sharing"]:
            yield line(f"  prefixes {worker['prefix_sharing']}")
        if worker["drafting"]:
            yield line(f"  drafts {worker['drafting']}")
        if worker["paused"]:
            yield line(f"  takes no jobs: {worker['paused']}", "yellow")


def loaded(worker: Mapping[str, Any]) -> str:
    """Names the model that a worker has loaded, or those that it could."""
    others = [model["id"] for model in worker["models"] if model["id"] != worker["model"]]
    if not any(model["state"] == "loaded" for model in worker["models"]) and worker["models"]:
        return f"none of {', '.join([worker['model'], *others])}"
    return f"{worker['model']} (or {', '.join(others)})" if others else str(worker["model"])


def _doing(worker: Mapping[str, Any]) -> Iterator[str]:
    yield f"{worker['running']} of {counted(worker['capacity'], 'row runs', 'rows run')}"
    yield counted(worker["waiting"], "waits in it", "wait in it")
    yield f"{worker['ended']:,} ended"


def _briefly(worker: Mapping[str, Any]) -> Iterator[str]:
    if worker["paused"]:
        yield f"takes no jobs: {worker['paused']}"
    yield f"{worker['running']} of {worker['capacity']} rows"
    yield f"{worker['waiting']:,} wait"
    yield f"{count(worker['rates']['now']['generated_tokens'])} tokens/s"
    if worker["memory"]["active"] is not None:
        yield f"{worker['memory']['active'] / 1e9:.1f} GB"


def _speed(rates: Mapping[str, Any]) -> Iterator[str]:
    for name, what in (("generated_tokens", "out"), ("prompt_tokens", "in")):
        now, recent = rates["now"][name], rates["recent"][name]
        yield f"{what} {count(now)} tokens/s ({count(recent)} in 15 min)"


def memory(worker: Mapping[str, Any]) -> str:
    """Says how much of its memory a worker's MLX holds, and what for; empty where it does not."""
    held, totals = worker["memory"], worker["totals"]
    if held["active"] is None:
        return ""
    ceiling = held["ceiling"]
    said = f"{held['active'] / 1e9:.1f}"
    parts = [f"memory {said} GB" if ceiling is None else f"memory {said} of {ceiling / 1e9:.1f} GB"]
    weights, prefixes = held["weights"] or 0, totals["prefix_bytes"]
    rows = held["active"] - weights - prefixes if weights else 0
    sizes = {"weights": weights, "prefixes": prefixes, "rows": rows, "cache": held["cache"] or 0}
    parts += [f"{name} {size / 1e9:.1f}" for name, size in sizes.items() if size >= _SHOWN_BYTES]
    return " · ".join(parts)


def queue_table(queues: Sequence[Mapping[str, Any]]) -> Table:
    """Shows for each model and priority what waits, since when, and until when."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=False)
    table.add_column("queue", overflow="fold", min_width=8)  # the one that gives way
    table.add_column("prio", no_wrap=True)
    for name in ("wait", "active", "done", "failed", "cancelled", "oldest", "ETA"):
        table.add_column(name, justify="right", no_wrap=True)
    for queue in queues:
        priority = "normal" if queue["priority"] == "default" else queue["priority"]
        table.add_row(
            Text(plain(queue["model"])),
            Text(priority),
            *(
                count(queue[state])
                for state in ("queued", "in_progress", "completed", "failed", "cancelled")
            ),
            _span(queue["oldest_seconds"]),
            _span(queue["eta_seconds"]),
        )
    return table


def _span(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def sharing_lines(shared: Mapping[str, Any]) -> Iterator[Text]:
    """Says what was not computed because prompts begin alike; nothing before any was."""
    if shared["ratio"] is None:
        return
    saved, prompt = shared["saved_tokens"], shared["prompt_tokens"]
    yield line(
        f"sharing: {count(saved)} of {count(prompt)} prompt tokens saved "
        f"({saved / max(1, prompt):.0%}); computed {shared['ratio']:.2f} x distinct"
    )


def failure_lines(failures: Sequence[Mapping[str, Any]]) -> Iterator[Text]:
    """Tells the last failures, a line and the whole id for each."""
    if failures:
        yield line("last failures", "bold")
    for failure in failures:
        reason = failure["code"] or "error"
        yield line(f"  {failure['id']} {_ago(failure['ended_at'])} {reason}", "red")
        yield line(f"    {failure['message']}")


_RANDOM_NAME = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{20}\b")
"""A name that a worker was not given: its first characters are enough, and fit the line."""


def life_lines(events: Sequence[Event]) -> Iterator[str]:
    """Writes what happened to a job: when, how long after it was queued, and what."""
    for event in events:
        at = datetime.fromtimestamp(event.at).astimezone()
        after = f"{event.at - events[0].at:+9.3f} s"
        detail = _RANDOM_NAME.sub(r"\1", plain(event.text))
        yield f"{at:%H:%M:%S} {after}  {event.name:12} {detail}".rstrip()


def _ago(ended_at: str | None) -> str:
    if ended_at is None:
        return ""
    seconds = (datetime.now(UTC) - datetime.fromisoformat(ended_at)).total_seconds()
    return f"{duration(max(0.0, seconds))} ago"
