"""The engine: takes tasks, plans them, keeps the batch full, gives outcomes.

One `step()` does a bounded piece of each kind of work, so that rows go on decoding while prompts
are prefilled: at most one chunk of the next trunk, the admission of one cohort, one decode step.
The way of a row: `add` renders it → `_replan` gives it a place → `_admit` hands it to the batch
with its trunk's cache → `_decode` collects its tokens → `_finish` makes its task's outcome.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mlx_rq.engine.answer import answer
from mlx_rq.engine.batch import RowGenerator
from mlx_rq.engine.models import LoadedModel
from mlx_rq.engine.plan import PlanRow, plan
from mlx_rq.engine.protocol import Outcome, Task, Totals
from mlx_rq.engine.rows import Row, rows_of
from mlx_rq.engine.trunks import Key, Trunk, Trunks, key_of
from mlx_rq.jobs.errors import RequestError, error_object

logger = logging.getLogger("mlx_rq.engine")

_ADMIT_SHARE = 4
"""Rows are admitted once this part of the batch (1/4) is free: each admission copies all KV."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How much the engine does at once.

    `rows` decode together; `chunk` prompt tokens are prefilled between two decode steps; trunks
    take at most `trunk_bytes`; a row that waited `max_wait` seconds comes before all others.
    """

    rows: int = 16
    chunk: int = 512
    trunk_bytes: int = 2 * 1024**3
    max_wait: float = 30.0
    min_trunk_tokens: int = 16


@dataclass(slots=True)
class _Cohort:
    """Rows that are admitted together, and the prefix that they share."""

    prefix: Key
    rows: deque[Row]


class MLXEngine:
    """Generates with one MLX model. Make and use it on one thread (MLX streams demand that)."""

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions = EngineOptions(),
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._options = options
        self._clock = clock
        self._tasks: dict[str, Task] = {}
        self._rows: dict[str, list[Row]] = {}  # of every task that has not ended
        self._waiting: list[Row] = []  # what the next plan is made of
        self._cohorts: deque[_Cohort] = deque()
        self._stale = False
        self._running: dict[int, Row] = {}  # by the generator's uid
        self._alone: deque[Row] = deque()  # rows that are generated one at a time after an error
        self._generator = self._new_generator()
        self._trunks = Trunks(
            model.model, budget=options.trunk_bytes, chunk=options.chunk, clock=clock
        )
        self._totals = Totals()

    def _new_generator(self) -> RowGenerator:
        return RowGenerator(
            self._model.model, rows=self._options.rows, prefill_step=self._options.chunk
        )

    @property
    def model_id(self) -> str:
        return self._model.model_id

    @property
    def fingerprint(self) -> str:
        return self._model.fingerprint

    @property
    def totals(self) -> Totals:
        counters = self._generator._counters
        return replace(
            self._totals,
            prefilled_tokens=self._totals.prefilled_tokens + self._trunks.prefilled_tokens,
            positions_computed=self._totals.positions_computed + self._trunks.prefilled_tokens,
            prefill_seconds=counters.prompt_time + self._trunks.prefill_seconds,
            decode_seconds=counters.decode_time,
            decode_steps=counters.generation_steps,
            trunks={
                "held": len(self._trunks),
                "bytes": self._trunks.nbytes,
                "evicted": self._trunks.evicted,
            },
        )

    @property
    def capacity(self) -> int:
        return self._options.rows

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._tasks) - len({row.task_id for row in self._running.values()})

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Takes tasks in; returns the outcomes of those that can never be generated."""
        refused = []
        now = self._clock()
        for task in tasks:
            try:
                rows = rows_of(task, self._model, now=now)
            except RequestError as error:
                refused.append(Outcome(task.id, {"error": error.error}))
                continue
            self._tasks[task.id] = task
            self._rows[task.id] = rows
            self._waiting += rows
            self._totals.tasks += 1
            self._stale = True
        return refused

    def cancel(self, task_id: str) -> None:
        """Forgets a task; a row that others wait for as their twin is generated all the same."""
        self._tasks.pop(task_id, None)
        gone = {row for row in self._rows.pop(task_id, ()) if not row.twins}
        self._waiting = [row for row in self._waiting if row not in gone]
        self._alone = deque(row for row in self._alone if row not in gone)
        self._stale = True
        self._generator.remove([uid for uid, row in self._running.items() if row in gone])  # type: ignore[no-untyped-call]
        self._running = {uid: row for uid, row in self._running.items() if row not in gone}

    def step(self) -> list[Outcome]:
        """Does a bounded piece of work and returns the tasks that ended by it."""
        if not self._waiting and not self._running and not self._alone:
            return []
        if self._stale:
            self._replan()
        try:
            self._admit()
            finished = self._decode()
        except Exception as error:
            return self._recover(error)
        return [outcome for row in finished for outcome in self._finish(row)]

    def _replan(self) -> None:
        """Orders all rows that wait, so that those with a common prefix go together."""
        now = self._clock()
        rows = self._waiting
        for row in rows:
            row.twins.clear()
        planned = plan(
            [
                PlanRow(
                    tokens=row.prompt,
                    max_tokens=row.budget,
                    priority=-1 if now - row.since > self._options.max_wait else row.rank,
                    duplicate_key=row.duplicate_key,
                )
                for row in rows
            ],
            cohort_rows=self._options.rows,
            min_trunk_tokens=self._options.min_trunk_tokens,
        )
        prefixes = [key_of(rows[t.row].prompt[: t.depth]) for t in planned.trunks]
        self._cohorts = deque(
            _Cohort(
                b"" if cohort.trunk is None else prefixes[cohort.trunk],
                deque(rows[index] for index in cohort.rows),
            )
            for cohort in planned.cohorts
        )
        for index, original in planned.duplicates.items():
            rows[original].twins.append(rows[index])
        self._stale = False

    def _admit(self) -> None:
        """Builds a chunk of the next cohort's trunk; hands its rows over once there is room."""
        generator = self._generator
        if generator.prefilling:
            return
        if self._alone:
            if not generator.decoding:
                self._insert([self._alone.popleft()], None)
            return
        while self._cohorts and not self._cohorts[0].rows:
            self._cohorts.popleft()
        if not self._cohorts:
            return
        cohort = self._cohorts[0]
        trunk = self._trunk_for(cohort)
        room = self._options.rows - generator.decoding
        enough = min(len(cohort.rows), max(1, self._options.rows // _ADMIT_SHARE))
        if (cohort.prefix and trunk is None) or (generator.decoding and room < enough):
            return
        rows = [cohort.rows.popleft() for _ in range(min(room, len(cohort.rows)))]
        self._insert(rows, trunk)

    def _trunk_for(self, cohort: _Cohort) -> Trunk | None:
        """The trunk to start a cohort from: the planned one when it is built, else any held one."""
        if cohort.prefix:
            pinned = frozenset(c.prefix for c in self._cohorts)
            return self._trunks.build(cohort.prefix, pinned)
        if len(cohort.rows) == 1:
            row = cohort.rows[0]
            return self._trunks.deepest(key_of(row.prompt), at_most=len(row.prompt) - 1)
        return None

    def _insert(self, rows: Sequence[Row], trunk: Trunk | None) -> None:
        depth = 0 if trunk is None else trunk.depth
        suffixes = [row.prompt[depth:] for row in rows]
        if trunk is not None:
            # The first to use a new trunk is the one that it was computed for.
            computed_for_first = depth if trunk.uses == 0 else 0
            self._trunks.use(trunk, len(rows))
            for row in rows:
                row.cached_tokens = depth
            rows[0].cached_tokens -= computed_for_first
        uids = self._generator.insert_rows(
            suffixes,
            samplers=[row.sampler for row in rows],
            max_tokens=[row.budget for row in rows],
            end_tokens=[row.end_tokens for row in rows],
            caches=[None if trunk is None else trunk.caches for _ in rows],
        )
        self._running.update(zip(uids, rows, strict=True))
        admitted = set(rows)
        for row in rows:
            admitted.update(row.twins)
        self._waiting = [row for row in self._waiting if row not in admitted]
        self._totals.prompt_tokens += sum(len(row.prompt) for row in admitted)
        self._totals.prefilled_tokens += sum(map(len, suffixes))
        self._totals.positions_computed += len(rows) * max(map(len, suffixes))

    def _decode(self) -> list[Row]:
        """Does one decode step and returns the rows that ended by it."""
        _, responses = self._generator.next()  # type: ignore[no-untyped-call]
        finished: list[Row] = []
        stopped: list[int] = []
        for response in responses:
            row = self._running[response.uid]
            self._totals.decoded_tokens += 1
            row.finish_reason = response.finish_reason
            # A stop token is not part of the text; the last token of a spent budget is.
            if response.finish_reason != "stop" and row.text.add(response.token):
                row.finish_reason = "stop"
                if response.finish_reason is None:
                    stopped.append(response.uid)
            if row.finish_reason is not None:
                finished.append(row)
                del self._running[response.uid]
        if stopped:
            self._generator.remove(stopped)  # type: ignore[no-untyped-call]
        return finished

    def _finish(self, row: Row) -> list[Outcome]:
        """Gives the outcomes of the tasks that this row, and its twins, complete."""
        for twin in row.twins:
            twin.text, twin.finish_reason = row.text, row.finish_reason
            twin.cached_tokens = len(twin.prompt)
        outcomes = []
        for task_id in dict.fromkeys(row.task_id for row in (row, *row.twins)):
            rows = self._rows.get(task_id)
            if rows and all(row.finish_reason is not None for row in rows):
                request = self._tasks.pop(task_id).request
                del self._rows[task_id]
                response = answer(
                    task_id, request, rows, model_id=self.model_id, fingerprint=self.fingerprint
                )
                outcomes.append(Outcome(task_id, response))
        return outcomes

    def _recover(self, error: Exception) -> list[Outcome]:
        """Finds the task that makes the engine raise: all that were aboard go on, one at a time.

        A task that was alone when it raised is the one at fault, and fails.
        """
        aboard = list(dict.fromkeys(row.task_id for row in self._running.values()))
        if not aboard and self._cohorts:
            aboard = list(dict.fromkeys(row.task_id for row in self._cohorts[0].rows))
        logger.error("the engine raised with %d tasks aboard", len(aboard), exc_info=error)
        self._running.clear()
        self._generator = self._new_generator()
        self._trunks.abandon()
        outcomes = []
        tasks = [task for task_id in aboard if (task := self._tasks.get(task_id))]
        for task in tasks:
            self.cancel(task.id)
            if len(tasks) == 1:
                message = f"The engine failed on this request: {type(error).__name__}: {error}"
                failure = error_object(message, code="engine_error", type="server_error")
                outcomes.append(Outcome(task.id, {"error": failure}))
            else:
                rows = rows_of(task, self._model, now=self._clock())
                self._tasks[task.id], self._rows[task.id] = task, rows
                self._alone.extend(rows)
        return outcomes
