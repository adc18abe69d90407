"""What the server, the queues and the workers count, as Prometheus reads it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from starlette.types import Scope

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[Mapping[str, Any], float]


class Requests:
    """Counts the requests that were answered, by endpoint and status."""

    def __init__(self) -> None:
        self._answered: Counter[tuple[str, str, int]] = Counter()
        self.waiting = 0
        """Clients that wait for the end of a job at this moment."""

    def count(self, scope: Scope, status: int) -> None:
        """Counts an answer (status 0: the client was gone). Unknown paths count as one."""
        route = scope.get("route")
        path = getattr(route, "path", "other")
        self._answered[scope["method"], path, status] += 1

    def samples(self) -> Iterator[Sample]:
        for (method, path, status), count in sorted(self._answered.items()):
            yield {"method": method, "path": path, "status": status}, count


def exposition(overview: Mapping[str, Any], requests: Requests) -> str:
    """Writes all counts in Prometheus' text format."""
    queues, workers = overview["queues"], overview["workers"]
    lines: list[str] = []
    lines += _family(
        "mlx_rq_http_requests_total", "counter", "Requests answered.", requests.samples()
    )
    lines += _family(
        "mlx_rq_http_waiting", "gauge", "Clients that wait for a job.", [({}, requests.waiting)]
    )
    states = ("queued", "in_progress", "completed", "failed", "cancelled")
    lines += _family(
        "mlx_rq_jobs",
        "gauge",
        "Jobs that Redis holds.",
        (
            ({"model": q["model"], "priority": q["priority"], "status": state}, q[state])
            for q in queues
            for state in states
        ),
    )
    lines += _family("mlx_rq_workers", "gauge", "Live workers.", [({}, len(workers))])
    for name, kind, help_text in (
        ("running", "gauge", "Jobs that decode."),
        ("waiting", "gauge", "Jobs claimed that do not decode yet."),
        ("capacity", "gauge", "Rows that decode together at most."),
    ):
        samples = ((_labels(worker), worker[name]) for worker in workers)
        lines += _family(f"mlx_rq_worker_{name}", kind, help_text, samples)
    for name, help_text in (
        ("tasks", "Jobs taken."),
        ("prompt_tokens", "Tokens of all prompts."),
        ("prefilled_tokens", "Prompt tokens computed."),
        ("decoded_tokens", "Tokens generated."),
        ("prefill_seconds", "Seconds spent on prompts."),
        ("decode_seconds", "Seconds spent on generation."),
    ):
        samples = ((_labels(worker), worker["totals"][name]) for worker in workers)
        lines += _family(f"mlx_rq_worker_{name}_total", "counter", help_text, samples)
    return "\n".join(lines) + "\n"


def _labels(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"worker": worker["name"], "model": worker["model"]}


def _family(name: str, kind: str, help_text: str, samples: Iterable[Sample]) -> Iterator[str]:
    yield f"# HELP {name} {help_text}"
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        inside = ",".join(f'{label}="{_escape(str(text))}"' for label, text in labels.items())
        yield f"{name}{{{inside}}} {value}" if inside else f"{name} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
