"""The options of all that start a worker on a machine that is somebody's, too."""

import os
from typing import TYPE_CHECKING, Any

import click

from mlx_rq.worker.cli.common import option
from mlx_rq.worker.pause import Pause, QuietHours
from mlx_rq.worker.process.machine_watch import CONDITIONS, MachineWatch, unreadable
from mlx_rq.worker.process.power import KeepAwake, awake_command

if TYPE_CHECKING:
    Words = click.ParamType[str]
    Hours = click.ParamType[QuietHours]
else:  # generic only from click 8.4 on
    Words = Hours = click.ParamType


class _Conditions(Words):
    """Conditions under which a worker pauses, with commas between them."""

    name = "conditions"

    def convert(self, value: Any, param: Any, context: Any) -> str:
        wanted = [name.strip() for name in str(value).split(",")]
        if wrong := [name for name in wanted if name not in CONDITIONS]:
            self.fail(f"{wrong[0]!r} is none of {', '.join(CONDITIONS)}", param, context)
        if name := unreadable(wanted):
            self.fail(f"{name!r} can be told on macOS only", param, context)
        return ",".join(wanted)


class _QuietHours(Hours):
    """A part of the day: in the environment, several stand with commas or spaces between them."""

    name = "hours"

    def split_envvar_value(self, value: str) -> list[str]:
        return value.replace(",", " ").split()

    def convert(self, value: Any, param: Any, context: Any) -> QuietHours:
        if isinstance(value, QuietHours):
            return value
        try:
            return QuietHours.read(value)
        except ValueError as error:
            self.fail(str(error), param, context)


pause_options = (
    option(
        "--pause-on",
        type=_Conditions(),
        default=None,
        metavar="battery,thermal,user",
        help="Take no jobs while the machine runs on its battery, is too warm, or is used.",
    ),
    option(
        "--quiet-hours",
        type=_QuietHours(),
        multiple=True,
        metavar="HH:MM-HH:MM",
        help="Take no jobs in this part of the day, by local time; also over midnight.",
    ),
    option(
        "--no-keep-awake",
        is_flag=True,
        help="Let the machine fall asleep while there are jobs in work.",
    ),
)


def pause_of(pause_on: str | None, quiet_hours: tuple[QuietHours, ...]) -> Pause:
    """Makes what the options ask for."""
    return Pause(MachineWatch(pause_on.split(",") if pause_on else ()), quiet_hours)


def awake_unless(no_keep_awake: bool) -> KeepAwake:
    """Makes what keeps the machine awake for this process, or nothing does."""
    return KeepAwake(None if no_keep_awake else awake_command(os.getpid()))
