"""The engine: takes tasks, plans them, keeps the batch full, gives outcomes.

One `step()` does a bounded piece of each kind of work, so that sequences go on decoding while
prompts are prefilled: a chunk of each prefix that the next prefill batch stands on, the admission
of one prefill batch, one decode step.

The way of a sequence: `add` renders it → the schedule gives it a
place → `_admit` hands it to those that run, with its prefix → `decode` collects its tokens →
`_finish` makes its task's outcome.
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
from mlx_rq.engine.output.response import WRITERS, answer
from mlx_rq.engine.scheduling.prompt_logprobs import PromptLogprobs
from mlx_rq.engine.scheduling.running_batch import RunningBatch
from mlx_rq.engine.scheduling.scheduler import Scheduler
from mlx_rq.engine.scheduling.sequence import TokenSequence, sequences_of
from mlx_rq.engine.scheduling.sequential import can_batch
from mlx_rq.engine.structured.output_format import OutputFormats
from mlx_rq.engine.text.token_bytes import TokenBytes
from mlx_rq.jobs.openai.errors import RequestError

logger = logging.getLogger("mlx_rq.engine")

_ADMIT_SHARE = 4
"""Sequences are admitted once this part of the batch (1/4) is free: each admission copies KV."""


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
            logger.warning("%s cannot be batched: one sequence at a time", model.model_id)
            options = replace(options, batch_size=1)
        self._options = options
        self._batch_size = options.batch_size
        self._clock = clock
        self._tasks: dict[str, Task] = {}
        self._sequences: dict[str, list[TokenSequence]] = {}  # of every task that has not ended
        self._output_formats = OutputFormats(model, close_json=options.close_json)
        self._token_bytes = TokenBytes(model.tokenizer)
        self._prompt_logprobs = PromptLogprobs()
        self._compiling: list[TokenSequence] = []  # sequences whose grammars are not compiled yet
        self._sequential: deque[TokenSequence] = deque()  # one at a time, after an error
        self._scheduler = Scheduler(
            batch_size=options.batch_size,
            min_prefix_tokens=options.min_prefix_tokens,
            max_wait=options.max_wait,
        )
        self._totals = Totals()
        self._running = RunningBatch(
            model.model, options, self._totals, batches=batches, clock=clock
        )

    @property
    def model_id(self) -> str:
        return self._model.model_id

    @cached_property
    def fingerprint(self) -> str:
        model, versions = self._model, (f"{p}-{version(p)}" for p in ("mlx-rq", "mlx", "mlx-lm"))
        return f"{model.model_id}_{model.fingerprint}_{'_'.join(versions)}"

    @property
    def prefix_sharing(self) -> str:
        return str(self._running.sharing)

    @property
    def capacity(self) -> int:
        return self._batch_size

    def throttle(self, share: float) -> None:
        """Uses only a part (0 to 1) of the sequences and the memory that there are, from now on."""
        self._batch_size = max(1, int(share * self._options.batch_size))
        self._running.memory.share = share

    @property
    def in_flight(self) -> set[str]:
        """Ids of the tasks that the next step computes for: those at fault, should it abort."""
        sequences = [*self._running, *islice(self._sequential, 1)]
        if (scored := self._prompt_logprobs.head) is not None:
            sequences.append(scored)
        if not self._sequential and (batch := self._scheduler.head(self._clock())) is not None:
            full = len(self._running) >= self._batch_size
            if not (full and all(map(self._running.prefix_cache.holds, batch.prefixes))):
                sequences += islice(batch.sequences, self._batch_size)
        return {sequence.task_id for sequence in self._asked_for(sequences)}

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        waiting = len(self._scheduler) + len(self._sequential) + len(self._compiling)
        return waiting + len(self._prompt_logprobs)

    @property
    def totals(self) -> Totals:
        totals, prefix_cache, counters = (
            self._totals,
            self._running.prefix_cache,
            self._running.counters,
        )
        return replace(
            totals,
            distinct_tokens=self._scheduler.distinct_tokens,
            prefilled_tokens=totals.prefilled_tokens + prefix_cache.prefilled_tokens,
            positions_computed=totals.positions_computed + prefix_cache.prefilled_tokens,
            prefill_seconds=counters.prompt_time + prefix_cache.prefill_seconds,
            decode_seconds=counters.decode_time,
            decode_steps=counters.generation_steps,
            prefixes_held=len(prefix_cache),
            prefix_bytes=prefix_cache.nbytes,
            prefixes_evicted=prefix_cache.evicted,
        )

    def kv_in_use(self) -> tuple[int, int]:
        """Bytes of KV held now, and the least that would do: each token of prefixes and
        sequences once.
        """
        return self._running.kv_in_use()

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Takes tasks in; returns the outcomes of those for which there is nothing to generate."""
        ended = []
        for task in tasks:
            sequences = self._rendered(task)
            if isinstance(sequences, Outcome):
                ended.append(sequences)
                continue
            self._tasks[task.id] = task
            self._sequences[task.id] = sequences
            self._compiling += [sequence for sequence in sequences if sequence.budget > 0]
            self._prompt_logprobs.add(sequences)
            self._totals.tasks += 1
        return ended + self._schedule_compiled()

    def _rendered(self, task: Task) -> list[TokenSequence] | Outcome:
        """Makes a task's sequences; its outcome where there is nothing to generate."""
        model_format = self._output_formats.model_format
        try:
            writer = WRITERS[task.request.kind]
            if (told := writer.at_once(task.request, self._model, model_format)) is not None:
                return Outcome(task.id, told)
            sequences = sequences_of(task, self._model, self._output_formats, now=self._clock())
            self._running.memory.check(sequences)
        except Exception as error:  # a template, a tokenizer: it is this request's alone
            return ended_by(error, task)
        return sequences

    def _schedule_compiled(self) -> list[Outcome]:
        """Has the sequences planned whose grammars are compiled by now; the others go on
        waiting.
        """
        refused = []
        for sequence in [sequence for sequence in self._compiling if sequence.output_format.ready]:
            if sequence not in self._compiling:
                continue  # another choice of the same task was refused
            try:
                sequence.start()
            except RequestError as error:
                refused.append(refusal(self._tasks[sequence.task_id], error))
                self.cancel(sequence.task_id)
            else:
                self._compiling.remove(sequence)
                self._scheduler.add([sequence])
        return refused

    def cancel(self, task_id: str) -> None:
        """Forgets a task; a running sequence goes on as long as others wait for it as their
        duplicate.
        """
        self._tasks.pop(task_id, None)
        gone = set(self._sequences.pop(task_id, ()))
        self._scheduler.remove(gone)
        self._prompt_logprobs.remove(gone)
        self._compiling = [sequence for sequence in self._compiling if sequence not in gone]
        self._sequential = deque(sequence for sequence in self._sequential if sequence not in gone)
        self._running.keep(self._is_asked_for)

    def _is_asked_for(self, sequence: TokenSequence) -> bool:
        """Says whether a task waits for this very sequence, not only for one of its name."""
        return sequence in self._sequences.get(sequence.task_id, ())

    def _asked_for(self, sequences: Iterable[TokenSequence]) -> Iterator[TokenSequence]:
        """Gives those of the sequences, and of the duplicates that wait for their answers, that
        count.
        """
        return (
            one
            for sequence in sequences
            for one in (sequence, *sequence.duplicates)
            if self._is_asked_for(one)
        )

    def step(self) -> list[Outcome]:
        """Does a bounded piece of work and returns the tasks that ended by it."""
        if not self._running and not self.waiting:
            return []
        ended = self._measure_prompts()
        if not self._running and self.waiting == len(self._compiling) > 0:
            self._output_formats.wait()
        try:
            for sequence in self._running.make_room():
                self._put_back(sequence)
            self._admit()
            finished = self._running.decode()
        except Exception as error:
            return ended + self._recover(error)
        ended += [outcome for sequence in finished for outcome in self._finish(sequence)]
        # At the end: whoever asks before the next step who is in flight is told of them.
        return ended + self._schedule_compiled()

    def partial(self, task_ids: Collection[str]) -> Mapping[str, Sequence[Partial]]:
        """Tells what tasks have said so far, but for those that said nothing yet or ended."""
        leaders = {
            duplicate: sequence for sequence in self._running for duplicate in sequence.duplicates
        }
        said = {
            task_id: partials(self._sequences[task_id], leaders)
            for task_id in task_ids
            if task_id in self._sequences
        }
        return {task_id: told for task_id, told in said.items() if told}

    def _measure_prompts(self) -> list[Outcome]:
        """Scores a chunk of a prompt whose own logprobs are asked for."""
        sequence = self._prompt_logprobs.head
        if sequence is None:
            return []
        try:
            scored = self._prompt_logprobs.advance()
            self._totals.prefilled_tokens += scored
            self._totals.positions_computed += scored
        except Exception as error:
            logger.error("the engine raised at a prompt's logprobs", exc_info=error)
            self.cancel(sequence.task_id)
            return [failure(sequence.task_id, error)]
        return self._complete(sequence.task_id)

    def _admit(self) -> None:
        """Builds a chunk of the next prefill batch's prefix; hands its sequences over once there
        is room.
        """
        if not self._running.takes_sequences:
            return
        if self._sequential:
            if not self._running:
                self._running.add([self._sequential.popleft()], None)
            return
        batch = self._scheduler.head(self._clock())
        if batch is None:
            return
        prefix = None
        for key in batch.prefixes:  # ahead of the room, so that sequences need not wait for it then
            prefix = self._running.prefix_cache.build(key)
            if prefix is None:
                return  # not whole yet
        free = self._batch_size - len(self._running)
        enough = min(len(batch.sequences), max(1, self._batch_size // _ADMIT_SHARE))
        if self._running and free < enough:
            return
        # Only now: memory is made for sequences that can come in, and nothing is looked up in vain.
        candidates = list(islice(batch.sequences, free))
        room, shared = self._running.room_for(candidates, prefix, self._scheduler.prefixes)
        if room >= enough or not self._running:
            sequences = self._scheduler.take(max(1, room))
            if prefix is None:
                prefix, shared = self._running.held_for(sequences)
            self._running.add(sequences, prefix, shared)

    def _put_back(self, sequence: TokenSequence) -> None:
        """Has a sequence wait again; its duplicates, too, since they ask from the prompt on, it
        no more.
        """
        self._scheduler.add(self._asked_for([sequence]))

    def _finish(self, sequence: TokenSequence) -> list[Outcome]:
        """Gives the outcomes of the tasks that this sequence, and its duplicates, complete."""
        for duplicate in sequence.duplicates:
            duplicate.answer_as(sequence)
            duplicate.cached_tokens = len(duplicate.prompt)
        task_ids = dict.fromkeys(sequence.task_id for sequence in (sequence, *sequence.duplicates))
        return [outcome for task_id in task_ids for outcome in self._complete(task_id)]

    def _complete(self, task_id: str) -> list[Outcome]:
        """Gives the outcome of a task once all of its sequences are done."""
        sequences = self._sequences.get(task_id)
        if not sequences or not all(sequence.done for sequence in sequences):
            return []
        del self._sequences[task_id]
        self._prompt_logprobs.remove(sequences)
        task = self._tasks.pop(task_id)
        try:
            names = {"model_id": self.model_id, "fingerprint": self.fingerprint}
            return [Outcome(task_id, answer(task, sequences, self._token_bytes, **names))]
        except Exception as error:  # its text cannot be taken apart: it is this task's alone
            return [ended_by(error, task)]

    def _recover(self, error: Exception) -> list[Outcome]:
        """Finds the task that makes the engine raise: all that were in flight go on, one at a time.

        A task that was alone when it raised is the one at fault, and fails.
        """
        suspects = list(self._running)
        if not suspects and (batch := self._scheduler.head(self._clock())):
            suspects = list(batch.sequences)
        if not suspects:
            raise error  # nothing can be left out: the worker starts afresh
        task_ids = dict.fromkeys(sequence.task_id for sequence in self._asked_for(suspects))
        tasks = [self._tasks[task_id] for task_id in task_ids]
        logger.error("the engine raised with %d tasks in flight", len(tasks), exc_info=error)
        self._running.give_up()
        self._scheduler.remove(suspects)
        if len(tasks) == 1:
            self.cancel(tasks[0].id)
            return [failure(tasks[0].id, error)]
        return [outcome for task in tasks for outcome in self._begin_sequential(task)]

    def _begin_sequential(self, task: Task) -> list[Outcome]:
        """Begins a task again, to be generated by itself; gives its outcome where that fails."""
        self.cancel(task.id)
        sequences = self._rendered(task)
        if isinstance(sequences, Outcome):
            return [sequences]
        try:
            for sequence in sequences:
                sequence.start()
        except RequestError as error:
            return [refusal(task, error)]
        self._tasks[task.id], self._sequences[task.id] = task, sequences
        self._sequential.extend(sequences)
        self._prompt_logprobs.add(sequences)
        return []
