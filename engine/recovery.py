"""What an engine does with an error in a step: nobody is blamed before it is known who is at fault.

An error of the device (`Device.fault_of`) is nobody's: all sequences wait again, from what they had
said, and the next steps are smaller. Only what fails again and again, alone in the smallest step,
is given up. Logits that are not finite are the sequences' that they are of: those are generated
again by themselves, and given up where that does not help. Any other error is some request's: all
that were in flight go on one at a time, and the one that is alone when it raises again has failed.
"""

import logging
from collections.abc import Callable, Iterable

from mlx_rq.engine.errors import bad_request, ended_by, failure
from mlx_rq.engine.interface import DeviceExhausted, Outcome, Task
from mlx_rq.engine.models.device import Device, Fault, NotFinite
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequences import SequenceTable
from mlx_rq.engine.scheduling.step_size import StepSize
from mlx_rq.jobs.openai.errors import RequestError

logger = logging.getLogger("mlx_rq.engine")

_BROKEN = 3
"""After so many tasks in a row whose logits were no numbers, it is the device."""

_TRIES, _FURTHER = 3, 64
"""What fails so often, alone in the smallest step, is too large, unless it came so many tokens
further in between: then the error passed.
"""

Rendered = Callable[[Task], list[TokenSequence] | Outcome]
"""Makes a task's sequences, or its outcome where that fails."""


