"""A machine is read in the background: whatever hangs there, the worker goes by what it knows."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from fakes import PATIENCE

from mlx_rq.worker.process import machine_watch
from mlx_rq.worker.process.machine_watch import LOOK_SECONDS, STALE_SECONDS, MachineWatch

BATTERY = "the machine runs on its battery"


@dataclass
class Machine:
    """One that hangs while it is read, until `answers` is set."""

    battery: bool | None = True
    now: float = 100.0
    answers: threading.Event = field(default_factory=threading.Event)
    asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    error: Exception | None = None

    def on_battery(self) -> bool | None:
        battery = self.battery
        self.asked.release()
        assert self.answers.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return battery

    def too_warm(self) -> bool | None:
        return False

    def unused_seconds(self) -> float | None:
        return None

    def watch(self, *conditions: str) -> MachineWatch:
        return MachineWatch(conditions, self, lambda: self.now)

    def looks(self, watch: MachineWatch) -> str | None:
        """Looks so much later that another reading is due."""
        self.now += LOOK_SECONDS
        return watch.reason()


def over(watch: MachineWatch) -> None:
    assert watch._over.wait(PATIENCE)


def test_the_first_reading_is_waited_for_and_no_other() -> None:
    machine = Machine()
    machine.answers.set()
    watch = machine.watch("battery")
    assert watch.reason() == BATTERY

    machine.answers.clear()
    machine.battery = False
    assert machine.looks(watch) == BATTERY, "a program hangs: what was read before it counts"
    assert machine.looks(watch) == BATTERY
    machine.answers.set()
    over(watch)
    assert watch.reason() is None


def test_one_reading_at_a_time() -> None:
    machine = Machine()
    machine.answers.set()
    watch = machine.watch("battery")
    watch.reason()
    machine.answers.clear()
    for _ in range(3):
        machine.looks(watch)
    machine.answers.set()
    over(watch)
    assert [machine.asked.acquire(blocking=False) for _ in range(3)] == [True, True, False]


def test_what_was_read_long_ago_counts_no_more(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.answers.set()
    watch = machine.watch("battery")
    watch.reason()
    machine.answers.clear()
    machine.now += STALE_SECONDS - 1
    assert watch.reason() == BATTERY
    machine.now += 1
    assert [watch.reason(), watch.reason()] == [None, None]
    said = "--pause-on battery: the system does not answer; taking jobs"
    assert caplog.messages == [said], "once"
    machine.answers.set()
    over(watch)
    assert watch.reason() == BATTERY


def test_a_machine_that_hangs_at_once_does_not_keep_the_worker_from_its_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine_watch, "_FIRST_SECONDS", 0.01)
    machine = Machine()
    watch = machine.watch("battery")
    assert watch.reason() is None
    machine.answers.set()
    over(watch)
    assert watch.reason() == BATTERY


def test_an_error_ends_one_reading_and_not_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_watch, "_FIRST_SECONDS", 0.0)
    machine = Machine(error=RuntimeError("no such sensor"))
    begun: list[Callable[[], None]] = []
    watch = MachineWatch(["battery"], machine, lambda: machine.now, begin=begun.append)
    machine.answers.set()
    with pytest.raises(RuntimeError):
        watch._read()
    machine.error = None
    assert machine.looks(watch) is None
    begun.pop()()
    assert watch.reason() == BATTERY


def test_what_a_machine_does_not_tell_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(battery=None)
    machine.answers.set()
    watch = machine.watch("battery", "thermal")
    watch.reason()
    machine.looks(watch)
    over(watch)
    assert caplog.messages == ["--pause-on battery: the system does not tell that here"]
    assert Machine().watch().reason() is None, "nobody asked: nothing is read"
