"""One engine for several models and their adapters, of which one at most is loaded at a time.

A model and those of its adapters that its engine mixes are loaded together.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlx_rq.engine.interface import Adapter, ModelEngine, Outcome, Partial, Task, Totals
from mlx_rq.jobs.openai.requests import ANY_MODEL

_HELD_NOW = ("prefixes_held", "prefix_bytes")
"""Fields of Totals that go with the engine; the others count on."""


@dataclass(frozen=True)
class ServedModel:
    """A model that can be loaded, under the names by which jobs ask for it; the first is its id.

    With an `adapter` it is loaded as the model that has `base` for its id, and that is adapted.
    """

    names: tuple[str, ...]
    load: Callable[[], ModelEngine]
    base: str = ""
    adapter: Adapter | None = None
    too_large: str = ""
    """Why this machine cannot load it, where that is known beforehand."""

    @property
    def id(self) -> str:
        return self.names[0]

    @property
    def base_id(self) -> str:
        """The id of the model whose weights are loaded for it."""
        return self.base or self.id


class EngineSwitch:
    """An engine (see `mlx_rq.engine.interface.Engine`): that of the model which is loaded.

    Where none is, it has no room for tasks and does nothing.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.id: model for model in models}
        self.loaded: ServedModel | None = None
        self.loading: ServedModel | None = None
        self.together: dict[str, tuple[str, ...]] = {}
        """Ids of a model and of its adapters that were loaded together with it, by the model's."""
        self.load_seconds = 0.0
        """How long it took to load the model that was loaded last."""
        self._engine: ModelEngine | None = None
        self._share = 1.0
        self._before = Totals()
        self._on_progress: Callable[[], None] = lambda: None

    @classmethod
    def of(cls, engine: ModelEngine, served_names: Sequence[str] = ()) -> "EngineSwitch":
        """Gives one that has a model loaded, and knows no other."""
        names = dict.fromkeys([engine.model_id, *served_names, ANY_MODEL])

        def load() -> ModelEngine:
            return engine

        switch = cls([ServedModel(tuple(names), load)])
        switch.load(engine.model_id)
        return switch

    def load(self, model_id: str) -> None:
        """Loads a model in the place of another; weights that it has in common with it stay.

        An adapter that is mixed is there with its base, which counts as the one that is loaded.
        Raises what loading raises. Then no model is loaded, or the one that was to be adapted.
        """
        started = time.monotonic()
        self.loading = wanted = self.models[model_id]
        try:
            base = self.models[wanted.base_id]
            if self._engine is None or self.loaded is None or self.loaded.base_id != base.id:
                self.unload()
                self._engine, self.loaded = self._ready(base.load()), base
                self.together[base.id] = (base.id,)  # should mixing raise
                self.together[base.id] = self._mixed_with(base)
            if wanted.id in self.together[base.id]:
                wanted = base
            if self.loaded is not wanted:
                self.loaded = base  # and no more where it cannot be adapted
                self._engine.adapt(wanted.adapter)
                self.loaded = wanted
        finally:
            self.loading = None
            self.load_seconds = time.monotonic() - started

    def _mixed_with(self, base: ServedModel) -> tuple[str, ...]:
        """Has the engine of a model mix its adapters; tells which are together then, by id."""
        adapters = {
            name: model.adapter
            for model in self.models.values()
            if model.adapter is not None and model.base_id == base.id
            for name in model.names
        }
        mixed = self._engine.mix(adapters) if adapters and self._engine is not None else ()
        return (base.id, *mixed)

    @property
    def present(self) -> list[ServedModel]:
        """The models whose jobs may be begun: the one that is loaded, and what is mixed with it."""
        if self.loaded is None:
            return []
        together = self.together.get(self.loaded.id, (self.loaded.id,))
        return [self.models[model_id] for model_id in together]

    def _ready(self, engine: ModelEngine) -> ModelEngine:
        """Tells a new engine what the one before it was told."""
        if self._share < 1.0:
            engine.throttle(self._share)
        engine.on_progress = self._on_progress
        return engine

    def unload(self) -> None:
        """Frees the memory of the model. Its tasks have to be gone."""
        if self._engine is not None:
            self._before = self.totals
            for name in _HELD_NOW:
                setattr(self._before, name, 0)
            engine, self._engine, self.loaded = self._engine, None, None
            engine.close()

    def describe(self) -> dict[str, Any]:
        """Says which model is loaded, how it works, and what it has to do."""
        return {
            "model": self.model_id,
            "fingerprint": self.fingerprint,
            "prefix_sharing": self.prefix_sharing,
            "drafting": self.drafting,
            "capacity": self.capacity,
            "running": self.running,
            "waiting": self.waiting,
            "memory": dict(self.memory()),
            "totals": asdict(self.totals),
        }

    # What an engine is asked:

    @property
    def on_progress(self) -> Callable[[], None]:
        return self._on_progress

    @on_progress.setter
    def on_progress(self, told: Callable[[], None]) -> None:
        self._on_progress = told
        if self._engine is not None:
            self._engine.on_progress = told

    def memory(self) -> Mapping[str, int | None]:
        return {} if (engine := self._engine) is None else engine.memory()

    @property
    def model_id(self) -> str:
        """The loaded model's; where there is none, that of the first that could be."""
        return next(iter(self.models)) if self.loaded is None else self.loaded.id

    @property
    def fingerprint(self) -> str:
        return "" if self._engine is None else self._engine.fingerprint

    @property
    def prefix_sharing(self) -> str:
        return "" if self._engine is None else self._engine.prefix_sharing

    @property
    def drafting(self) -> str:
        return "" if self._engine is None else self._engine.drafting

    @property
    def totals(self) -> Totals:
        """Those of all models so far."""
        now = asdict(Totals() if self._engine is None else self._engine.totals)
        return Totals(**{name: count + now[name] for name, count in asdict(self._before).items()})

    @property
    def waiting(self) -> int:
        return 0 if self._engine is None else self._engine.waiting

    @property
    def waiting_tokens(self) -> int:
        return 0 if self._engine is None else self._engine.waiting_tokens

    @property
    def running(self) -> int:
        return 0 if self._engine is None else self._engine.running

    @property
    def capacity(self) -> int:
        return 0 if self._engine is None else self._engine.capacity

    @property
    def in_flight(self) -> Collection[str]:
        return () if self._engine is None else self._engine.in_flight

    @property
    def task_ids(self) -> Collection[str]:
        return () if self._engine is None else self._engine.task_ids

    def check(self) -> None:
        if self._engine is not None:
            self._engine.check()

    def throttle(self, share: float) -> None:
        self._share = share
        if self._engine is not None:
            self._engine.throttle(share)

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        if self._engine is None:
            assert not tasks, "no model is loaded"
            return []
        return self._engine.add(tasks)

    def step(self) -> list[Outcome]:
        return [] if self._engine is None else self._engine.step()

    def partial(self, task_ids: Collection[str]) -> Mapping[str, Sequence[Partial]]:
        return {} if self._engine is None else self._engine.partial(task_ids)

    def generated(self) -> Mapping[str, int]:
        return {} if self._engine is None else self._engine.generated()

    def spare(self, count: int) -> Collection[str]:
        return () if self._engine is None else self._engine.spare(count)

    def cancel(self, task_id: str) -> None:
        if self._engine is not None:
            self._engine.cancel(task_id)

    def close(self) -> None:
        self.unload()
