"""Adapters: small weights beside those of a model, which are put on it and taken off again.

In the form in which mlx-lm trains them, LoRA and DoRA: a folder with `adapter_config.json` and
`adapters.safetensors`. The layers that an adapter changes are replaced by mlx-lm's own (those of
DoRA by `dora.py`'s), which refer to the model's weights as they are; taking it off puts the plain
layers back. Several are mixed where each row of a step may have its own (`mixed.py`).

Light to import: MLX comes in only when one is put on.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mlx_rq.engine.interface import Adapter
from mlx_rq.engine.kv.prefix_key import MOST_ADAPTERS
from mlx_rq.engine.models.hub import one_line
from mlx_rq.engine.models.load import LoadedModel, ModelError

if TYPE_CHECKING:
    import mlx.core as mx
    from mlx.nn.layers.base import Module

    from mlx_rq.engine.models.mixed import MixedLinear, Parts

logger = logging.getLogger("mlx_rq.engine")

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


class MixedAdapter(NamedTuple):
    """An adapter that some rows of a step may have: their number for it, and what it makes."""

    number: int
    model: LoadedModel


class AdaptedModel:
    """A loaded model, with an adapter on it, or with those that are mixed, if any."""

    def __init__(self, base: LoadedModel) -> None:
        self._base = base
        self._plain: list[tuple[str, Module]] = []
        """The layers that others took the place of."""
        self._mixed_layers: list[tuple[str, MixedLinear]] = []

    @property
    def mixed_bytes(self) -> int:
        """Bytes of the adapters that are mixed."""
        return sum(layer.own_bytes for _, layer in self._mixed_layers)

    def put_on(self, adapter: Adapter) -> LoadedModel:
        """Puts an adapter on the model, by itself; gives the two together.

        Raises ModelError where it does not fit, and whatever loading raises; then it is taken off.
        """
        config = check_adapter(adapter)
        self._strip()
        network = self._base.model
        before = dict(network.named_modules())
        try:
            try:
                _put_on(network, config, adapter)
            finally:
                self._plain = [
                    (name, before[name])
                    for name, module in network.named_modules()
                    if name in before and before[name] is not module
                ]
            _load(network, adapter)
        except BaseException:
            self.take_off()
            raise
        return replace(
            self._base,
            model_id=adapter.model_id,
            fingerprint=f"{self._base.fingerprint}_{_fingerprint(adapter.folder)}",
        )

    def take_off(self) -> LoadedModel:
        """Takes off the adapter that is on the model, if any; gives the model with those mixed."""
        self._strip()
        network = self._base.model
        self._plain = [(name, layer.linear) for name, layer in self._mixed_layers]
        _replace_layers(network, self._mixed_layers)
        return self._base

    def mix(
        self,
        adapters: Iterable[Adapter],
        *,
        most_bytes: int,
        worth: Callable[[Module, int], bool],
    ) -> dict[str, MixedAdapter]:
        """Puts on adapters together, each row's own; gives those with which that is done, by id.

        Left out are those that cannot be put on, that change other layers than linear ones, and
        that would take more than `most_bytes` with those before them. None is put on where rows
        are not computed as alone, or `worth(network, adapters)` is false.
        """
        from mlx_rq.engine.models.mixed import mixed_layers, stacked_bytes, tried_in_one_step

        assert not self._mixed_layers
        mixed: list[LoadedModel] = []
        all_parts: list[Parts] = []
        for adapter in adapters:
            model, parts = self._read(adapter)
            fits = len(mixed) < MOST_ADAPTERS and stacked_bytes([*all_parts, parts]) <= most_bytes
            if parts and fits:
                mixed.append(model)
                all_parts.append(parts)
        network = self._base.model
        try:
            self._mixed_layers = mixed_layers(network, all_parts)
            self.take_off()
            against = tried_in_one_step(network, len(mixed))
            if against:
                logger.warning("%s: adapters are not mixed: %s", self._base.model_id, against)
            if not mixed or against or not worth(network, len(mixed)):
                self._unmix()
        except BaseException:
            self._unmix()
            raise
        return {
            model.model_id: MixedAdapter(number, model)
            for number, model in enumerate(mixed, 1)
            if self._mixed_layers
        }

    def _read(self, adapter: Adapter) -> tuple[LoadedModel, Parts]:
        """Reads what an adapter adds to which layers: nothing, where it cannot be mixed."""
        from mlx_rq.engine.models.mixed import part_of

        model, parts = self._base, {}
        try:
            model = self.put_on(adapter)
            layers = dict(model.model.named_modules())
            parts = {name: part_of(layers[name]) for name, _ in self._plain}
        except Exception as error:  # it is told when somebody asks for it
            logger.warning("%s", error)
        self.take_off()
        found = {name: part for name, part in parts.items() if part is not None}
        return model, found if len(found) == len(parts) else {}

    def _unmix(self) -> None:
        self._strip()
        self._mixed_layers = []

    def _strip(self) -> None:
        """Has the model's own layers in their places."""
        plain, self._plain = self._plain, []
        _replace_layers(self._base.model, plain)


def _replace_layers(network: Module, layers: Sequence[tuple[str, Module]]) -> None:
    from mlx.utils import tree_unflatten

    if layers:
        network.update_modules(tree_unflatten(list(layers)))


def _put_on(network: Module, config: Mapping[str, Any], adapter: Adapter) -> None:
    """Replaces the layers that an adapter changes; their own weights are not read yet."""
    from mlx_lm.tuner.utils import linear_to_lora_layers

    kind, parameters = config.get("fine_tune_type", "lora"), config["lora_parameters"]
    try:
        linear_to_lora_layers(network, config["num_layers"], parameters, use_dora=kind == "dora")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"adapter {adapter.model_id}: it does not fit the model: {one_line(error)}"
        ) from error


def _load(network: Module, adapter: Adapter) -> None:
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


def _fingerprint(folder: Path) -> str:
    """Names an adapter by all of it: one that is trained again keeps the size of its weights."""
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with (folder / WEIGHTS).open("rb") as weights:
        digest.update(hashlib.file_digest(weights, "sha256").digest())
    return digest.hexdigest()[:8]
