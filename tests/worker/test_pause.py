"""A worker leaves the machine to its person: on battery, in the heat, in use, in quiet hours."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from click.testing import CliRunner
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, eventually, until_idle
from redis import Redis
from rq.suspension import resume, suspend

from mlx_rq import submit, submit_many
from mlx_rq.jobs.openai.requests import ANY_MODEL
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.overview import overview
from mlx_rq.jobs.queue.workers import live_workers
from mlx_rq.worker import worker as worker_module
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.pause_options import awake_unless, pause_of
from mlx_rq.worker.cli.processes import program_of
from mlx_rq.worker.cli.worker import worker
from mlx_rq.worker.pause import Pause, QuietHours, wall_clock
from mlx_rq.worker.process.machine_watch import (
    LOOK_SECONDS,
    UNUSED_SECONDS,
    MachineWatch,
    unreadable,
)
from mlx_rq.worker.process.power import KeepAwake, awake_command

RunWorker = Callable[..., AbstractContextManager[RunningWorker]]


@dataclass
class Machine:
    """One whose readings a test sets, and on which time passes as it says."""

    battery: bool | None = False
    warm: bool | None = False
    unused: float | None = 3600.0
    now: float = 50.0
    looks: int = 0

    def on_battery(self) -> bool | None:
        self.looks += 1
        return self.battery

    def too_warm(self) -> bool | None:
        return self.warm

    def unused_seconds(self) -> float | None:
        return self.unused

    def pause(self, *conditions: str) -> Pause:
        def clock() -> float:
            return self.now

        watch = MachineWatch(conditions, self, clock, begin=lambda read: read())
        return Pause(watch, clock=clock)


ALL = ("battery", "thermal", "user")


@pytest.mark.parametrize(
    ("readings", "reason"),
    [
        ({}, None),
        ({"battery": True}, "the machine runs on its battery"),
        ({"warm": True}, "the machine is too warm"),
        ({"unused": UNUSED_SECONDS - 1}, "somebody uses the machine"),
        ({"unused": UNUSED_SECONDS}, None),
        ({"battery": None, "warm": None, "unused": None}, None),
        ({"battery": True, "warm": True}, "the machine runs on its battery"),
    ],
)
def test_why_a_worker_pauses(readings: dict[str, Any], reason: str | None) -> None:
    pause = Machine(**readings).pause(*ALL)
    pause.look()
    assert pause.reason == reason
    others = Machine(**readings).pause()
    others.look()
    assert others.reason is None, "nobody asked for it"


def test_the_machine_is_read_now_and_then() -> None:
    machine = Machine()
    pause = machine.pause("battery")
    pause.look()
    machine.battery = True
    machine.now += LOOK_SECONDS - 1
    pause.look()
    assert (pause.reason, machine.looks) == (None, 1)
    machine.now += 1
    pause.look()
    assert (pause.reason, machine.looks) == ("the machine runs on its battery", 2)
    machine.battery = False
    machine.now += LOOK_SECONDS
    pause.look()
    assert (pause.reason, machine.looks) == (None, 3)


def test_what_waits_goes_at_once_and_what_runs_after_the_grace() -> None:
    machine = Machine(battery=True)
    pause = machine.pause("battery")
    assert pause.leaving(["a", "b"], {"a"}, 30) == []
    pause.look()
    assert pause.leaving(["a", "b"], {"a"}, 30) == ["b"]
    machine.now += 30
    assert pause.leaving(["a", "b"], {"a"}, 30) == ["b"]
    machine.now += 1
    assert pause.leaving(["a", "b"], {"a"}, 30) == ["a", "b"]


@pytest.mark.parametrize(
    ("hours", "within", "outside"),
    [
        ("09:00-18:00", ["09:00", "17:59"], ["08:59", "18:00", "00:00"]),
        ("22:00-06:30", ["22:00", "23:59", "00:00", "06:29"], ["06:30", "21:59", "12:00"]),
        ("18:00-24:00", ["18:00", "23:59"], ["00:00", "17:59"]),
        ("00:00-24:00", ["00:00", "12:00", "23:59"], []),
        ("22:00-07:00", ["22:00", "06:59"], ["07:00", "21:59"]),
        ("23:59-00:00", ["23:59"], ["00:00", "23:58"]),
    ],
)
def test_quiet_hours_also_over_midnight(hours: str, within: list[str], outside: list[str]) -> None:
    quiet = QuietHours.read(hours)
    assert str(quiet) == hours
    day = "2026-11-28 "
    assert [at for at in within if datetime.fromisoformat(day + at) not in quiet] == []
    assert [at for at in outside if datetime.fromisoformat(day + at) in quiet] == []


@pytest.mark.parametrize(
    ("midnight", "quiet_for"),
    [
        ("2026-03-28T23:00", 2),  # 01:00 to 04:00, without the hour from 02:00 on
        ("2026-10-24T22:00", 4),  # 02:00 comes twice
        ("2026-11-27T23:00", 3),
    ],
)
def test_quiet_hours_follow_the_clock_on_the_wall(midnight: str, quiet_for: int) -> None:
    quiet, berlin = QuietHours.read("01:00-04:00"), ZoneInfo("Europe/Berlin")
    start = datetime.fromisoformat(midnight).replace(tzinfo=UTC)
    hours = [(start + timedelta(hours=n)).astimezone(berlin) for n in range(12)]
    assert sum(hour in quiet for hour in hours) == quiet_for


def test_a_day_that_has_ended_has_begun() -> None:
    """As the supervisor writes it for its worker: the minute before midnight is not quiet."""
    quiet = QuietHours.read("24:00-06:00")
    assert str(quiet) == "00:00-06:00"
    assert datetime.fromisoformat("2026-11-28 23:59:30") not in quiet


@pytest.mark.parametrize("between", [",", ", ", " "])
def test_several_quiet_hours_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    monkeypatch.setenv("MLX_RQ_QUIET_HOURS", between.join(["09:00-12:00", "22:00-06:00"]))
    hours = worker.make_context("worker", [], auto_envvar_prefix="MLX_RQ").params["quiet_hours"]
    assert list(map(str, hours)) == ["09:00-12:00", "22:00-06:00"]


def test_quiet_hours_go_with_the_machine_into_another_time_zone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    try:
        for zone in ("UTC", "Asia/Tokyo", "Europe/Berlin"):
            monkeypatch.setenv("TZ", zone)
            there = datetime.now(ZoneInfo(zone)).replace(tzinfo=None)
            assert abs(wall_clock() - there) < timedelta(minutes=1), zone
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("9-18", "'9-18' is no part of the day, as 09:00-18:00"),
        ("09:00-25:00", "'25:00' is no time of the day"),
        ("09:00-09:00", "starts when it ends"),
    ],
)
def test_hours_that_are_none_are_refused(text: str, words: str) -> None:
    refused = CliRunner().invoke(main, ["worker", "--quiet-hours", text])
    assert refused.exit_code == 2
    assert words in " ".join(refused.output.split())


def test_conditions_that_cannot_be_told_are_refused() -> None:
    refused = CliRunner().invoke(main, ["worker", "--pause-on", "battery,weekends"])
    assert refused.exit_code == 2
    assert "'weekends' is none of battery, thermal, user" in refused.output
    assert unreadable(["battery", "user"], "linux") == "user"
    assert unreadable(["battery", "thermal"], "linux") is None
    assert unreadable(ALL, "darwin") is None


def test_the_worker_that_is_supervised_is_told_the_same() -> None:
    """The supervisor, `up` and `demo` write the options as a command line again."""
    options = {"pause_on": "battery,thermal", "quiet_hours": (QuietHours.read("22:00-06:00"),)}
    program = program_of("worker", {**options, "no_keep_awake": True}, "info")
    context = worker.make_context("worker", program[program.index("worker") + 1 :])
    assert {name: context.params[name] for name in options} == options
    assert context.params["no_keep_awake"] is True
    usual = worker.make_context("worker", []).params
    assert (usual["pause_on"], usual["quiet_hours"], usual["no_keep_awake"]) == (None, (), False)


def test_the_options_make_what_they_ask_for() -> None:
    pause = pause_of("battery,thermal", (QuietHours.read("00:00-24:00"),))
    pause.look()
    assert pause.reason == "quiet hours 00:00-24:00"
    assert pause._machine._conditions == ["battery", "thermal"]
    never = pause_of(None, ())
    never.look()
    assert never.reason is None
    assert awake_unless(True)._command is None
    assert awake_unless(False)._command == awake_command(os.getpid())


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a worker that pauses look again at once."""
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.01)


