"""What an engine does with an error in a step: nobody is blamed before it is known who is at fault.

An error of the device (`Device.fault_of`) is nobody's: all sequences wait again, from what they had
said, and the next steps are smaller. Only what fails again and again at the same place, alone in
the smallest step, is given up. Logits that are not finite are the sequences' that they are of:
those are generated again by themselves, and given up where it comes again at the same place. Any
other error is some request's: all that were in flight go on one at a time, and the one that is
alone when it raises again has failed.
"""

import logging
from collections.abc import Callable, Container, Iterable

from mlx_rq.engine.errors import bad_request, ended_by, failure
from mlx_rq.engine.interface import DeviceExhausted, Outcome, Task
from mlx_rq.engine.models.device import Device, Fault, NotFinite
from mlx_rq.engine.sampling.logprobs import PromptScore
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequences import SequenceTable
from mlx_rq.engine.scheduling.step_size import StepSize
from mlx_rq.jobs.openai.errors import RequestError

logger = logging.getLogger("mlx_rq.engine")

_BROKEN = 3
"""After so many tasks in a row whose logits were no numbers, it is the device."""

_TRIES, _MOST_TRIES = 3, 8
"""What fails so often at one place, alone in the smallest step, is too large. Each error that
passed, of whomever, is one try more: where errors come and go, three may be chance.
"""

_PLACE = 128
"""Tokens: what fails sooner than that has held more before, so it is not too large there."""

_IN_A_ROW = 4
"""After so many errors and no good step between them, nothing works at all."""

_GARBLED = 8
"""So often a task is begun again for logits that were no numbers, each time at another place."""

Rendered = Callable[[Task], list[TokenSequence] | Outcome]
"""Makes a task's sequences, or its outcome where that fails."""


class _Attempts:
    """How far tasks came that failed alone in the smallest step."""

    def __init__(self) -> None:
        self._furthest: dict[str, tuple[int, int]] = {}
        """By task: the most tokens that the device held of it, and how often it failed there."""
        self._passed = 0
        """Errors that passed."""

    def is_hopeless(self, tasks: Iterable[Task], reach: int, known: Container[str]) -> bool:
        """Notes that what these tasks ask for failed with so many tokens; says whether for good.

        `known` are the tasks that have not ended.
        """
        self._furthest = {one: at for one, at in self._furthest.items() if one in known}
        at_one_place = 0
        for task in tasks:
            furthest, times = self._furthest.get(task.id, (-1, 0))
            if reach > furthest:
                furthest, times, passed = reach, 1, times
            elif reach > furthest - _PLACE:
                times, passed = times + 1, 0
            else:
                passed = 1
            self._furthest[task.id] = furthest, times
            self._passed += passed
            at_one_place = max(at_one_place, times)
        return at_one_place >= min(_TRIES + self._passed, _MOST_TRIES)


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
        self._attempts = _Attempts()
        self._in_a_row = 0
        """Errors of the device since a step went well."""
        self._garbled: dict[str, set[tuple[int, int]]] = {}
        """By task whose logits were not finite: in which choice, after how many tokens."""
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
        score = None if scored is None else scored.score
        if isinstance(error, NotFinite):
            logger.warning("%s, with %d sequences in flight", error, in_flight)
            return self._again_alone(error, suspects, score)
        if (fault := self._device.fault_of(error)) is not None:
            logger.warning("%s, with %d sequences in flight", error, in_flight)
            error.with_traceback(None)  # its frames hold arrays, and their memory
            reach = self._running.reach if score is None else len(score.scores)
            return self._again_smaller(error, fault, suspects, in_flight, reach)
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
        self,
        error: Exception,
        fault: Fault,
        suspects: list[TokenSequence],
        in_flight: int,
        reach: int,
    ) -> list[Outcome]:
        """All wait again; what fails alone in the smallest step, however often, is given up.

        It had come to `reach` tokens. Raises the error where nothing works at all, or where size is
        not what is wrong.
        """
        active, tasks = self._device.memory().active, self._tasks_of(suspects)
        has_worked = self._step_size.has_worked
        self._in_a_row = 1 if has_worked else self._in_a_row + 1
        smaller = self._step_size.shrink(in_flight)
        self._sequences.put_back()
        self._evict(all_prefixes=in_flight <= 1 or self._step_size.smallest)
        if smaller:
            size, what = self._step_size, f"{self._device.name} {fault.value}"
            logger.warning(
                "%s: steps of at most %d sequences, %d prompt tokens", what, size.rows, size.chunk
            )
            return []
        if not has_worked:
            if self._in_a_row < _IN_A_ROW:
                return []
            # It may be another program's doing: the worker starts afresh.
            raise error if fault is Fault.OTHER else DeviceExhausted(str(error))
        if not self._attempts.is_hopeless(tasks, reach, self._sequences.tasks):
            return []  # errors that pass come to small steps, too
        if fault is Fault.OTHER:
            raise error
        if len(suspects) > 1:  # who stand on a prefix that does not fit
            return self._restarted(tasks)
        for task in tasks:
            self._sequences.cancel(task.id)
        if fault is Fault.TIME:
            return [failure(task.id, error) for task in tasks]
        return [bad_request(task, self._too_large(suspects[0], active)) for task in tasks]

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

    def _again_alone(
        self, error: NotFinite, suspects: list[TokenSequence], score: PromptScore | None
    ) -> list[Outcome]:
        """Those whose logits were no numbers are begun again by themselves.

        They fail where it comes again at the same place, or at ever so many others. Raises the
        error where one after the other fails, and nobody has a token in between.
        """
        named = self._running.named(error.uids) or suspects
        in_flight, tasks = len(self._running), self._tasks_of(named)
        hopeless = {task.id for one in named for task in self._garbled_again(one, score)}
        self._sequences.put_back()
        for sequence in named:  # what they stood on may be as wrong
            self._running.prefix_cache.forget(sequence.key)
        if len(named) > 1:
            self._step_size.shrink(in_flight)
        else:
            self._step_size.shrink_chunk()
        given_up = [task for task in tasks if task.id in hopeless]
        again = [task for task in tasks if task.id not in hopeless]
        if given_up:
            self._count_garbled(error)
        for task in given_up:
            self._sequences.cancel(task.id)
        return [failure(task.id, error) for task in given_up] + self._restarted(again)

    def _garbled_again(self, sequence: TokenSequence, score: PromptScore | None) -> list[Task]:
        """Notes where a sequence's logits were no numbers; gives its tasks if that is hopeless."""
        known = self._sequences.tasks
        self._garbled = {one: places for one, places in self._garbled.items() if one in known}
        tokens = sequence.length if score is None else len(score.scores)
        place, hopeless = (sequence.index, tokens), []
        for task in self._tasks_of([sequence]):
            places = self._garbled.setdefault(task.id, set())
            if place in places or len(places) >= _GARBLED:
                hopeless.append(task)
            places.add(place)
        return hopeless

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
