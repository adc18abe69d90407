"""Adapters: small weights beside those of a model, as they lie in their folders.

In the form in which mlx-lm trains them, LoRA and DoRA: a folder with `adapter_config.json` and
`adapters.safetensors`. How they are put on a model: `adapted.py`.

Light to import: MLX comes in only when one is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_rq.engine.interface import Adapter
from mlx_rq.engine.models.load import ModelError
from mlx_rq.jobs.openai.words import one_line

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"

_TYPES = ("lora", "dora")
_SHOWN = 3
"""Tensors that an error names."""

_LEAVES = ("lora_a", "lora_b", "m")
"""What an adapter's layer has beside those of the model."""


def check_adapter(adapter: Adapter) -> Mapping[str, Any]:
    """Reads what an adapter says of itself; raises ModelError where it cannot be one of mlx-lm's.

    Whether it fits a model is seen when it is put on.
    """
    where, folder = f"adapter {adapter.model_id}", adapter.folder
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"{where}: {folder} is no adapter's folder, it holds no {CONFIG}: check the path"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{where}: cannot read {folder / CONFIG}: {one_line(error)}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{where}: {folder / CONFIG} must hold an object, not {config!r:.40}")
    if "peft_type" in config:
        raise ModelError(
            f"{where}: {folder} is in the form of PEFT: train it with mlx_lm.lora, or merge it "
            "into its model and serve that"
        )
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise ModelError(
            f"{where}: fine_tune_type is 'full', which replaces the model's own weights: make a "
            "model of it with mlx_lm.fuse, and serve that"
        )
    _check_fields(f"{where}: {folder / CONFIG}", config, kind)
    if not (folder / WEIGHTS).is_file():
        raise ModelError(f"{where}: {folder} holds no {WEIGHTS}: check the path")
    return config


def _check_fields(where: str, config: Mapping[str, Any], kind: Any) -> None:
    """Raises ModelError where what mlx-lm needs is not there, or not what it should be."""
    if kind not in _TYPES:
        raise ModelError(f"{where}: fine_tune_type is {kind!r}; it must be {' or '.join(_TYPES)}")
    layers, parameters = config.get("num_layers"), config.get("lora_parameters")
    if type(layers) is not int:
        raise ModelError(
            f"{where}: num_layers is {layers!r}; it must be a number of layers, or -1 for all"
        )
    if not isinstance(parameters, dict):
        raise ModelError(f"{where}: lora_parameters is {parameters!r}; it must be an object")
    rank = parameters.get("rank")
    if type(rank) is not int or rank < 1:
        raise ModelError(f"{where}: lora_parameters.rank is {rank!r}; it must be 1 or more")
    for name in ("scale", "dropout"):
        if type(value := parameters.get(name)) not in (int, float):
            raise ModelError(f"{where}: lora_parameters.{name} is {value!r}; it must be a number")


def put_layers_on(network: Module, config: Mapping[str, Any], adapter: Adapter) -> None:
    """Replaces the layers that an adapter changes; their own weights are not read yet."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    kind, parameters = config.get("fine_tune_type", "lora"), config["lora_parameters"]
    try:
        linear_to_lora_layers(network, config["num_layers"], parameters, use_dora=kind == "dora")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"adapter {adapter.model_id}: it does not fit the model: {one_line(error)}"
        ) from error


def load_weights(network: Module, adapter: Adapter) -> None:
    """Reads an adapter's weights into the layers made for it, and tries them with one token."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlx_rq.engine.models.dora import fix_norms

    where = f"adapter {adapter.model_id}"
    try:
        weights: Any = mx.load(str(adapter.folder / WEIGHTS))
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{where}: cannot read {WEIGHTS}: {one_line(error)}") from error
    parameters: Any = tree_flatten(network.parameters())
    places = {name: value for name, value in parameters if name.rpartition(".")[2] in _LEAVES}
    if objections := _objections(places, weights):
        shown = "; ".join(objections[:_SHOWN])
        more = f"; and {len(objections) - _SHOWN} more" if len(objections) > _SHOWN else ""
        raise ModelError(f"{where}: it does not fit the model: {shown}{more}")
    network.load_weights(list(weights.items()), strict=False)
    fix_norms(network)
    network.eval()  # in training, some of an adapter is left out at random
    mx.eval(list(weights.values()))
    try:
        mx.eval(network(mx.zeros((1, 1), mx.int32)))
    except (AttributeError, TypeError, ValueError) as error:  # it looks into a layer's weights
        raise ModelError(
            f"{where}: the model cannot be adapted there: {one_line(error)}"
        ) from error


def _objections(places: Mapping[str, mx.array], weights: Mapping[str, mx.array]) -> list[str]:
    """Says what is wrong with an adapter's tensors, for the layers that they are meant for."""
    unknown = [f"the model has no place for {name}" for name in weights.keys() - places.keys()]
    missing = [f"{name} is missing" for name in places.keys() - weights.keys()]
    shapes = [
        f"{name} is {list(weights[name].shape)}; it must be {list(places[name].shape)}"
        for name in weights.keys() & places.keys()
        if weights[name].shape != places[name].shape
    ]
    return sorted(shapes) + sorted(unknown) + sorted(missing)


def fingerprint_of(folder: Path) -> str:
    """Names an adapter by all of it: one that is trained again keeps the size of its weights."""
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with (folder / WEIGHTS).open("rb") as weights:
        digest.update(hashlib.file_digest(weights, "sha256").digest())
    return digest.hexdigest()[:8]
