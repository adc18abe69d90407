"""What macOS and Linux say of their power, their heat and their users, as recorded there."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mlx_rq.worker.process.readings import LinuxReadings, MacReadings

PMSET = ["/usr/bin/pmset", "-g", "batt"]
NOTIFYUTIL = ["/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel"]
IOREG = ["/usr/sbin/ioreg", "-c", "IOHIDSystem", "-d", "4"]

ON_MAINS = """Now drawing from 'AC Power'
 -InternalBattery-0 (id=21233763)\t100%; charged; 0:00 remaining present: true
"""
ON_BATTERY = """Now drawing from 'Battery Power'
 -InternalBattery-0 (id=21233763)\t72%; discharging; 3:15 remaining present: true
"""
USED = """+-o Root  <class IORegistryEntry, id 0x100000100, retain 11>
  | | +-o IOHIDSystem  <class IOHIDSystem, id 0x100000275, registered, matched, active>
  | |     {
  | |       "HIDScrollCountMaxTimeDeltaBetween" = 600
  | |       "HIDIdleTime" = 3254341351
  | |     }
"""


def mac(command: Sequence[str], output: str) -> MacReadings:
    """A Mac on which one command writes this, and no other can be run."""

    def run(asked: Sequence[str]) -> str:
        assert asked == command
        return output

    return MacReadings(run)


@pytest.mark.parametrize(
    ("output", "battery"),
    [
        (ON_MAINS, False),
        (ON_BATTERY, True),
        (ON_MAINS.replace("AC", "UPS"), True),
        ("No power\n", None),
    ],
)
def test_a_mac_says_what_it_draws_from(output: str, battery: bool | None) -> None:
    assert mac(PMSET, output).on_battery() is battery


@pytest.mark.parametrize(("level", "warm"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_mac_says_how_warm_it_is(level: int, warm: bool) -> None:
    output = f"com.apple.system.thermalpressurelevel {level}\n"
    assert mac(NOTIFYUTIL, output).too_warm() is warm
    assert mac(NOTIFYUTIL, "").too_warm() is None


def test_a_mac_says_since_when_nobody_has_touched_it() -> None:
    assert mac(IOREG, USED).unused_seconds() == pytest.approx(3.254341351)
    assert mac(IOREG, "+-o Root\n").unused_seconds() is None


@pytest.mark.parametrize("error", [FileNotFoundError("pmset"), subprocess.TimeoutExpired(PMSET, 5)])
def test_a_program_that_fails_tells_nothing(error: Exception) -> None:
    def run(command: Sequence[str]) -> str:
        raise error

    machine = MacReadings(run)
    said = (machine.on_battery(), machine.too_warm(), machine.unused_seconds())
    assert said == (None, None, None)


MAINS = {"type": "Mains", "online": "1"}
BATTERY = {"type": "Battery", "status": "Discharging"}
MOUSE = {**BATTERY, "scope": "Device"}


@pytest.mark.parametrize(
    ("supplies", "battery"),
    [
        ([MAINS, {**BATTERY, "status": "Charging"}], False),
        ([{**MAINS, "online": "0"}, BATTERY], True),
        ([MAINS, BATTERY], False),  # it draws from both
        ([{**MAINS, "online": "0"}, {**BATTERY, "status": "Full"}], False),
        ([MOUSE], None),
        ([], None),
    ],
)
def test_linux_says_whether_a_battery_is_emptied(
    tmp_path: Path, supplies: Sequence[Mapping[str, str]], battery: bool | None
) -> None:
    for number, supply in enumerate(supplies):
        _write(tmp_path / "power_supply" / f"S{number}", supply)
    assert LinuxReadings(tmp_path).on_battery() is battery


@pytest.mark.parametrize(("now", "warm"), [("94000", False), ("95000", True), ("101000", True)])
def test_linux_says_whether_it_slows_down_for_the_heat(
    tmp_path: Path, now: str, warm: bool
) -> None:
    zone = {"trip_point_0_type": "active", "trip_point_0_temp": "60000"}
    _write(tmp_path / "thermal/thermal_zone0", {**zone, "temp": now})
    assert LinuxReadings(tmp_path).too_warm() is None
    zone |= {"trip_point_1_type": "passive", "trip_point_1_temp": "95000"}
    zone |= {"trip_point_2_type": "hot", "trip_point_2_temp": "-274000"}  # not set
    _write(tmp_path / "thermal/thermal_zone1", {**zone, "temp": now})
    assert LinuxReadings(tmp_path).too_warm() is warm


@pytest.mark.parametrize("odd", ["", "N/A", "9" * 5000])
def test_a_zone_that_tells_no_number_is_passed_by(tmp_path: Path, odd: str) -> None:
    zone = {"trip_point_0_type": "passive", "trip_point_0_temp": "95000"}
    _write(tmp_path / "thermal/thermal_zone0", {**zone, "temp": odd})
    assert LinuxReadings(tmp_path).too_warm() is None
    _write(tmp_path / "thermal/thermal_zone1", {**zone, "temp": "96000"})
    assert LinuxReadings(tmp_path).too_warm() is True


def _write(folder: Path, files: Mapping[str, str]) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
