"""Makes adapters as mlx-lm's training leaves them, and models that they are fused into."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from tiny import COMMON, random_model

from mlx_rq.engine.models.load import LoadedModel

KEYS = ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]


def fresh_model(*, bits: int | None = None, family: str = "llama", **config: Any) -> LoadedModel:
    """A tiny model of one's own, since adapters change it; with `bits`, quantised."""
    model = random_model(family, {**COMMON, **config})
    if bits is not None:
        nn.quantize(model.model, group_size=32, bits=bits)
    return model


def write_adapter(
    folder: Path,
    kind: str = "lora",
    *,
    seed: int = 1,
    rank: int = 4,
    bits: int | None = None,
    keys: list[str] | None = None,
    model: dict[str, Any] | None = None,
) -> Path:
    """Writes a random adapter, strong enough to change most tokens, for a fresh `model`."""
    config: dict[str, Any] = {
        "fine_tune_type": kind,
        "num_layers": 2,
        "lora_parameters": {
            "rank": rank,
            "scale": 2.0,
            "dropout": 0.5,
            "keys": keys or KEYS,
        },
    }
    network = fresh_model(bits=bits, **(model or {})).model
    network.freeze()
    linear_to_lora_layers(
        network, config["num_layers"], config["lora_parameters"], use_dora=kind == "dora"
    )
    mx.random.seed(seed)
    trained: Any = tree_flatten(network.trainable_parameters())
    weights = {name: value + 0.3 * mx.random.normal(value.shape) for name, value in trained}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def fused(folder: Path, *, bits: int | None = None) -> LoadedModel:
    """The model that `mlx_lm.fuse --dequantize` makes of it and an adapter."""
    model = fresh_model(bits=bits)
    network = load_adapters(model.model, str(folder))
    layers = [
        (name, module.fuse(dequantize=True))
        for name, module in network.named_modules()
        if hasattr(module, "fuse")
    ]
    network.update_modules(tree_unflatten(layers))
    return replace(model, model_id="fused")
