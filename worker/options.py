"""What a worker may be told about how it works."""

from dataclasses import dataclass
from pathlib import Path

from mlx_rq.engine.options import EngineOptions


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker works.

    Up to `window` jobs are claimed and planned together, and so many that their prompts come to
    about `window_tokens`; leases last `lease` seconds; after a stop
    signal, `grace` seconds are left to finish what runs; after `stall` seconds without progress
    leases are renewed no more; a job that waited `max_wait` seconds is taken even where another
    worker has its prefix. `burst` ends when the queues are empty, `max_jobs` after so many jobs.
    A model that had nothing to do for `unload_after` seconds is unloaded, until there is a job.
    `spool` is a folder for answers that Redis does not take, `loading` one for notes of models that
    are being loaded. By `machine` (`leases/machine.py`)
    others here tell that the worker died. With `check`, the worker is checked when it is idle and
    now and then, and ends where it has lost track of something.
    """

    window: int = 1024
    window_tokens: int = 1_000_000
    lease: int = 60
    grace: float = 30.0
    stall: float = 300.0
    max_wait: float = EngineOptions().max_wait
    unload_after: float | None = None
    burst: bool = False
    max_jobs: int | None = None
    spool: Path | None = None
    loading: Path | None = None
    machine: str = ""
    check: bool = False
