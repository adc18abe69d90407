"""A device that does as Metal does when its memory runs out, and counts what it is given."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlx_rq.engine.models.device import Fault, Memory, MLXDevice
from mlx_rq.engine.models.load import LoadedModel

OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)


class ScriptedDevice:
    """Has the memory that a test says; reads errors as MLX's device does."""

    name = "a scripted device"
    physical = 2**34

    def __init__(self, ceiling: int | None = None, active: int = 0) -> None:
        self.ceiling = ceiling
        self.active = active
        self.cleared = 0
        """How often free buffers were given back."""
        self.said: Exception | None = None
        """What it raises once more when it is waited for."""

    def memory(self) -> Memory:
        return Memory(self.active, 0, self.active)

    def clear_cache(self) -> None:
        self.cleared += 1

    def synchronize(self, stream: Any) -> None:
        said, self.said = self.said, None
        if said is not None:
            raise said

    def fault_of(self, error: BaseException) -> Fault | None:
        return MLXDevice().fault_of(error)


class WatchedNetwork:
    """A network that counts its passes, and fails where a test says so.

    `fails` is asked before each pass, given its rows, the tokens that each of them then holds, and
    how many passes were before.
    """

    def __init__(
        self, network: Any, device: ScriptedDevice, fails: Callable[[int, int, int], bool]
    ) -> None:
        self._network = network
        self._device = device
        self.fails = fails
        self.garbles: Callable[[mx.array], mx.array] = lambda inputs: mx.zeros(len(inputs)) > 0
        """Says of each row whether its logits are to be no numbers."""
        self.passes: list[tuple[int, int]] = []
        """The rows of each pass, and the tokens of each of them."""

    def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
        rows, tokens = inputs.shape
        self.passes.append((rows, tokens))
        held = tokens + (0 if cache is None else _held(cache[0]))
        logits = self._network(inputs, cache=cache)  # the KV is written, or half of it
        if self.fails(rows, held, len(self.passes) - 1):
            self._device.said = RuntimeError(OUT_OF_MEMORY)
            raise RuntimeError(OUT_OF_MEMORY)
        return mx.where(self.garbles(inputs)[:, None, None], mx.nan, logits)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def _held(cache: Any) -> int:
    """The tokens that the longest row of a cache holds."""
    offset: Any = cache.offset
    return int(offset.max().item()) if isinstance(offset, mx.array) else int(offset)


def watched(model: LoadedModel, device: ScriptedDevice) -> tuple[LoadedModel, WatchedNetwork]:
    """A model whose passes are counted and may fail; none does yet."""
    network: Any = WatchedNetwork(model.model, device, lambda rows, tokens, before: False)
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    return LoadedModel(**{**fields, "model": network}), network


class FailingMLX:
    """Counts how often MLX is waited for, and has some of these times fail, for one test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        self._failing: frozenset[int] = frozenset()
        for owner, names in ((mx, ("eval", "async_eval")), (mx.array, ("item", "tolist"))):
            for name in names:
                monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def fail_at(self, *times: int) -> None:
        """Counts from 0 again, and fails then."""
        self.times, self._failing = 0, frozenset(times)

    def _counted(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.times += 1
            if self.times - 1 in self._failing:
                raise RuntimeError(OUT_OF_MEMORY)
            return own(*args)

        return counted
