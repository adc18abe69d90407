"""What the server, the queues and the workers count, as Prometheus reads it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from starlette.types import Scope

Sample = tuple[dict[str, str], float]


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
            yield {"method": method, "path": path, "status": str(status)}, count


def exposition(overview: Mapping[str, Any], requests: Requests) -> bytes:
    """Writes all counts in Prometheus' text format."""
    return generate_latest(_Counts(overview, requests))


class _Counts(Collector):
    """The counts of one moment; none is kept in the process."""

    def __init__(self, overview: Mapping[str, Any], requests: Requests) -> None:
        self._queues, self._workers = overview["queues"], overview["workers"]
        self._requests = requests

    def collect(self) -> Iterator[Metric]:
        requests, workers = self._requests, self._workers
        yield _counter("mlx_rq_http_requests", "Requests answered.", requests.samples())
        yield _gauge(
            "mlx_rq_http_waiting", "Clients that wait for a job.", [({}, requests.waiting)]
        )
        yield _gauge("mlx_rq_jobs", "Jobs that Redis holds.", self._jobs())
        yield _gauge("mlx_rq_workers", "Live workers.", [({}, len(workers))])
        for name, help_text in (
            ("running", "Jobs that decode."),
            ("waiting", "Jobs claimed that do not decode yet."),
            ("capacity", "Sequences that decode together at most."),
        ):
            samples = ((_labels(worker), worker[name]) for worker in workers)
            yield _gauge(f"mlx_rq_worker_{name}", help_text, samples)
        # An estimate where they are many: it may go back a little.
        distinct = ((_labels(worker), worker["totals"]["distinct_tokens"]) for worker in workers)
        yield _gauge(
            "mlx_rq_worker_distinct_tokens", "Distinct tokens of all its prompts.", distinct
        )
        for name, help_text in (
            ("active", "Bytes that MLX holds in arrays."),
            ("cache", "Bytes of free buffers that MLX keeps."),
            ("peak", "Bytes that MLX held in arrays at most."),
            ("ceiling", "Bytes that MLX may hold."),
            ("weights", "Bytes of the model's weights, of those that MLX holds."),
        ):
            samples = (
                (_labels(worker), held)
                for worker in workers
                if (held := worker.get("memory", {}).get(name)) is not None
            )
            yield _gauge(f"mlx_rq_worker_memory_{name}_bytes", help_text, samples)
        for name, help_text in (
            ("tasks", "Jobs taken."),
            ("prompt_tokens", "Tokens of all prompts."),
            ("prefilled_tokens", "Prompt tokens computed."),
            ("decoded_tokens", "Tokens generated."),
            ("prefill_seconds", "Seconds spent on prompts."),
            ("decode_seconds", "Seconds spent on generation."),
        ):
            samples = ((_labels(worker), worker["totals"][name]) for worker in workers)
            yield _counter(f"mlx_rq_worker_{name}", help_text, samples)

    def _jobs(self) -> Iterator[Sample]:
        for queue in self._queues:
            for state in ("queued", "in_progress", "completed", "failed", "cancelled"):
                labels = {"model": queue["model"], "priority": queue["priority"], "status": state}
                yield labels, queue[state]


def _labels(worker: Mapping[str, Any]) -> dict[str, str]:
    # All that it may load: a label that changed with what is loaded would begin another series.
    models = " ".join(model["id"] for model in worker["models"])
    return {"worker": worker["name"], "model": models or worker["model"]}


def _gauge(name: str, help_text: str, samples: Iterable[Sample]) -> Metric:
    return _filled(Metric(name, help_text, "gauge"), name, samples)


def _counter(name: str, help_text: str, samples: Iterable[Sample]) -> Metric:
    return _filled(Metric(name, help_text, "counter"), f"{name}_total", samples)


def _filled(metric: Metric, name: str, samples: Iterable[Sample]) -> Metric:
    for labels, value in samples:
        metric.add_sample(name, labels, value)
    return metric
