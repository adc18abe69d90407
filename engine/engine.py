"""The engine: takes tasks, plans them, keeps the batch full, gives outcomes.

One `step()` does a bounded piece of each kind of work, so that rows go on decoding while prompts
are prefilled: a chunk of each trunk that the next cohort stands on, the admission of one cohort,
one decode step.
The way of a row: `add` renders it → the schedule gives it a place → `_admit` hands it to those that
run, with its trunk → `decode` collects its tokens → `_finish` makes its task's outcome.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from itertools import islice

from mlx_rq.engine.errors import ended_by, failure, refusal
from mlx_rq.engine.interface import Outcome, Partial, Task, Totals
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.output.partial import partials
from mlx_rq.engine.output.response import answer
from mlx_rq.engine.scheduling.prompt_logprobs import Scoring
from mlx_rq.engine.scheduling.running_batch import Running
from mlx_rq.engine.scheduling.scheduler import Schedule
from mlx_rq.engine.scheduling.sequence import Row, rows_of
from mlx_rq.engine.scheduling.sequential import can_batch
from mlx_rq.engine.structured.output_format import Forms
from mlx_rq.engine.text.token_bytes import Spelling
from mlx_rq.jobs.openai.errors import RequestError

logger = logging.getLogger("mlx_rq.engine")

_ADMIT_SHARE = 4
"""Rows are admitted once this part of the batch (1/4) is free: each admission copies KV."""


class MLXEngine:
    """Generates with one MLX model. Make and use it on one thread (MLX streams demand that)."""

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions = EngineOptions(),  # noqa: B008 (frozen)
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        batches = can_batch(model.model)
        if not batches:
            logger.warning("%s cannot be batched: one row at a time", model.model_id)
            options = replace(options, rows=1)
        self._options = options
        self._rows_allowed = options.rows
        self._clock = clock
        self._tasks: dict[str, Task] = {}
        self._rows: dict[str, list[Row]] = {}  # of every task that has not ended
        self._forms = Forms(model, close_json=options.close_json)
        self._spelling = Spelling(model.tokenizer)
        self._scoring = Scoring()
        self._compiling: list[Row] = []  # rows whose grammars are not compiled yet
        self._alone: deque[Row] = deque()  # rows that are generated one at a time after an error
        self._schedule = Schedule(
            cohort_rows=options.rows,
            min_trunk_tokens=options.min_trunk_tokens,
            max_wait=options.max_wait,
        )
        self._totals = Totals()
        self._running = Running(model.model, options, self._totals, batches=batches, clock=clock)

    @property
    def model_id(self) -> str:
        return self._model.model_id

    @cached_property
    def fingerprint(self) -> str:
        model, versions = self._model, (f"{p}-{version(p)}" for p in ("mlx-rq", "mlx", "mlx-lm"))
        return f"{model.model_id}_{model.fingerprint}_{'_'.join(versions)}"

    @property
    def trunk_sharing(self) -> str:
        return str(self._running.sharing)

    @property
    def capacity(self) -> int:
        return self._rows_allowed

    def throttle(self, share: float) -> None:
        """Uses only a part (0 to 1) of the rows and the memory that there are, from now on."""
        self._rows_allowed = max(1, int(share * self._options.rows))
        self._running.memory.share = share

    @property
    def aboard(self) -> set[str]:
        """Ids of the tasks that the next step computes for: those at fault, should it abort."""
        rows = [*self._running, *islice(self._alone, 1)]
        if (scored := self._scoring.head) is not None:
            rows.append(scored)
        if not self._alone and (cohort := self._schedule.head(self._clock())) is not None:
            full = len(self._running) >= self._rows_allowed
            if not (full and all(map(self._running.trunks.holds, cohort.trunks))):
                rows += islice(cohort.rows, self._rows_allowed)
        return {row.task_id for row in self._asked_for(rows)}

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        waiting = len(self._schedule) + len(self._alone) + len(self._compiling)
        return waiting + len(self._scoring)

    @property
    def totals(self) -> Totals:
        totals, trunks, counters = self._totals, self._running.trunks, self._running.counters
        return replace(
            totals,
            distinct_tokens=self._schedule.distinct_tokens,
            prefilled_tokens=totals.prefilled_tokens + trunks.prefilled_tokens,
            positions_computed=totals.positions_computed + trunks.prefilled_tokens,
            prefill_seconds=counters.prompt_time + trunks.prefill_seconds,
            decode_seconds=counters.decode_time,
            decode_steps=counters.generation_steps,
            trunks_held=len(trunks),
            trunk_bytes=trunks.nbytes,
            trunks_evicted=trunks.evicted,
        )

    def kv_in_use(self) -> tuple[int, int]:
        """Bytes of KV held now, and the least that would do: each token of trunks and rows once."""
        return self._running.kv_in_use()

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Takes tasks in; returns the outcomes of those that can never be generated."""
        refused = []
        for task in tasks:
            rows = self._rendered(task)
            if isinstance(rows, Outcome):
                refused.append(rows)
                continue
            self._tasks[task.id] = task
            self._rows[task.id] = rows
            self._compiling += [row for row in rows if row.budget > 0]
            self._scoring.add(rows)
            self._totals.tasks += 1
        return refused + self._schedule_compiled()

    def _rendered(self, task: Task) -> list[Row] | Outcome:
        """Makes a task's rows; its outcome where it can never be generated."""
        try:
            rows = rows_of(task, self._model, self._forms, now=self._clock())
            self._running.memory.check(rows)
        except Exception as error:  # a template, a tokenizer: it is this request's alone
            return ended_by(error, task)
        return rows

    def _schedule_compiled(self) -> list[Outcome]:
        """Has the rows planned whose grammars are compiled by now; the others go on waiting."""
        refused = []
        for row in [row for row in self._compiling if row.form.ready]:
            if row not in self._compiling:
                continue  # another choice of the same task was refused
            try:
                row.start()
            except RequestError as error:
                refused.append(refusal(self._tasks[row.task_id], error))
                self.cancel(row.task_id)
            else:
                self._compiling.remove(row)
                self._schedule.add([row])
        return refused

    def cancel(self, task_id: str) -> None:
        """Forgets a task; a running row goes on as long as others wait for it as their twin."""
        self._tasks.pop(task_id, None)
        gone = set(self._rows.pop(task_id, ()))
        self._schedule.remove(gone)
        self._scoring.remove(gone)
        self._compiling = [row for row in self._compiling if row not in gone]
        self._alone = deque(row for row in self._alone if row not in gone)
        self._running.keep(self._is_asked_for)

    def _is_asked_for(self, row: Row) -> bool:
        """Says whether a task waits for this very row, not only for one of its name."""
        return row in self._rows.get(row.task_id, ())

    def _asked_for(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Gives those of the rows, and of the twins that wait for their answers, that count."""
        return (one for row in rows for one in (row, *row.twins) if self._is_asked_for(one))

    def step(self) -> list[Outcome]:
        """Does a bounded piece of work and returns the tasks that ended by it."""
        if not self._running and not self.waiting:
            return []
        ended = self._score_prompts()
        if not self._running and self.waiting == len(self._compiling) > 0:
            self._forms.wait()
        try:
            for row in self._running.make_room():
                self._put_back(row)
            self._admit()
            finished = self._running.decode()
        except Exception as error:
            return ended + self._recover(error)
        ended += [outcome for row in finished for outcome in self._finish(row)]
        # At the end: whoever asks before the next step who is aboard is told of them.
        return ended + self._schedule_compiled()

    def partial(self, task_ids: Collection[str]) -> Mapping[str, Sequence[Partial]]:
        """Tells what tasks have said so far, but for those that said nothing yet or ended."""
        leaders = {twin: row for row in self._running for twin in row.twins}
        said = {
            task_id: partials(self._tasks[task_id].request, self._rows[task_id], leaders)
            for task_id in task_ids
            if task_id in self._rows
        }
        return {task_id: told for task_id, told in said.items() if told}

    def _score_prompts(self) -> list[Outcome]:
        """Scores a chunk of a prompt whose own logprobs are asked for."""
        row = self._scoring.head
        if row is None:
            return []
        try:
            scored = self._scoring.advance()
            self._totals.prefilled_tokens += scored
            self._totals.positions_computed += scored
        except Exception as error:
            logger.error("the engine raised at a prompt's logprobs", exc_info=error)
            self.cancel(row.task_id)
            return [failure(row.task_id, error)]
        return self._complete(row.task_id)

    def _admit(self) -> None:
        """Builds a chunk of the next cohort's trunk; hands its rows over once there is room."""
        if not self._running.takes_rows:
            return
        if self._alone:
            if not self._running:
                self._running.add([self._alone.popleft()], None)
            return
        cohort = self._schedule.head(self._clock())
        if cohort is None:
            return
        trunk = None
        for key in cohort.trunks:  # ahead of the room, so that rows need not wait for it then
            trunk = self._running.trunks.build(key)
            if trunk is None:
                return  # not whole yet
        free = self._rows_allowed - len(self._running)
        enough = min(len(cohort.rows), max(1, self._rows_allowed // _ADMIT_SHARE))
        if self._running and free < enough:
            return
        # Only now: memory is made for rows that can come in, and nothing is looked up in vain.
        candidates = list(islice(cohort.rows, free))
        room, shared = self._running.room_for(candidates, trunk, self._schedule.prefixes)
        if room >= enough or not self._running:
            rows = self._schedule.take(max(1, room))
            if trunk is None:
                trunk, shared = self._running.held_for(rows)
            self._running.add(rows, trunk, shared)

    def _put_back(self, row: Row) -> None:
        """Has a row wait again; its twins, too, since they ask from the prompt on, it no more."""
        self._schedule.add(self._asked_for([row]))

    def _finish(self, row: Row) -> list[Outcome]:
        """Gives the outcomes of the tasks that this row, and its twins, complete."""
        for twin in row.twins:
            twin.answer_as(row)
            twin.cached_tokens = len(twin.prompt)
        task_ids = dict.fromkeys(row.task_id for row in (row, *row.twins))
        return [outcome for task_id in task_ids for outcome in self._complete(task_id)]

    def _complete(self, task_id: str) -> list[Outcome]:
        """Gives the outcome of a task once all of its rows are done."""
        rows = self._rows.get(task_id)
        if not rows or not all(row.done for row in rows):
            return []
        del self._rows[task_id]
        self._scoring.remove(rows)
        task = self._tasks.pop(task_id)
        try:
            names = {"model_id": self.model_id, "fingerprint": self.fingerprint}
            return [Outcome(task_id, answer(task, rows, self._spelling, **names))]
        except Exception as error:  # its text cannot be taken apart: it is this task's alone
            return [ended_by(error, task)]

    def _recover(self, error: Exception) -> list[Outcome]:
        """Finds the task that makes the engine raise: all that were aboard go on, one at a time.

        A task that was alone when it raised is the one at fault, and fails.
        """
        suspects = list(self._running)
        if not suspects and (cohort := self._schedule.head(self._clock())):
            suspects = list(cohort.rows)
        if not suspects:
            raise error  # nothing can be left out: the worker starts afresh
        task_ids = dict.fromkeys(row.task_id for row in self._asked_for(suspects))
        tasks = [self._tasks[task_id] for task_id in task_ids]
        logger.error("the engine raised with %d tasks aboard", len(tasks), exc_info=error)
        self._running.give_up()
        self._schedule.remove(suspects)
        if len(tasks) == 1:
            self.cancel(tasks[0].id)
            return [failure(tasks[0].id, error)]
        return [outcome for task in tasks for outcome in self._begin_alone(task)]

    def _begin_alone(self, task: Task) -> list[Outcome]:
        """Begins a task again, to be generated by itself; gives its outcome where that fails."""
        self.cancel(task.id)
        rows = self._rendered(task)
        if isinstance(rows, Outcome):
            return [rows]
        try:
            for row in rows:
                row.start()
        except RequestError as error:
            return [refusal(task, error)]
        self._tasks[task.id], self._rows[task.id] = task, rows
        self._alone.extend(rows)
        self._scoring.add(rows)
        return []
