"""A model with an adapter on it, or with several of which each row of a step has its own.

The layers that an adapter changes are replaced by mlx-lm's own (those of DoRA by `dora.py`'s, those
of several adapters by `mixed.py`'s), which refer to the model's weights as they are; taking it off
puts the plain layers back.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mlx.nn.layers.base import Module
from mlx.utils import tree_unflatten

from mlx_rq.engine.interface import Adapter
from mlx_rq.engine.kv.prefix_key import MOST_ADAPTERS
from mlx_rq.engine.models.adapters import check_adapter, fingerprint_of, load_weights, put_layers_on
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.models.mixed import (
    MixedLinear,
    Parts,
    mixed_layers,
    part_of,
    pays,
    stacked_bytes,
    tried_in_one_step,
)

logger = logging.getLogger("mlx_rq.engine")


class RowAdapter(NamedTuple):
    """With what a row is computed: the number of its adapter (0: none), and the two together."""

    number: int
    model: LoadedModel


class AdaptedModel:
    """A loaded model: with an adapter on it, or with those that are mixed, if any."""

    def __init__(self, base: LoadedModel, *, mix: bool | None = None) -> None:
        """With `mix`, rows may have adapters of their own; None: where that is quicker."""
        self._base = base
        self._mix = mix
        self._plain: list[tuple[str, Module]] = []
        """The layers that others took the place of."""
        self._mixed_layers: list[tuple[str, MixedLinear]] = []
        self._mixed: dict[str, RowAdapter] = {}
        self.model = base
        """What all rows are computed with that have no adapter of their own."""

    @property
    def mixed_bytes(self) -> int:
        """Bytes of the adapters that are mixed."""
        return sum(layer.own_bytes for _, layer in self._mixed_layers)

    def row_of(self, name: str) -> RowAdapter:
        """Says with what a row is computed for which this adapter, or none, is asked for."""
        return self._mixed.get(name) or RowAdapter(0, self.model)

    def put_on(self, adapter: Adapter) -> None:
        """Puts an adapter on the model, by itself.

        Raises ModelError where it does not fit, and whatever loading raises; then it is taken off.
        """
        config = check_adapter(adapter)
        self._strip()
        network = self._base.model
        before = dict(network.named_modules())
        try:
            try:
                put_layers_on(network, config, adapter)
            finally:
                self._plain = [
                    (name, before[name])
                    for name, module in network.named_modules()
                    if name in before and before[name] is not module
                ]
            load_weights(network, adapter)
        except BaseException:
            self.take_off()
            raise
        self.model = replace(
            self._base,
            model_id=adapter.model_id,
            fingerprint=f"{self._base.fingerprint}_{fingerprint_of(adapter.folder)}",
        )

    def take_off(self) -> None:
        """Takes off the adapter that is on the model by itself; those that are mixed come back."""
        self._strip()
        self._plain = [(name, layer.linear) for name, layer in self._mixed_layers]
        _replace_layers(self._base.model, self._mixed_layers)

    def mix(
        self, adapters: Mapping[str, Adapter], *, rows: int, most_bytes: int
    ) -> Collection[str]:
        """Puts on adapters together, by the names that rows have for them; says which, by id.

        Left out are those that cannot be put on, that change other layers than linear ones, and
        that would take more than `most_bytes` with those before them. None is put on where a step
        of so many rows is not computed as each alone, or is not quicker than one for each adapter.
        """
        assert not self._mixed_layers, "it is done once"
        if self._mix is False or rows == 1:
            return ()
        models, all_parts = self._read(dict.fromkeys(adapters.values()), most_bytes)
        if not models:
            return ()
        network, count = self._base.model, len(models)
        try:
            self._mixed_layers = mixed_layers(network, all_parts)
            self.take_off()
            against = tried_in_one_step(network, count)
            if not against and not (self._mix or pays(network, count, rows)):
                against = "a step for each adapter is quicker"
            if against:
                name = self._base.model_id
                logger.info("%s: adapters are put on one at a time: %s", name, against)
                self._unmix()
                return ()
        except BaseException:
            self._unmix()
            raise
        logger.info("%s: rows of %d adapters share a step", self._base.model_id, count)
        numbers = {model.model_id: RowAdapter(n, model) for n, model in enumerate(models, 1)}
        self._mixed = {
            name: numbers[adapter.model_id]
            for name, adapter in adapters.items()
            if adapter.model_id in numbers
        }
        return numbers.keys()

    def _read(
        self, adapters: Collection[Adapter], most_bytes: int
    ) -> tuple[list[LoadedModel], list[Parts]]:
        """Reads the adapters that can be mixed: what each makes of the model, and adds to it."""
        models: list[LoadedModel] = []
        all_parts: list[Parts] = []
        for adapter in adapters:
            try:
                self.put_on(adapter)
                model, parts = self.model, self._parts()
            except Exception as error:  # it is told once more to those who ask for it
                logger.warning("%s", error)
                continue
            self.take_off()
            fits = stacked_bytes([*all_parts, parts]) <= most_bytes
            if parts and fits and len(models) < MOST_ADAPTERS:
                models.append(model)
                all_parts.append(parts)
        return models, all_parts

    def _parts(self) -> Parts:
        """What the adapter that is on adds to which layers: nothing, where it cannot be mixed."""
        layers = dict(self._base.model.named_modules())
        parts = {name: part_of(layers[name]) for name, _ in self._plain}
        found = {name: part for name, part in parts.items() if part is not None}
        return found if len(found) == len(parts) else {}

    def _unmix(self) -> None:
        self._strip()
        self._mixed_layers = []

    def _strip(self) -> None:
        """Has the model's own layers in their places."""
        plain, self._plain, self.model = self._plain, [], self._base
        _replace_layers(self._base.model, plain)


def _replace_layers(network: Module, layers: Sequence[tuple[str, Module]]) -> None:
    if layers:
        network.update_modules(tree_unflatten(list(layers)))
