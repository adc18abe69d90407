"""How much work something is: CPU time, in units of some work that is measured in the same run.

So a limit says the same on a slow machine, and on one that has other things to do.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

_DOCUMENT = {f"key {number}": [number, str(number)] for number in range(2_000)}


@contextmanager
def at_most(units: float, clock: Callable[[], float] = time.process_time) -> Iterator[None]:
    """Asserts that a block is at most so much work; a hundred units are two seconds or so.

    `clock` may be that of this thread alone.
    """
    unit, began = _measured(), clock()
    yield
    took = clock() - began
    if took >= units * unit:  # perhaps the machine has become slower
        unit = max(unit, _unit())
    assert took < units * unit, f"it took {took:.2f} s of CPU, {took / unit:.0f} units"


@cache
def _measured() -> float:
    return max(_unit() for _ in range(3))


def _unit() -> float:
    """Measures what writing and reading some JSON takes, of this thread."""
    began = time.thread_time()
    for _ in range(14):
        json.loads(json.dumps(_DOCUMENT, sort_keys=True))
    return time.thread_time() - began
