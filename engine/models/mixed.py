"""Layers in which each row has its own adapter, or none: LoRA and DoRA, over any linear layer.

The low-rank weights of all adapters are stacked, and each row's are gathered. Those of adapters
that are narrower, or leave a layer as it is, are filled up with zeros; so number 0, for rows that
have none.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.tuner.lora import LoRALinear

from mlx_rq.engine.kv.adapter_rows import adapter_rows, rows_now
from mlx_rq.engine.kv.numerics import disagreement, probe_tokens
from mlx_rq.engine.kv.trial import FAILURES, objection
from mlx_rq.engine.models.dora import FixedDoRALinear

_TRIED = 4
"""Adapters, the plain model among them, that a trial has rows of."""

_ROUNDS = 2
"""Times that a step is timed; the shortest counts."""


class Part(NamedTuple):
    """What one adapter adds to a layer: `x @ a @ b`; with DoRA, the sum is scaled by `norm`."""

    a: mx.array
    b: mx.array
    norm: mx.array | None = None

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])


def part_of(layer: Module) -> Part | None:
    """Takes the adapter out of the layer that it is on; None for a kind that is not mixed."""
    own: Any = layer
    if not isinstance(own, LoRALinear | FixedDoRALinear):
        return None
    norm = own.norm if isinstance(own, FixedDoRALinear) else None
    return Part(own.lora_a, own.lora_b * own.scale, norm)


class MixedLinear(Module):
    """A linear layer and what adapters add to it, numbered from 1."""

    def __init__(self, plain: Any, parts: Sequence[Part | None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear = plain
        some = next(part for part in parts if part is not None)
        rank = max(part.rank for part in parts if part is not None)
        inputs, outputs = some.a.shape[0], some.b.shape[1]
        nothing = Part(mx.zeros((inputs, 0), some.a.dtype), mx.zeros((0, outputs), some.b.dtype))
        filled = [nothing, *(nothing if part is None else part for part in parts)]
        self.lora_a = mx.stack([mx.pad(a, [(0, 0), (0, rank - a.shape[1])]) for a, _, _ in filled])
        self.lora_b = mx.stack([mx.pad(b, [(0, rank - b.shape[0]), (0, 0)]) for _, b, _ in filled])
        if any(part.norm is not None for part in filled):
            ones = mx.ones((outputs,))
            self.norm = mx.stack([ones if norm is None else norm for _, _, norm in filled])

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        rows = rows_now()
        if rows.only == 0:
            return y
        if rows.only is not None:
            change = (x @ self.lora_a[rows.only]) @ self.lora_b[rows.only]
        else:
            each = rows.each.reshape(-1, *[1] * (x.ndim - 3))
            change = mx.gather_mm(x, self.lora_a, rhs_indices=each)
            change = mx.gather_mm(change, self.lora_b, rhs_indices=each)
        y = y + change.astype(x.dtype)
        if "norm" not in self:
            return y
        norm = self.norm[rows.each if rows.only is None else rows.only].astype(x.dtype)
        if rows.only is None:
            norm = norm.reshape(-1, *[1] * (x.ndim - 2), norm.shape[-1])
        y = norm * y
        return y + (1 - norm) * self.linear.bias if "bias" in self.linear else y

    @property
    def own_bytes(self) -> int:
        """Bytes of what adapters add."""
        return sum(array.nbytes for name, array in self.items() if name != "linear")


Mixed = Sequence[tuple[str, MixedLinear]]
"""The layers in which rows differ, by their names."""


Parts = Mapping[str, Part]
"""What one adapter adds to which layers, by their names."""


def mixed_layers(network: Module, adapters: Sequence[Parts]) -> list[tuple[str, MixedLinear]]:
    """Makes layers for a plain model in the place of those that some of the adapters change."""
    plain = dict(network.named_modules())
    mixed = []
    for name in dict.fromkeys(name for parts in adapters for name in parts):
        layer = MixedLinear(plain[name], [parts.get(name) for parts in adapters])
        mx.eval(
            layer.lora_a, layer.lora_b, layer.get("norm")
        )  # one by one, since their parts are held beside
        mixed.append((name, layer))
    return mixed


def stacked_bytes(adapters: Sequence[Parts]) -> int:
    """Says what the layers of these adapters will take: in each the widest counts for all."""
    widest: dict[tuple[str, int], int] = {}
    for parts in adapters:
        for name, part in parts.items():
            for place, array in enumerate(part):
                if array is not None:
                    widest[name, place] = max(widest.get((name, place), 0), array.nbytes)
    return (len(adapters) + 1) * sum(widest.values())


def tried_in_one_step(network: Module, adapters: int) -> str:
    """Says what speaks against rows of different adapters, as against any of them alone."""
    numbers = range(min(_TRIED, adapters + 1))
    try:
        some = probe_tokens(network)
        tokens = mx.concatenate([some(1, 3) for _ in numbers])
        with adapter_rows(numbers):
            together = network(tokens)
        alone = []
        for number in numbers:
            with adapter_rows([number]):
                alone.append(network(tokens[number : number + 1]))
        return objection(disagreement(together, mx.concatenate(alone)))
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"


def pays(network: Module, adapters: int, rows: int) -> bool:
    """Whether a step of so many rows, mixed, takes less time than one step for each adapter's."""
    numbers = [row % min(_TRIED, adapters + 1) for row in range(rows)]
    apart = [[number] * count for number, count in Counter(numbers).items()]
    return _seconds(network, numbers) < sum(_seconds(network, some) for some in apart)


def _seconds(network: Module, adapters: Sequence[int]) -> float:
    """The time of a step of rows with these adapters; the first is to warm up."""
    tokens = mx.zeros((len(adapters), 1), dtype=mx.int32)
    times = []
    for _ in range(1 + _ROUNDS):
        started = time.perf_counter()
        with adapter_rows(adapters):
            mx.eval(network(tokens))
        times.append(time.perf_counter() - started)
    return min(times[1:])
