"""The device that computes: how much memory there is, and which of its errors mean what.

What has to be known of Metal is asked here, so that tests put a scripted device in its place. Since
MLX 0.32 a device that runs out of memory, or that the system interrupts, raises; it does not abort.
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

logger = logging.getLogger("mlx_rq.engine")

_CACHE_PART = 8
"""Of the memory, MLX keeps at most this part (1/8) in buffers that are free, to use them again."""

_WIRED_SHARE = 0.75
"""By default, less is wired than the system recommends: kernels panicked (mlx#3186)."""

_OF_MEMORY = ("insufficient memory", "outofmemory", "out of memory", "resource limit", "malloc")
_OF_TIME = ("timeout", "timed out", "impacting interactivity", "impactinginteractivity")
_OF_DEVICE = re.compile(
    r"\[metal|\[cuda|\[malloc|kiogpucommandbuffer"
    # MLX's own words for CUDA's errors: what was called, and what came of it.
    r"|\b(cuda|cublas|cudnn|culaunch|cugraph|cumem)\w*(\(.*\))? failed: "
)

T = TypeVar("T")


class Fault(Enum):
    """Why the device did not do what it was asked to do; smaller pieces may go through."""

    MEMORY = "ran out of memory"
    TIME = "was interrupted by the system, for taking too long"
    OTHER = "failed"


class NotFinite(Exception):
    """Logits are no numbers: a fault of the memory that raised nothing, or of the model itself.

    `uids` are the generator's names of the sequences whose they are.
    """

    def __init__(self, uids: Sequence[int] = ()) -> None:
        super().__init__("the model gave logits that are not finite")
        self.uids = tuple(uids)


def refuse_not_finite(logits: mx.array) -> None:
    """Raises NotFinite where a row of logits holds what is no number; single -inf are none."""
    if not finite_rows(logits).all().item():
        raise NotFinite


def finite_rows(logits: mx.array) -> mx.array:
    """Says of each row of logits whether tokens can be chosen by it. Nothing is computed yet."""
    # Infinite where any is +inf, or all are -inf; one that is no number is the highest of all (on
    # every device, in MLX 0.32). On the CPU a tenth of the work that a sum of powers is.
    return mx.isfinite(logits.max(axis=-1))


@dataclass(frozen=True, slots=True)
class Memory:
    """What MLX holds, in bytes: in arrays, in buffers to use again, in arrays at its highest."""

    active: int
    cache: int
    peak: int


class Device(Protocol):
    """Computes. Its errors are named by `fault_of`."""

    @property
    def name(self) -> str: ...

    @property
    def ceiling(self) -> int | None:
        """The bytes that all of MLX may hold together; None where nobody says."""

    @property
    def physical(self) -> int:
        """The bytes of memory that the machine has."""

    def memory(self) -> Memory:
        """Reads what is held now."""

    def clear_cache(self) -> None:
        """Gives free buffers back to the system."""

    def synchronize(self, stream: Any) -> None:
        """Waits for what was launched; may raise once more what that has raised."""

    def fault_of(self, error: BaseException) -> Fault | None:
        """Names an error of the device; None for one that is the request's or the program's."""


class MLXDevice:
    """The device that MLX computes with, and MLX's own limits."""

    def __init__(self, memory: int | None = None) -> None:
        """`memory` is the ceiling; by default, what Metal recommends where there is Metal."""
        self._recommended: int | None = None
        if mx.metal.is_available():
            self._recommended = int(mx.device_info()["max_recommended_working_set_size"])
        self._ceiling = memory or self._recommended

    @property
    def name(self) -> str:
        return str(mx.device_info().get("device_name", mx.default_device()))

    @property
    def ceiling(self) -> int | None:
        return self._ceiling

    @property
    def physical(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def limit(self) -> None:
        """Tells MLX the ceiling, and to keep few free buffers below it."""
        if self._ceiling is not None:
            mx.set_memory_limit(self._ceiling)
            mx.set_cache_limit(self._ceiling // _CACHE_PART)

    def wire(self, nbytes: int | None, *models: Module) -> int:
        """Has the system keep so much of MLX's memory resident (None: the weights); says how much.

        Does nothing where there is no such limit: without Metal.
        """
        if self._recommended is None:
            return 0
        if nbytes is None:
            nbytes = min(sum(map(weight_bytes, models)), int(_WIRED_SHARE * self._recommended))
        nbytes = min(nbytes, self._recommended)
        mx.set_wired_limit(nbytes)
        return nbytes

    def memory(self) -> Memory:
        return Memory(mx.get_active_memory(), mx.get_cache_memory(), mx.get_peak_memory())

    def clear_cache(self) -> None:
        mx.clear_cache()

    def synchronize(self, stream: Any) -> None:
        mx.synchronize(stream)

    def fault_of(self, error: BaseException) -> Fault | None:
        if isinstance(error, MemoryError):
            return Fault.MEMORY
        if not isinstance(error, RuntimeError):
            return None
        text = str(error).lower()
        if not _OF_DEVICE.search(text):
            return None
        if any(mark in text for mark in _OF_MEMORY):
            return Fault.MEMORY
        return Fault.TIME if any(mark in text for mark in _OF_TIME) else Fault.OTHER


def weight_bytes(model: Module) -> int:
    """Counts the bytes of a model's weights."""
    parameters: Any = tree_flatten(model.parameters())
    return sum(array.nbytes for _, array in parameters)


def settle(device: Device, stream: Any = None) -> None:
    """Waits until the device has let go of what failed, and gives back what it keeps to use again.

    What failed may be raised once more by waiting for it: it is known already.
    """
    try:
        device.synchronize(stream)
    except Exception as error:
        if device.fault_of(error) is None:
            raise
        logger.warning("the device said it again: %s", error)
    device.clear_cache()


def once_more(device: Device, action: Callable[[], T], what: str) -> T:
    """Does something; where the device fails at it, again. Raises what it raises then."""
    try:
        return action()
    except Exception as error:
        if (fault := device.fault_of(error)) is None:
            raise
        logger.warning("%s %s at %s: %s", device.name, fault.value, what, error)
    settle(device)
    return action()


def tried(device: Device, trial: Callable[[], T], otherwise: T, what: str) -> T:
    """Gives what a trial finds; `otherwise`, where the device fails at it twice.

    A worker whose machine is busy at its start has not to end by it.
    """
    try:
        return once_more(device, trial, what)
    except Exception as error:
        if (fault := device.fault_of(error)) is None:
            raise
        logger.warning("%s %s again at %s: %s", device.name, fault.value, what, error)
    settle(device)
    return otherwise
