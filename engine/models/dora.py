"""DoRA for generating: what mlx-lm's layer computes, without what is only needed in training.

There, each token has the norms of the adapted weights computed again, from weights that are
dequantised for it. They do not change while nothing is trained.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten
from mlx_lm.tuner.dora import DoRALinear


class FixedDoRALinear(Module):
    """Computes what a trained layer does."""

    def __init__(self, trained: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.linear, self.scale = trained.linear, trained.scale
        self.lora_a, self.lora_b = trained.lora_a, trained.lora_b
        weight = trained._dequantized_weight()
        adapted = weight + (self.scale * self.lora_b.T) @ self.lora_a.T
        self.norm = trained.m / mx.linalg.norm(adapted, axis=1)

    def __call__(self, x: mx.array) -> Any:
        change = self.scale * ((x @ self.lora_a) @ self.lora_b)
        norm = self.norm.astype(x.dtype)
        adapted = norm * (self.linear(x) + change.astype(x.dtype))
        if "bias" in self.linear:
            adapted = adapted + (1 - norm) * self.linear.bias  # which is not scaled
        return adapted


def fix_norms(network: Module) -> None:
    """Replaces the DoRA layers of a model, whose weights are loaded, by those that compute less."""
    fixed = [
        (name, FixedDoRALinear(module))
        for name, module in network.named_modules()
        if isinstance(module, DoRALinear)
    ]
    if fixed:
        network.update_modules(tree_unflatten(fixed))
        mx.eval([module.norm for _, module in fixed])
