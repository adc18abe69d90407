"""The places of this machine that a worker and a server need: disks and ports."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from mlx_rq.jobs.queue.discovery import default_data_dir, embedded_url
from mlx_rq.worker.cli.completion import cached_models, hub_cache
from mlx_rq.worker.cli.doctor.finding import Finding, gigabytes
from mlx_rq.worker.cli.ports import DEFAULT_HTTP_PORT, is_answered
from mlx_rq.worker.cli.valkey import DEFAULT_PORT

_LITTLE = {"models": 20e9, "data": 2e9}
"""Free bytes below which it may not last."""


def place_findings() -> Iterator[Finding]:
    """Says what is free on the disks, and who answers on the usual ports."""
    count = len(cached_models())
    models = f"{count} in the hub's cache, {hub_cache()}"
    yield disk_finding("models", models, shutil.disk_usage(_existing(hub_cache())).free)
    data = default_data_dir()
    yield disk_finding("data", str(data), shutil.disk_usage(_existing(data)).free)
    ours = embedded_url() or ""
    for port, option in ((DEFAULT_HTTP_PORT, "--port"), (DEFAULT_PORT, "--queue-port")):
        if not is_answered(port):
            yield Finding("port", "ok", f"{port} is free")
        elif ours.endswith(f":{port}/0"):
            yield Finding("port", "ok", f"{port} is the embedded queue's")
        else:
            advice = f"Where it is not mlx-rq's: mlx-rq up {option} ANOTHER"
            yield Finding("port", "ok", f"{port} is taken", advice)


def disk_finding(area: str, what: str, free: int) -> Finding:
    """Judges how much of a disk is free."""
    said = f"{what}; {gigabytes(free)} free"
    if free < _LITTLE[area]:
        return Finding(area, "warning", said, "Make room: a full disk stops the queue.")
    return Finding(area, "ok", said)


def _existing(path: Path) -> Path:
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
