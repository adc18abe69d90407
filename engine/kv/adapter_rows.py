"""Which adapter each row of a forward pass is computed with.

Said around the pass by whoever knows the rows, and asked by the layers that have adapters
(`models/mixed.py`): what lies between the two are mlx-lm's models, which pass nothing through.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property

import mlx.core as mx


class AdapterRows:
    """The number of each row's adapter, 0 for none."""

    def __init__(self, adapters: Sequence[int]) -> None:
        self._adapters = adapters
        self.only = adapters[0] if len({*adapters}) == 1 else None
        """The adapter of all rows, where that is one."""

    @cached_property
    def each(self) -> mx.array:
        """The numbers [rows]."""
        return mx.array(list(self._adapters), dtype=mx.uint32)


_NONE = AdapterRows([0])
_rows: ContextVar[AdapterRows] = ContextVar("adapter_rows", default=_NONE)


@contextmanager
def adapter_rows(adapters: Sequence[int]) -> Iterator[None]:
    """Has forward passes compute their rows with these adapters; elsewhere they have none."""
    before = _rows.set(AdapterRows(adapters))
    try:
        yield
    finally:
        _rows.reset(before)


def rows_now() -> AdapterRows:
    """The rows of the forward pass that is being made."""
    return _rows.get()
