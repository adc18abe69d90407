"""When the model of a worker changes: looks at what waits, loads, unloads."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from mlx_rq.jobs.openai.errors import ErrorObject, error_object
from mlx_rq.jobs.openai.words import one_line
from mlx_rq.jobs.queue.workers import ModelState
from mlx_rq.worker.models.choice import Backlog, Change, Choice
from mlx_rq.worker.models.loading_notes import LoadingNotes
from mlx_rq.worker.models.setbacks import Setbacks
from mlx_rq.worker.models.switch import EngineSwitch, ServedModel

logger = logging.getLogger("mlx_rq.worker")

LOOK_SECONDS = 1.0
"""A worker that is busy looks this often at what waits for its other models."""

_BEAT_SECONDS = 1.0


class Interrupted(BaseException):
    """Loading was broken off, because the worker is to stop. Not for foreign code to catch."""


class ModelChanges:
    """Loads what is to be loaded, for a worker that asks between two pieces of its work."""

    def __init__(
        self,
        switch: EngineSwitch,
        backlogs: Callable[[], Mapping[str, Backlog]],
        *,
        max_wait: float,
        unload_after: float | None,
        beat: Callable[[], None],
        others: Callable[[], Mapping[str, ModelState]] = lambda: MappingProxyType({}),
        notes: LoadingNotes = LoadingNotes(None),  # noqa: B008 (it keeps nothing)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`beat` is called while a model is loaded, so that nobody takes that for a stall.

        `others` tells how far other live workers that take jobs are with the same models, by id.
        """
        self._switch = switch
        self._backlogs = backlogs
        self._others = others
        self._unload_after = unload_after
        self._beat = beat
        self._clock = clock
        bases = {model.id: model.base_id for model in switch.models.values()}
        self._choice = Choice(max_wait, bases=bases, clock=clock)
        self._notes = notes
        self._setbacks = Setbacks(notes, clock)
        self._note_loaded()
        self._waits_here = self._claimed_none = False
        self._looked_at = -LOOK_SECONDS
        self._worked_at = clock()
        self._loading_thread: int | None = None
        self.next: Change | None = None
        """The model that comes next, if jobs wait for one."""
        self._resting = False
        self._elsewhere: set[str] = set()
        self.unloadable: tuple[ServedModel, ...] = ()
        """Those that cannot be loaded, though jobs wait for them."""

    @property
    def never(self) -> bool:
        """Whether all models are there, and stay for good."""
        switch = self._switch
        return len(switch.models) == len(switch.present) and self._unload_after is None

    @property
    def due(self) -> bool:
        """Whether no more jobs of the loaded model are to begin."""
        return self.next is not None and self.next.due

    @property
    def more(self) -> bool:
        """Whether jobs wait, as of the last look, that are not of the loaded model."""
        return self.next is not None or bool(self.unloadable) or self._resting

    @property
    def later(self) -> bool:
        """Whether jobs wait for a model that is not to be loaded yet.

        A worker died of it, or another one has it loaded and may come first.
        """
        return self._resting or (self.next is not None and not self.next.due)

    @property
    def able(self) -> Iterator[str]:
        """Names of the models that could be loaded here, as far as is known."""
        for model in self._switch.models.values():
            if not (self._setbacks.reason(model) or self._setbacks.rests(model)):
                yield from model.names

    @property
    def awaited(self) -> Iterator[str]:
        """Names of the models whose next job may be begun at once: its wake-up is for this worker.

        That of a model which another worker has loaded is left to that one.
        """
        left = self._elsewhere - {model.id for model in self._switch.present}
        elsewhere = {name for model in left for name in self._switch.models[model].names}
        return (name for name in self.able if name not in elsewhere)

    def is_look_due(self, busy: bool) -> bool:
        """Whether it is time to look at what waits: at once where there is nothing to do."""
        now = self._clock()
        if busy:
            self._worked_at = now
        return not busy or now - self._looked_at >= LOOK_SECONDS

    def look(self, held: Iterable[int]) -> None:
        """Looks at what waits; `held` are the ranks of the jobs that have been claimed."""
        ranks, self._looked_at = list(held), self._clock()
        backlogs, others = dict(self._backlogs()), self._others()
        unloadable, self._resting = [], False
        for model in self._switch.models.values():
            if model.too_large:
                del backlogs[model.id]
            elif self._setbacks.is_given_up(model):
                if backlogs.pop(model.id).jobs and others.get(model.id, "failed") == "failed":
                    unloadable.append(model)
            elif self._setbacks.rests(model):
                self._resting |= backlogs.pop(model.id).jobs > 0
        self.unloadable = tuple(unloadable)
        for base, together in self._switch.together.items():  # one of them stands for all
            its = [backlogs.pop(model_id) for model_id in together if model_id in backlogs]
            if its:
                backlogs[base] = Backlog.of_all(its)
        if (here := self._switch.loaded) is not None:
            waiting = backlogs[here.id].ranks
            self._note_waiting(any(waiting))
            backlogs[here.id] = Backlog(
                tuple(jobs + ranks.count(rank) for rank, jobs in enumerate(waiting))
            )
        self._elsewhere = {model for model in others if others[model] in ("loaded", "loading")}
        self.next = self._choice.next(backlogs, self._elsewhere)

    def claimed(self, jobs: int) -> None:
        """Takes note of how many jobs a claim of the loaded model brought."""
        self._claimed_none = not jobs
        if jobs:
            self._choice.claimed(jobs)

    def _note_waiting(self, waits: bool) -> None:
        """Takes note of whether jobs wait for the loaded model, those not counted that are held.

        They are left to other workers where they waited before a claim that brought none, and still
        do after it. (Where none wait any more, this worker may have them all.)
        """
        if waits and self._waits_here and self._claimed_none:
            self._choice.claimed(0)
        self._waits_here, self._claimed_none = waits, False

    def load_next(self) -> None:
        """Loads the model that is due; where that fails, remembers why, and what is loaded then."""
        assert self.next is not None
        model, self.next = self._switch.models[self.next.model], None
        logger.info("loading %s", model.id)
        try:
            with self._beating(), self._notes.noted(self._loaded_for(model)):
                self._switch.load(model.id)
        except Exception as error:  # foreign files fail in as many ways as there are models
            reason = one_line(error)
            logger.error("%s cannot be loaded: %s", model.id, reason)
            # Without its base, none of the adapters can be put on.
            at_fault = self._loaded_for(model)
            self._setbacks.failed(at_fault, reason)
            self.unloadable = (*self.unloadable, model)  # until the next look tells for sure
            self._note_loaded()
            return
        self._waits_here = self._claimed_none = False
        self._note_loaded()
        self._worked_at = self._clock()
        logger.info("loaded %s in %.1f s", model.id, self._switch.load_seconds)

    def _note_loaded(self) -> None:
        """Tells the choice what is loaded now, and that this one could be loaded."""
        if (loaded := self._switch.loaded) is None:
            self._choice.unloaded()
        else:
            self._choice.loaded(loaded.id, self._switch.load_seconds)
            for model in self._switch.present:
                self._setbacks.loaded(model)  # else what it met would stand for its adapters', too

    def _loaded_for(self, model: ServedModel) -> str:
        """Says what has to be loaded for a model: its weights, or what is adapted of them."""
        loaded = self._switch.loaded
        is_there = loaded is not None and loaded.base_id == model.base_id
        return model.id if is_there else model.base_id

    def unload_idle(self) -> bool:
        """Frees the memory of a model that had nothing to do for long; says whether it did."""
        after, model = self._unload_after, self._switch.loaded
        if after is None or model is None or self._clock() - self._worked_at < after:
            return False
        self._switch.unload()
        self._choice.unloaded()
        logger.info("unloaded %s: nothing to do for %.0f s", model.id, after)
        return True

    def interrupt(self) -> None:
        """Breaks off loading, where a signal of this thread calls it in the middle of that."""
        if self._loading_thread == threading.get_ident():
            raise Interrupted

    def error(self, model: ServedModel) -> ErrorObject:
        """What the jobs of a model are told that cannot be loaded."""
        return error_object(
            f"The model could not be loaded: {self._setbacks.reason(model)}",
            code="model_not_loaded",
            param="model",
            type="server_error",
        )

    def describe(self) -> dict[str, Any]:
        """Says which model is loaded, which could be, and which is next and why."""
        coming = self.next
        return {
            "models": [
                {"id": model.id, "names": list(model.names), **self._state_of(model)}
                for model in self._switch.models.values()
            ],
            "next": None if coming is None else {"model": coming.model, "why": coming.why},
        }

    def _state_of(self, model: ServedModel) -> dict[str, str]:
        if model in self._switch.present:
            return {"state": "loaded"}
        if model is self._switch.loading:
            return {"state": "loading"}
        if why := self._setbacks.reason(model):
            return {"state": "failed", "why": why}
        return {"state": "can_be_loaded"}

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Says now and then that all is well: loading may take minutes, a download hours."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(_BEAT_SECONDS):
                self._beat()

        beats = threading.Thread(target=beat, name="loading", daemon=True)
        beats.start()
        self._loading_thread = threading.get_ident()
        try:
            yield
        finally:
            self._loading_thread = None
            over.set()
            beats.join()