def test_a_pause_ends_claims_and_gives_back_what_waits(
    start_worker: StartWorker, connection: Redis, quick: None
) -> None:
    machine = Machine()
    engine = FakeEngine(hold=True, capacity=2)
    paused = start_worker(engine, pause=machine.pause("battery"))
    running = submit_many([{"prompt": "a"}] * 2)
    engine.wait_for_tasks(2)
    waiting = submit_many([{"prompt": "b"}] * 2)
    engine.wait_for_tasks(4)

    machine.battery = True
    machine.now += LOOK_SECONDS
    eventually(lambda: [job.status() for job in waiting] == ["queued", "queued"])

    assert [job.status() for job in running] == ["in_progress", "in_progress"]
    given_back = sorted(job.id for job in waiting)
    engine.wait_until(lambda engine: sorted(engine.cancelled) == given_back)
    (said,) = live_workers(connection)
    assert said["paused"] == "the machine runs on its battery"
    notes = overview(connection)["notes"]
    assert notes == [f"worker {paused.name[:8]} takes no jobs: the machine runs on its battery"]
    assert notes[0] in CliRunner().invoke(main, ["status"]).output
    engine.release()
    assert [job.result(PATIENCE)["object"] for job in running] == ["text_completion"] * 2
    late = submit(prompt="c")
    paused.take_turns()
    eventually(lambda: paused.worker.get_state() == "suspended")
    assert late.info()["status"] == "queued"
    assert late.info()["note"] == (
        "no worker takes jobs of the model 'default' now: the machine runs on its battery"
    )
    assert connection.llen(keys.wake_up(ANY_MODEL)) > 0, "left for workers that do not pause"

    machine.battery = False
    machine.now += LOOK_SECONDS
    for job in [*waiting, late]:
        assert job.result(PATIENCE)["object"] == "text_completion"
    eventually(lambda: live_workers(connection)[0]["paused"] is None)
    assert overview(connection)["notes"] == []


