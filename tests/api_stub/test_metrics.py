"""What Prometheus reads: every count under its name, whatever the labels hold."""

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from mlx_rq.api_stub.metrics import Requests, exposition


def test_metrics_are_read_as_they_were_counted() -> None:
    requests = Requests()
    requests.waiting = 3
    for status in (200, 200, 404):
        requests.count({"method": "GET", "type": "http"}, status)
    totals = ("tasks", "prompt_tokens", "prefilled_tokens", "decoded_tokens")
    worker: dict[str, Any] = {
        "name": 'a "b"\n\\',
        "model": "é",
        "models": [],
        "running": 1,
        "waiting": 2,
        "capacity": 8,
        "memory": {"active": 11, "cache": 0, "peak": 33, "ceiling": None, "weights": 9},
    }
    worker["totals"] = {
        **dict.fromkeys(totals, 123_456_789),
        "distinct_tokens": 77,
        "prefill_seconds": 0.25,
        "decode_seconds": 1e-7,
    }
    states = ("queued", "in_progress", "completed", "failed", "cancelled")
    queue: dict[str, Any] = {
        "model": "é",
        "priority": "high",
        **{s: n for n, s in enumerate(states)},
    }
    text = exposition({"queues": [queue], "workers": [worker]}, requests).decode()
    read = {
        (family.type, sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    of_worker = (("model", "é"), ("worker", worker["name"]))
    path = (("method", "GET"), ("path", "other"))
    assert read == {
        ("counter", "mlx_rq_http_requests_total", *path, ("status", "200")): 2,
        ("counter", "mlx_rq_http_requests_total", *path, ("status", "404")): 1,
        ("gauge", "mlx_rq_http_waiting"): 3,
        **{
            ("gauge", "mlx_rq_jobs", ("model", "é"), ("priority", "high"), ("status", s)): n
            for n, s in enumerate(states)
        },
        ("gauge", "mlx_rq_workers"): 1,
        ("gauge", "mlx_rq_worker_running", *of_worker): 1,
        ("gauge", "mlx_rq_worker_waiting", *of_worker): 2,
        ("gauge", "mlx_rq_worker_capacity", *of_worker): 8,
        ("gauge", "mlx_rq_worker_distinct_tokens", *of_worker): 77,
        ("gauge", "mlx_rq_worker_memory_active_bytes", *of_worker): 11,
        ("gauge", "mlx_rq_worker_memory_cache_bytes", *of_worker): 0,
        ("gauge", "mlx_rq_worker_memory_peak_bytes", *of_worker): 33,
        ("gauge", "mlx_rq_worker_memory_weights_bytes", *of_worker): 9,
        **{("counter", f"mlx_rq_worker_{name}_total", *of_worker): 123_456_789 for name in totals},
        ("counter", "mlx_rq_worker_prefill_seconds_total", *of_worker): 0.25,
        ("counter", "mlx_rq_worker_decode_seconds_total", *of_worker): 1e-7,
    }
