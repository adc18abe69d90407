"""The places of this machine that a worker and a server need: disks, the data folder, ports."""

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from mlx_rq.files import lock
from mlx_rq.jobs.queue.discovery import (
    FOLDER,
    LOCK_FILE,
    default_data_dir,
    is_running,
)
from mlx_rq.worker.cli.completion import cached_models, hub_cache
from mlx_rq.worker.cli.doctor.finding import Finding, Fix, gigabytes
from mlx_rq.worker.cli.doctor.ports import port_findings
from mlx_rq.worker.cli.valkey import PID_FILE

_LITTLE = {"models": 20e9, "data": 2e9}
"""Free bytes below which it may not last."""


def place_findings() -> Iterator[Finding]:
    """Says what is free on the disks, and who answers on the usual ports."""
    count = len(cached_models())
    models = f"{count} in the hub's cache, {hub_cache()}"
    yield disk_finding("models", models, shutil.disk_usage(_existing(hub_cache())).free)
    yield from data_findings(default_data_dir())
    yield from port_findings(default_data_dir())


def data_findings(data: Path) -> Iterator[Finding]:
    """Looks at the data folder, and at what a queue left in it that was killed."""
    free = shutil.disk_usage(_existing(data)).free
    if not data.exists():
        make = Fix(
            f"mkdir -p -m 700 {shlex.quote(str(data))}",
            lambda: data.mkdir(mode=0o700, parents=True, exist_ok=True),
        )
        said = f"{data}, which the first start makes"
        yield disk_finding("data", said, free)._replace(fix=make)
    elif (why_not := _unusable(data)) is not None:
        yield why_not
    else:
        yield disk_finding("data", str(data), free)
        yield from _left_over(data / FOLDER)


def _unusable(data: Path) -> Finding | None:
    """Says that the data folder cannot be used, and why; None where it can."""
    if not data.is_dir():
        advice = "Move it away, or name a folder in MLX_RQ_DATA_DIR."
        return Finding("data", "error", f"{data} is no folder", advice)
    seen, text = data.stat(), f"you may not write to {data}"
    if seen.st_uid != os.getuid():
        if os.access(data, os.R_OK | os.W_OK | os.X_OK):
            return None
        advice = "It is another user's: name a folder of yours in MLX_RQ_DATA_DIR."
        return Finding("data", "error", text, advice)
    if seen.st_mode & 0o700 == 0o700:
        return None
    command, mode = f"chmod u+rwx {shlex.quote(str(data))}", seen.st_mode & 0o7777 | 0o700
    return Finding("data", "error", text, command, Fix(command, lambda: data.chmod(mode)))


def _left_over(folder: Path) -> Iterator[Finding]:
    """Finds the pid of a queue that was killed, by which somebody may end another process."""
    pid = folder / PID_FILE
    if not pid.exists() or is_running(folder):
        return
    number = pid.read_text(errors="replace").strip()
    text = f"a queue was killed here: {pid} names its process, {number}, which has ended"
    advice = "Nothing that was accepted is lost: the next start goes on."
    does = f"rm {shlex.quote(str(pid))}"
    yield Finding("queue", "warning", text, advice, Fix(does, lambda: _remove(pid)))


def _remove(pid: Path) -> None:
    """Removes a pid file, unless a queue has been started meanwhile, whose it is then."""
    with (pid.parent / LOCK_FILE).open("ab") as file:
        if lock(file):
            pid.unlink(missing_ok=True)


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
