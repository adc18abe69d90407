"""How urgent a job is."""

from typing import Literal, get_args

Priority = Literal["high", "default", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
"""The most urgent first."""
