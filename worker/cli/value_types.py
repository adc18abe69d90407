"""What values of options are: numbers, bytes, lengths of time. Each says what would be right."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import click

from mlx_rq.jobs.openai.sizes import parse_bytes

if TYPE_CHECKING:
    Number = click.ParamType[int]
    NumberOrWord = click.ParamType[int | str]
    Seconds = click.ParamType[float]
else:  # generic only from click 8.4 on
    Number = NumberOrWord = Seconds = click.ParamType


class WholeNumber(click.IntRange):
    """A whole number, of at least so much."""

    name = "number"

    def convert(self, value: Any, param: Any, context: Any) -> int:
        try:
            number: int = super().convert(value, param, context)
        except click.BadParameter:
            self.fail(f"'{value}' is no whole number{self._limits}", param, context)
        return number

    @property
    def _limits(self) -> str:
        if self.max is not None:
            return f" from {self.min} to {self.max}"
        return "" if self.min is None else f" of {self.min} or more"


class ByteCount(Number):
    """A number of bytes, of at least so many, with a unit if wanted: 500MB, 8GB."""

    name = "bytes"

    def __init__(self, least: int = 1) -> None:
        self._least = least

    def convert(self, value: Any, param: Any, context: Any) -> int:
        if isinstance(value, int):
            return value
        try:
            number = parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)
        if number < self._least:
            self.fail(f"'{value}' is {number:,} bytes: say a unit, as in 12GB", param, context)
        return number


class Duration(Seconds):
    """A number of seconds, or of other units: 90, 90s, 10m, 2h, 7d.

    At `least` so many seconds; None leaves that to whom they go to. `whole` ones are an int.
    """

    name = "time"
    _UNITS: ClassVar[Mapping[str, int]] = {"s": 1, "m": 60, "h": 3600, "d": 86400}

    def __init__(self, least: float | None = 0, *, whole: bool = False) -> None:
        self._least = least
        self._whole = whole

    def convert(self, value: Any, param: Any, context: Any) -> float:
        text = str(value).strip().lower()
        unit = text[-1:] if text[-1:] in self._UNITS else ""
        try:
            seconds = float(text.removesuffix(unit)) * self._UNITS.get(unit, 1)
        except ValueError:
            self.fail(f"'{value}' is no length of time, such as 90s, 10m or 2h", param, context)
        if self._least is not None and not seconds >= self._least:
            self.fail(f"'{value}' is too short: take {self._least:g}s or more", param, context)
        if self._whole and seconds % 1:
            self.fail(f"'{value}' is no whole number of seconds", param, context)
        return int(seconds) if self._whole else seconds
