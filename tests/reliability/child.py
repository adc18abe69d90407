"""A worker for the tests to break: `child.py work CONFIG`, or `supervise CONFIG`, or `fail CODE`.

It kills itself at a named seam, as often as `kills` says, counted in files so that the next process
knows. CONFIG is a JSON object with the fields of `Config`.
"""

import json
import logging
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wall_clock  # noqa: F401 (before others take the clock)

sys.path.insert(0, str(Path(__file__).parent.parent))

from redis.connection import AbstractConnection
from scripted import ScriptedEngine, say

from mlx_rq.jobs.queue import retry
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.worker import integrity
from mlx_rq.worker import worker as worker_module
from mlx_rq.worker.leases.claim import Claims
from mlx_rq.worker.leases.machine import machine
from mlx_rq.worker.models.switch import EngineSwitch
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.process import supervisor, throttle
from mlx_rq.worker.process.supervisor import Supervisor, SupervisorOptions
from mlx_rq.worker.process.supervisor_pipe import SupervisorPipe
from mlx_rq.worker.results import outbox
from mlx_rq.worker.worker import MLXWorker


@dataclass
class Config:
    """How the child works; `options` are those of WorkerOptions, `supervisor` of its own."""

    url: str
    name: str = "child"
    capacity: int = 4
    pace: float = 0.0
    grow: float = 600.0
    idle: float = 1.0
    check_turns: int = 100
    spool: str | None = None
    data: str | None = None
    """The data folder, by which workers of one machine know each other."""
    options: dict[str, Any] = field(default_factory=dict)
    supervisor: dict[str, Any] = field(default_factory=dict)
    kill_at: str | None = None
    kills: int = 1
    counter: str = ""
    """Where the kills are counted: the beginning of a path."""
    hours: str = ""
    """A file of as many bytes as hours passed for the supervisor while its worker hung. Without it,
    none pass."""

    def an_hour_passes(self) -> None:
        if self.hours:
            with open(self.hours, "ab") as hours:
                hours.write(b".")

    def clock(self) -> float:
        hours = Path(self.hours)
        return time.monotonic() + 3600 * (hours.stat().st_size if hours.is_file() else 0)

    def seam(self, name: str) -> None:
        """Ends the process as a `kill -9` does, if this is the place and it is not done yet."""
        if name != self.kill_at:
            return
        for number in range(self.kills):
            try:
                Path(f"{self.counter}.{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            say(f"killed at {name}")
            os.kill(os.getpid(), signal.SIGKILL)


def machine_of(config: Config) -> str:
    return machine(Path(config.data)) if config.data else ""


def wrap_seams(config: Config) -> None:
    """Puts the seams that lie in the worker's own code where they belong."""
    take, commit = Claims.take, outbox.commit
    send = AbstractConnection.send_packed_command
    committing = False

    def seamed_take(claims: Claims, *arguments: Any, **options: Any) -> Any:
        claimed = take(claims, *arguments, **options)
        if claimed:
            say(f"claimed {len(claimed)}")
            config.seam("claim")
        return claimed

    def seamed_commit(*arguments: Any) -> Any:
        nonlocal committing
        committing = True
        committed = commit(*arguments)
        committing = False
        config.seam("committed")
        return committed

    def seamed_send(connection: Any, command: Any, check_health: bool = True) -> None:
        send(connection, command, check_health)
        if committing and b"EVALSHA" in (
            command if isinstance(command, bytes) else b"".join(command)
        ):
            config.seam("commit sent")

    Claims.take = seamed_take  # type: ignore[method-assign]
    outbox.commit = seamed_commit
    AbstractConnection.send_packed_command = seamed_send  # type: ignore[method-assign]


def work(config: Config) -> int:
    """Works as `mlx-rq worker --unsupervised` does."""
    say("started")
    wrap_seams(config)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # an abort is meant
    throttle.GROW_SECONDS = config.grow
    integrity.CHECK_TURNS = config.check_turns
    worker_module.IDLE_SECONDS = config.idle
    retry.RETRY_SECONDS = 0.05
    supervisor_pipe = SupervisorPipe.from_environment()
    supervisor_pipe.stop_with_supervisor()
    worker = MLXWorker(
        EngineSwitch.of(
            ScriptedEngine(config.capacity, config.pace, config.seam, config.an_hour_passes)
        ),
        new_connection(config.url),
        new_connection(config.url),
        name=config.name,
        options=WorkerOptions(
            **{
                "check": True,
                "spool": config.spool and Path(config.spool),
                "machine": machine_of(config),
                **config.options,
            }
        ),
        supervisor_pipe=supervisor_pipe,
    )
    progress = worker._progress

    def first_progress() -> None:
        worker._progress = progress  # type: ignore[method-assign]
        progress()
        say("ready")

    worker._progress = first_progress  # type: ignore[method-assign]
    ended = worker.run()
    say(f"ended {ended}")
    return 0


def supervise(config: Config, command: list[str]) -> int:
    """Supervises a child of this same program."""
    say("supervises")
    supervisor._LOOK_SECONDS = 0.05
    options = {"first_pause": 0.01, "longest_pause": 0.1, "healthy": 0.0, **config.supervisor}
    return Supervisor(
        command,
        new_connection(config.url),
        config.name,
        machine=machine_of(config),
        environment=os.environ,
        options=SupervisorOptions(**options),
        clock=config.clock,
    ).run()


def main() -> int:
    role, text = sys.argv[1:]
    config = Config(**json.loads(text))
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(process)d log %(message)s")
    if role == "work":
        return work(config)
    if role == "supervise":
        return supervise(config, [sys.executable, __file__, "work", text])
    # `supervise SHELL COMMAND`: a child that is not even a worker.
    return supervise(config, ["sh", "-c", role])


if __name__ == "__main__":
    sys.exit(main())
