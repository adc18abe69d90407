"""When the model of a worker changes: looks at what waits, loads, unloads, remembers failures."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from redis import Redis

from mlx_rq.jobs.openai.errors import ErrorObject, error_object
from mlx_rq.jobs.openai.priority import PRIORITIES
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.backlog import waiting_in
from mlx_rq.worker.models.choice import Backlog, Change, Choice
from mlx_rq.worker.models.loading_notes import LoadingNotes
from mlx_rq.worker.models.switch import EngineSwitch, ServedModel

logger = logging.getLogger("mlx_rq.worker")

LOOK_SECONDS = 1.0
"""A worker that is busy looks this often at what waits for its other models."""

AGAIN_SECONDS = 60.0
"""A model that could not be loaded is tried again after so long, if there are jobs for it.

One that took the worker with it is tried after so long, too, then after twice as long.
"""

MOST_DEATHS = 3
"""After so many workers that died while they loaded a model its jobs are refused."""

GIVEN_UP_SECONDS = 3600.0
"""So long after the last of them; then it is tried once more."""

_BEAT_SECONDS = 1.0


class Interrupted(BaseException):
    """Loading was broken off, because the worker is to stop. Not for foreign code to catch."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a model could not be loaded, and until when that is taken for granted."""

    reason: str
    until: float


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
        notes: LoadingNotes = LoadingNotes(None),  # noqa: B008 (it keeps nothing)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`beat` is called while a model is loaded, so that nobody takes that for a stall."""
        self._switch = switch
        self._backlogs = backlogs
        self._unload_after = unload_after
        self._beat = beat
        self._clock = clock
        bases = {model.id: model.base_id for model in switch.models.values()}
        self._choice = Choice(max_wait, bases=bases, clock=clock)
        self._note_loaded()
        self._notes = notes
        self._failures: dict[str, _Failure] = {}
        self._rests_until: dict[str, float] = {}
        self._take_note_of_deaths()
        self._waits_here = False
        self._looked_at = -LOOK_SECONDS
        self._worked_at = clock()
        self._loading_thread: int | None = None
        self.next: Change | None = None
        """The model that comes next, if jobs wait for one."""
        self.resting = False
        """Whether jobs wait for a model that is not tried now, since a worker died of it."""
        self.unloadable: tuple[ServedModel, ...] = ()
        """Those that cannot be loaded, though jobs wait for them."""

    @property
    def never(self) -> bool:
        """Whether the one model stays for good."""
        switch = self._switch
        one = len(switch.models) == 1 and switch.loaded is not None
        return one and self._unload_after is None

    @property
    def due(self) -> bool:
        """Whether no more jobs of the loaded model are to begin."""
        return self.next is not None and self.next.due

    @property
    def more(self) -> bool:
        """Whether jobs wait, as of the last look, that are not of the loaded model."""
        return self.next is not None or bool(self.unloadable) or self.resting

    def is_look_due(self, busy: bool) -> bool:
        """Whether it is time to look at what waits: at once where there is nothing to do."""
        now = self._clock()
        if busy:
            self._worked_at = now
        return not busy or now - self._looked_at >= LOOK_SECONDS

    def look(self, held: Iterable[int]) -> None:
        """Looks at what waits; `held` are the ranks of the jobs that have been claimed."""
        ranks, now = list(held), self._clock()
        self._looked_at = now
        backlogs = dict(self._backlogs())
        failed = [
            model
            for model in self._switch.models.values()
            if (failure := self._failure_of(model)) is not None and failure.until > now
        ]
        self.unloadable = tuple(model for model in failed if backlogs.pop(model.id).jobs)
        resting = [backlogs.pop(model) for model in list(backlogs) if self._rests(model)]
        self.resting = any(backlog.jobs for backlog in resting)
        if (here := self._switch.loaded) is not None:
            waiting = backlogs[here.id].ranks
            self._waits_here = any(waiting)
            backlogs[here.id] = Backlog(
                tuple(jobs + ranks.count(rank) for rank, jobs in enumerate(waiting))
            )
        self.next = self._choice.next(backlogs)

    def claimed(self, jobs: int) -> None:
        """Takes note of how many jobs a claim of the loaded model brought."""
        if jobs or self._waits_here:
            self._choice.claimed(jobs)

    def load_next(self) -> None:
        """Loads the model that is due; where that fails, remembers why, and what is loaded then."""
        assert self.next is not None
        model, self.next = self._switch.models[self.next.model], None
        logger.info("loading %s", model.id)
        try:
            with self._beating(), self._notes.noted(self._loaded_for(model)):
                self._switch.load(model.id)
        except Exception as error:  # foreign files fail in as many ways as there are models
            reason = next(filter(None, map(str.strip, str(error).splitlines())), repr(error))
            logger.error("%s cannot be loaded: %s", model.id, reason)
            # Without its base, none of the adapters can be put on.
            at_fault = self._loaded_for(model)
            self._failures[at_fault] = _Failure(reason, self._clock() + AGAIN_SECONDS)
            self._note_loaded()
            return
        for one in (model.id, model.base_id):
            self._failures.pop(one, None)
            self._rests_until.pop(one, None)
        self._note_loaded()
        self._worked_at = self._clock()
        logger.info("loaded %s in %.1f s", model.id, self._switch.load_seconds)

    def _note_loaded(self) -> None:
        """Tells the choice what is loaded now."""
        if (loaded := self._switch.loaded) is None:
            self._choice.unloaded()
        else:
            self._choice.loaded(loaded.id, self._switch.load_seconds)

    def _loaded_for(self, model: ServedModel) -> str:
        """Says what has to be loaded for a model: its weights, or what is adapted of them."""
        loaded = self._switch.loaded
        is_there = loaded is not None and loaded.base_id == model.base_id
        return model.id if is_there else model.base_id

    def _take_note_of_deaths(self) -> None:
        """Lets models rest that took workers with them; gives up those that did so often."""
        there = self._switch.loaded
        for model, deaths in self._notes.deaths().items():
            if there is not None and model == there.id:
                continue
            ago = time.time() - deaths.last
            logger.error("%d workers died while they loaded %s", deaths.count, model)
            if deaths.count < MOST_DEATHS:
                rest = AGAIN_SECONDS * 2 ** (deaths.count - 1) - ago
                self._rests_until[model] = self._clock() + rest
            else:
                reason = (
                    f"{deaths.count} workers died while they loaded it, most likely for want of "
                    "memory; choose a smaller one, or one of fewer bits"
                )
                until = self._clock() + GIVEN_UP_SECONDS - ago
                self._failures[model] = _Failure(reason, until)

    def _rests(self, model_id: str) -> bool:
        model, now = self._switch.models[model_id], self._clock()
        return any(self._rests_until.get(one, now) > now for one in (model.id, model.base_id))

    def _failure_of(self, model: ServedModel) -> _Failure | None:
        return self._failures.get(model.base_id) or self._failures.get(model.id)

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
        failure = self._failure_of(model)
        assert failure is not None
        return error_object(
            f"The model could not be loaded: {failure.reason}",
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
        if model is self._switch.loaded:
            return {"state": "loaded"}
        if model is self._switch.loading:
            return {"state": "loading"}
        if (failure := self._failure_of(model)) is not None:
            return {"state": "failed", "why": failure.reason}
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


def backlogs_of(connection: Redis, models: Iterable[ServedModel]) -> dict[str, Backlog]:
    """Counts what waits for each of the models, by its id, in one round trip."""
    queues = [
        (model.id, rank, keys.queue_name(name, priority))
        for model in models
        for rank, priority in enumerate(PRIORITIES)
        for name in model.names
    ]
    ranks: dict[str, list[int]] = {}
    waiting = waiting_in(connection, [queue for _, _, queue in queues])
    for (model_id, rank, _), jobs in zip(queues, waiting, strict=True):
        ranks.setdefault(model_id, [0] * len(PRIORITIES))[rank] += jobs
    return {model_id: Backlog(tuple(of)) for model_id, of in ranks.items()}
