"""What a worker reads off the machine that it runs on: power, heat, and whether somebody uses it.

On macOS the system's own programs tell it, to everybody; on Linux, files below /sys. What cannot be
read is None: nothing follows from that.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_TIMEOUT_SECONDS = 5.0

_HEAVY = 2
"""Of macOS' levels of thermal pressure: nominal, moderate, heavy, trapping, sleeping."""

Run = Callable[[Sequence[str]], str]
"""Gives what a program writes. Raises OSError or SubprocessError."""


class Readings(Protocol):
    """One machine, as far as its system tells."""

    def on_battery(self) -> bool | None: ...

    def too_warm(self) -> bool | None:
        """Says whether the system slows down for the heat."""

    def unused_seconds(self) -> float | None:
        """Gives how long nobody has touched keyboard, mouse or trackpad."""


def readings(platform: str = sys.platform) -> Readings:
    """Gives the readings of this machine."""
    return MacReadings() if platform == "darwin" else LinuxReadings()


def _run(command: Sequence[str]) -> str:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_TIMEOUT_SECONDS,
        check=True,
    ).stdout


@dataclass(frozen=True, slots=True)
class MacReadings:
    """Asks pmset, notifyutil and ioreg.

    `pmset -g therm` says nothing on Apple silicon; the level that thermald publishes does.
    """

    run: Run = _run

    def on_battery(self) -> bool | None:
        source = self._found(["/usr/bin/pmset", "-g", "batt"], r"drawing from '(.+?)'")
        return None if source is None else source != "AC Power"

    def too_warm(self) -> bool | None:
        name = "com.apple.system.thermalpressurelevel"
        level = self._found(["/usr/bin/notifyutil", "-g", name], rf"{name} (\d+)")
        return None if level is None else int(level) >= _HEAVY

    def unused_seconds(self) -> float | None:
        command = ["/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"]
        nanoseconds = self._found(command, r'"HIDIdleTime" ?= ?(\d+)')
        return None if nanoseconds is None else int(nanoseconds) / 1e9

    def _found(self, command: Sequence[str], pattern: str) -> str | None:
        try:
            match = re.search(pattern, self.run(command))
        except (OSError, subprocess.SubprocessError):
            return None
        return match and match[1]


@dataclass(frozen=True, slots=True)
class LinuxReadings:
    """Reads the folders `power_supply` and `thermal` of the kernel."""

    root: Path = Path("/sys/class")

    def on_battery(self) -> bool | None:
        """Says whether a battery of the machine, not one of a mouse, is being emptied."""
        supplies = sorted(self.root.glob("power_supply/*"))
        if any(_read(supply / "online") == "1" for supply in supplies):
            return False
        states = [
            _read(supply / "status")
            for supply in supplies
            if _read(supply / "type") == "Battery" and _read(supply / "scope") != "Device"
        ]
        return "Discharging" in states if states else None

    def too_warm(self) -> bool | None:
        """Says whether a zone is at the temperature from which on the kernel slows down."""
        limits = []
        for kind in self.root.glob("thermal/thermal_zone*/trip_point_*_type"):
            limit = _number(kind.with_name(kind.name.replace("_type", "_temp")))
            now = _number(kind.with_name("temp"))
            if _read(kind) not in ("passive", "hot") or limit is None or now is None:
                continue
            if limit > 0:
                limits.append(now >= limit)
        return any(limits) if limits else None

    def unused_seconds(self) -> float | None:
        return None


def _read(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return None


def _number(file: Path) -> int | None:
    try:
        return int(_read(file) or "")
    except ValueError:
        return None