class Recovery:
    """Puts an engine's sequences to rights after an error."""

    def __init__(
        self,
        sequences: SequenceTable,
        step_size: StepSize,
        device: Device,
        *,
        rendered: Rendered,
        clock: Callable[[], float],
    ) -> None:
        self._sequences = sequences
        self._running = sequences.running
        self._step_size = step_size
        self._device = device
        self._rendered = rendered
        self._clock = clock
        self._failed_alone: dict[str, tuple[int, ...]] = {}
        """By task: how many tokens its sequence had when it failed alone in the smallest step."""
        self._garbled: set[str] = set()
        """Ids of tasks whose logits were not finite once."""
        self._garbled_in_a_row = 0, 0
        """Tokens decoded when the last such task failed, and how many failed since the one before.
        """

    def recover(self, error: Exception, scored: TokenSequence | None = None) -> list[Outcome]:
        """Has everybody go on after an error in a step; returns the outcomes of those who cannot.

        `scored` is whose prompt was scored, if that raised. Raises it again where nothing was in
        flight, and where it is the device that is broken.
        """
        suspects = self._suspects() if scored is None else [scored]
        # A prefix is one row, however many wait for it.
        in_flight = len(self._running) + self._running.prefix_cache.building + (scored is not None)
        if not suspects:
            raise error  # nothing can be left out: the worker starts afresh
        in_flight = in_flight or min(len(suspects), self._step_size.rows)  # they were let in
        if isinstance(error, NotFinite):
            logger.warning("%s, with %d sequences in flight", error, in_flight)
            return self._again_alone(error, suspects)
        if (fault := self._device.fault_of(error)) is not None:
            logger.warning("%s, with %d sequences in flight", error, in_flight)
            error.with_traceback(None)  # its frames hold arrays, and their memory
            return self._again_smaller(error, fault, suspects, in_flight)
        logger.error("the engine raised with %d in flight", len(suspects), exc_info=error)
        return self._one_at_a_time(error, suspects)

    def _suspects(self) -> list[TokenSequence]:
        """The sequences that the step computed for."""
        sequences, prefixes = self._sequences, self._running.prefix_cache
        suspects = list(self._running) or sequences.next_sequential
        if suspects and not prefixes.broken_off:
            return suspects
        batch = sequences.scheduler.head(self._clock())
        return suspects if batch is None else [*suspects, *batch.sequences]

    def _again_smaller(
        self, error: Exception, fault: Fault, suspects: list[TokenSequence], in_flight: int
    ) -> list[Outcome]:
        """All wait again; what fails alone in the smallest step, however often, is given up.

        Raises the error where nothing works at all, or where size is not what is wrong.
        """
        active, tasks = self._device.memory().active, self._tasks_of(suspects)
        has_worked = self._step_size.has_worked
        smaller = self._step_size.shrink(in_flight)
        self._sequences.put_back()
        self._evict(all_prefixes=in_flight <= 1 or self._step_size.smallest)
        if smaller:
            size, what = self._step_size, f"{self._device.name} {fault.value}"
            logger.warning(
                "%s: steps of at most %d sequences, %d prompt tokens", what, size.rows, size.chunk
            )
            return []
        if fault is Fault.OTHER:
            raise error
        if not has_worked:  # it may be another program's doing: the worker starts afresh
            raise DeviceExhausted(str(error))
        if len(suspects) > 1:  # who stand on a prefix that does not fit
            return self._restarted(tasks)
        if not self._is_hopeless(tasks, len(suspects[0].tokens)):
            return []  # errors that pass come to small steps, too
        for task in tasks:
            self._sequences.cancel(task.id)
        if fault is Fault.TIME:
            return [failure(task.id, error) for task in tasks]
        return [bad_request(task, self._too_large(suspects[0], active)) for task in tasks]

    def _is_hopeless(self, tasks: Iterable[Task], tokens: int) -> bool:
        """Notes that a sequence of so many tokens failed alone; says whether it does every time.

        `tasks` are those that ask for it.
        """
        known, hopeless = self._sequences.tasks, False
        self._failed_alone = {one: at for one, at in self._failed_alone.items() if one in known}
        for task in tasks:
            before = self._failed_alone.get(task.id, ())
            times = (*(at for at in before if tokens < at + _FURTHER), tokens)
            self._failed_alone[task.id] = times
            hopeless = hopeless or len(times) >= _TRIES
        return hopeless

    def _too_large(self, sequence: TokenSequence, active: int) -> RequestError:
        """Says in figures why a sequence that was alone does not fit the memory."""
        tokens, ceiling = len(sequence.tokens), self._device.ceiling
        needed = self._running.memory.cost.bytes(1, tokens)
        limit = "" if ceiling is None else f" of the {ceiling:,} that it may hold (--memory)"
        return RequestError(
            f"The memory does not suffice for this request, even by itself: at {tokens} tokens "
            f"({len(sequence.prompt)} of the prompt), whose KV takes {needed:,} bytes, the device "
            f"ran out of memory, with {active:,} bytes held{limit}. Reduce the prompt.",
            code="context_length_exceeded",
        )

    def _again_alone(self, error: NotFinite, suspects: list[TokenSequence]) -> list[Outcome]:
        """Those whose logits were no numbers are generated by themselves; twice, and they fail.

        Raises the error where one after the other fails, and nobody has a token in between.
        """
        named = self._running.named(error.uids) or suspects
        in_flight, tasks = len(self._running), self._tasks_of(named)
        self._sequences.put_back()
        for sequence in named:  # what they stood on may be as wrong
            self._running.prefix_cache.forget(sequence.key)
        if len(named) > 1:
            self._step_size.shrink(in_flight)
        else:
            self._step_size.shrink_chunk()
        self._garbled &= self._sequences.tasks.keys()
        given_up = [task for task in tasks if task.id in self._garbled]
        again = [task for task in tasks if task.id not in self._garbled]
        self._garbled.update(task.id for task in again)
        if given_up:
            self._count_garbled(error)
        for task in given_up:
            self._sequences.cancel(task.id)
        return [failure(task.id, error) for task in given_up] + self._restarted(again)

    def _count_garbled(self, error: NotFinite) -> None:
        decoded = self._running.computed.decoded_tokens
        in_a_row = self._garbled_in_a_row[1] if self._garbled_in_a_row[0] == decoded else 0
        if in_a_row >= _BROKEN:
            raise error  # it is not they: the worker starts afresh
        self._garbled_in_a_row = decoded, in_a_row + 1

    def _one_at_a_time(self, error: Exception, suspects: list[TokenSequence]) -> list[Outcome]:
        """Finds the task that makes the engine raise: who was alone then has failed."""
        tasks = self._tasks_of(suspects)
        self._sequences.abandon()
        if len(tasks) == 1:
            self._sequences.cancel(tasks[0].id)
            return [failure(tasks[0].id, error)]
        return self._restarted(tasks)

    def _evict(self, *, all_prefixes: bool) -> None:
        """Evicts the prefixes that nobody waits for, or all, before the last try."""
        scheduler = self._sequences.scheduler
        scheduler.head(self._clock())  # plans with those that were put back
        self._running.prefix_cache.evict_all(but=() if all_prefixes else scheduler.next_use())

    def _tasks_of(self, suspects: Iterable[TokenSequence]) -> list[Task]:
        """The tasks that ask for sequences, or for duplicates of theirs."""
        sequences = self._sequences
        task_ids = dict.fromkeys(one.task_id for one in sequences.asked_for(suspects))
        return [sequences.tasks[task_id].task for task_id in task_ids]

    def _restarted(self, tasks: Iterable[Task]) -> list[Outcome]:
        """Begins tasks again, each by itself; gives the outcomes of those where that fails."""
        outcomes = []
        for task in tasks:
            self._sequences.cancel(task.id)
            if (outcome := self._restart(task)) is not None:
                outcomes.append(outcome)
        return outcomes

    def _restart(self, task: Task) -> Outcome | None:
        sequences = self._rendered(task)
        if isinstance(sequences, Outcome):
            return sequences
        try:
            for sequence in sequences:
                if sequence.budget > 0:
                    sequence.start()
        except Exception as error:
            return ended_by(error, task)
        self._sequences.restart(task, sequences)
        return None