def test_it_is_told_that_rq_has_its_workers_rest(
    start_worker: StartWorker, connection: Redis, quick: None
) -> None:
    resting = "RQ's workers are suspended (`rq resume` ends that)"
    running = start_worker()
    until_idle(connection)
    suspend(connection)
    job = submit(prompt="a")
    eventually(lambda: live_workers(connection)[0]["paused"] == resting)
    eventually(lambda: running.worker.get_state() == "suspended")
    assert job.info()["note"] == f"no worker takes jobs of the model 'default' now: {resting}"
    resume(connection)
    assert job.result(PATIENCE)["object"] == "text_completion"
    eventually(lambda: live_workers(connection)[0]["paused"] is None)


def test_a_machine_that_hangs_while_it_is_read_stops_no_step(
    start_worker: StartWorker, quick: None
) -> None:
    machine, reads, goes_on = Machine(), threading.Semaphore(0), threading.Event()

    def on_battery() -> bool | None:
        reads.release()
        assert machine.now < 60 or goes_on.wait(PATIENCE)
        return machine.battery

    machine.on_battery = on_battery  # type: ignore[method-assign]
    engine = FakeEngine(hold=True)
    watch = MachineWatch(["battery"], machine, lambda: machine.now)
    running = start_worker(engine, pause=Pause(watch, clock=lambda: machine.now))
    job = submit(prompt="a")
    engine.wait_for_tasks(1)
    machine.now += LOOK_SECONDS
    assert [reads.acquire(timeout=PATIENCE) for _ in range(2)] == [True, True]
    running.take_turns()
    engine.release()
    assert job.result(PATIENCE)["object"] == "text_completion"
    goes_on.set()


def test_a_pause_that_lasts_gives_back_what_runs_without_an_attempt(
    start_worker: StartWorker, quick: None
) -> None:
    machine = Machine()
    engine = FakeEngine(hold=True)
    start_worker(engine, pause=machine.pause("thermal"), grace=60.0)
    job = submit(prompt="a", max_attempts=1)
    engine.wait_for_tasks(1)
    machine.warm = True
    machine.now += LOOK_SECONDS
    engine.wait_until(lambda engine: engine.steps > 3)
    assert job.status() == "in_progress"

    machine.now += LOOK_SECONDS + 61
    eventually(lambda: job.status() == "queued")
    engine.release()
    machine.warm = False
    machine.now += LOOK_SECONDS
    assert job.result(PATIENCE)["object"] == "text_completion"


def test_what_goes_back_goes_to_a_worker_that_does_not_pause(
    start_worker: StartWorker, quick: None
) -> None:
    machine = Machine()
    engine = FakeEngine(hold=True, capacity=1)
    start_worker(engine, pause=machine.pause("battery"), grace=0.0)
    jobs = submit_many([{"prompt": "a"}] * 3)
    engine.wait_for_tasks(3)
    start_worker()
    machine.battery = True
    machine.now += LOOK_SECONDS
    eventually(lambda: len(engine.cancelled) >= 2)
    machine.now += 1
    assert [job.result(PATIENCE)["object"] for job in jobs] == ["text_completion"] * 3


def test_a_burst_waits_for_the_end_of_the_pause(running_worker: RunWorker, quick: None) -> None:
    machine = Machine(battery=True)
    job = submit(prompt="a")
    with running_worker(pause=machine.pause("battery"), burst=True) as running:
        running.take_turns()
        assert job.status() == "queued"
        machine.battery = False
        machine.now += LOOK_SECONDS
        assert running.join() == 1
    assert job.status() == "completed"


def test_the_machine_is_kept_awake_while_jobs_are_aboard(
    running_worker: RunWorker, redis_url: str, quick: None
) -> None:
    class Noted(KeepAwake):
        def __init__(self) -> None:
            super().__init__(None)
            self.turns: list[bool] = []

        def turn(self, working: bool) -> None:
            self.turns.append(working)

        def release(self) -> None:
            self.turns.append(False)

    awake, engine = Noted(), FakeEngine(hold=True)
    with running_worker(engine, awake=awake) as running:
        running.take_turns()
        assert set(awake.turns) == {False}
        job = submit(prompt="a")
        engine.wait_for_tasks(1)
        running.take_turns()
        assert awake.turns[-1]
        engine.release()
        job.result(PATIENCE)
        running.stop()
    assert not awake.turns[-1]
