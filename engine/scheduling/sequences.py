"""The one owner of all sequences: which there are, what state each is in, and every change of it.

    add → COMPILING → compiled → WAITING → admit → RUNNING → finish → DONE
                                    └ preempt, put_back ┘
    restart: a new beginning after an error, WAITING in a queue of its own
    cancel, abandon: → DONE, wherever it was

The containers are indexes that these methods keep in step with the states: `compiling`;
`scheduler` (the order of those that wait) and `sequential` (those that go one at a time); `running`
(the batch); `prompt_logprobs` (prompts to be scored, whatever the state). `integrity.py` says what
must hold.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from mlx_rq.engine.interface import Task, Totals
from mlx_rq.engine.kv.cached_prefix import CachedPrefix
from mlx_rq.engine.scheduling.prompt_logprobs import PromptLogprobs
from mlx_rq.engine.scheduling.running_batch import RunningBatch
from mlx_rq.engine.scheduling.scheduler import Scheduler
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.state import NEXT, IllegalTransition, State


class TaskSequences(NamedTuple):
    """A task that has not ended, and its sequences in the order of the choices."""

    task: Task
    sequences: Sequence[TokenSequence]

    @property
    def complete(self) -> bool:
        """Whether all is there that its answer is made of."""
        return all(sequence.complete for sequence in self.sequences)


class SequenceTable:
    """The tasks that have not ended, and their sequences. Counts in `totals` what they ask for."""

    def __init__(self, scheduler: Scheduler, running: RunningBatch, totals: Totals) -> None:
        self.scheduler = scheduler
        self.running = running
        self.prompt_logprobs = PromptLogprobs()
        self.compiling: dict[TokenSequence, None] = {}  # an ordered set
        self.sequential: dict[TokenSequence, None] = {}  # an ordered set
        self._tasks: dict[str, TaskSequences] = {}
        self._totals = totals

    @property
    def tasks(self) -> Mapping[str, TaskSequences]:
        """The tasks that have not ended, by their ids."""
        return self._tasks

    @property
    def waiting(self) -> int:
        """Sequences that wait for a grammar, for a place in the batch, or for a prompt's score."""
        queued = len(self.scheduler) + len(self.sequential)
        return queued + len(self.compiling) + len(self.prompt_logprobs)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts of those that wait for a grammar or for a place in the batch."""
        queues = (self.scheduler, self.sequential, self.compiling)
        return sum(len(sequence.prompt) for queue in queues for sequence in queue)

    @property
    def next_sequential(self) -> list[TokenSequence]:
        """The sequence that is generated alone next, if there is one."""
        return [next(iter(self.sequential))] if self.sequential else []

    def is_asked_for(self, sequence: TokenSequence) -> bool:
        """Says whether a task waits for this very sequence, not only for one of its name."""
        entry = self._tasks.get(sequence.task_id)
        return entry is not None and sequence in entry.sequences

    def asked_for(self, sequences: Iterable[TokenSequence]) -> Iterator[TokenSequence]:
        """Gives the sequences and their duplicates, as far as tasks ask for them."""
        for sequence in sequences:
            duplicates = sequence.duplicates or self.scheduler.duplicates_of(sequence)
            yield from filter(self.is_asked_for, (sequence, *duplicates))

    def generated(self) -> dict[str, int]:
        """Tells how many tokens each task of the batch has generated so far, all choices taken."""
        counts: Counter[str] = Counter()
        for sequence in self.running:
            for one in self.asked_for([sequence]):
                counts[one.task_id] += len(sequence.text.tokens)
        return counts

    def spare(self, count: int, *, batch_size: int) -> list[str]:
        """Names up to so many tasks that another engine might as well do, those that come last.

        None of their sequences has begun. More than half of a prompt is held here only where there
        are enough of those for a batch: then it pays to compute that once more.
        """
        spare: dict[str, None] = {}
        held: dict[str, None] = {}
        for prefix, sequence in self.scheduler.from_last():
            entry = self._tasks.get(sequence.task_id)
            if entry and all(
                one.state is State.WAITING and not one.begun for one in entry.sequences
            ):
                of_use = self.running.prefix_cache.holds(prefix)
                mostly_held = of_use and 2 * len(prefix) > len(sequence.prompt_key)
                (held if mostly_held else spare)[sequence.task_id] = None
        worth = held if len(held) >= batch_size else {}
        return list(spare | worth)[:count]

    def in_flight(self, rows: int, now: float) -> Iterator[TokenSequence]:
        """The sequences that a step of so many rows may compute for, and their duplicates."""
        sequences = [*self.running, *self.next_sequential]
        if (scored := self.prompt_logprobs.head) is not None:
            sequences.append(scored)
        if not self.sequential and (batch := self.scheduler.head(now)) is not None:
            full = len(self.running) >= rows
            if not (full and all(map(self.running.prefix_cache.holds, batch.prefixes))):
                sequences += islice(batch.sequences, rows)
        return self.asked_for(sequences)

    # The changes of state, in the order of a sequence's way.

    def add(self, task: Task, sequences: Sequence[TokenSequence]) -> None:
        """Takes a task in: its sequences are COMPILING; those that generate nothing are DONE."""
        self._hold(task, sequences)
        self._totals.tasks += 1
        self.compiling |= dict.fromkeys(self._generating(sequences))

    def compiled(self, sequence: TokenSequence) -> None:
        """COMPILING → WAITING: it has its constraint, or needs none."""
        self._become(sequence, State.WAITING)
        del self.compiling[sequence]
        self.scheduler.add(sequence)

    def restart(self, task: Task, sequences: Sequence[TokenSequence]) -> None:
        """Takes a task in again: its new sequences are WAITING to be generated one at a time."""
        self._hold(task, sequences)
        for sequence in self._generating(sequences):
            self._become(sequence, State.WAITING)
            self.sequential[sequence] = None

    def admit(
        self,
        sequences: Sequence[TokenSequence],
        prefix: CachedPrefix | None = None,
        shared: CachedPrefix | None = None,
    ) -> None:
        """WAITING → RUNNING, with the duplicates: prefills what `prefix` has not of the sequences.

        Of its KV they refer to that of `shared`. They are the next of their queue. Where the
        generator raises, they wait on.
        """
        self.running.add(sequences, prefix, shared)
        for sequence in sequences:
            sequence.duplicates = self._dequeued(sequence)
            for one in (sequence, *sequence.duplicates):
                self._become(one, State.RUNNING)
                self._totals.prompt_tokens += len(one.prompt)
            sequence.depth = 0 if prefix is None else prefix.depth
            sequence.shared = shared
            sequence.cached_tokens = min(sequence.depth, len(sequence.prompt))
        if prefix is not None:
            # The first to use a new prefix is the one that it was computed for.
            first = sequences[0]
            held = max(0, prefix.depth - prefix.uncharged)
            first.cached_tokens = min(held, len(first.prompt))
            prefix.first_task = prefix.first_task or first.task_id
            for sequence in sequences:
                sequence.first_with = sequence.first_with or prefix.first_task
            self.running.prefix_cache.use(prefix, len(sequences))

    def make_room(self) -> list[TokenSequence]:
        """Preempts the sequences that the memory is too small for by now, the newest first."""
        preempted = []
        while self.running.outgrown(self.scheduler.next_use):
            preempted.append(self.running.newest)
            self.preempt(self.running.newest)
        return preempted

    def preempt(self, sequence: TokenSequence) -> None:
        """RUNNING → WAITING: it gives up its KV, and goes on from what it has said.

        Its duplicates wait again, too: they ask from the prompt on, it no more.
        """
        self.running.remove([sequence])
        self._wait_again(sequence)
        sequence.preempted += 1

    def put_back(self) -> None:
        """RUNNING → WAITING, all: the device failed, and may have left their KV half written."""
        for sequence in self.running:
            self._wait_again(sequence)
            sequence.failed += 1
        self.running.abandon()
        for sequence in self.prompt_logprobs:
            if sequence.score is not None and not sequence.score.done:
                sequence.score.rewind()

    def finish(self, sequence: TokenSequence) -> list[TaskSequences]:
        """RUNNING → DONE, with the duplicates, which have its answer; gives the complete tasks."""
        everybody = self._leave(sequence)
        for one in everybody:
            if one is not sequence:
                one.answer_as(sequence)
            self._become(one, State.DONE)
        task_ids = dict.fromkeys(one.task_id for one in everybody)
        return [entry for task_id in task_ids for entry in self.complete(task_id)]

    def complete(self, task_id: str) -> list[TaskSequences]:
        """Lets go of a task, if all is there that its answer is made of, and gives it."""
        entry = self._tasks.get(task_id)
        if entry is None or not entry.complete:
            return []
        del self._tasks[task_id]
        self.prompt_logprobs.remove(entry.sequences)
        return [entry]

    def cancel(self, task_id: str) -> None:
        """→ DONE: forgets a task; one of its sequences goes on as long as duplicates need it."""
        entry = self._tasks.pop(task_id, None)
        for sequence in () if entry is None else entry.sequences:
            if sequence.state is State.COMPILING:
                del self.compiling[sequence]
            elif sequence.state is State.WAITING and sequence in self.sequential:
                del self.sequential[sequence]
            elif sequence.state is State.WAITING:
                self.scheduler.remove(sequence)
            else:
                continue  # it is DONE, or one of those that run
            self._become(sequence, State.DONE)
        if entry is not None:
            self.prompt_logprobs.remove(entry.sequences)
            self._stop_unasked()

    def abandon(self) -> None:
        """RUNNING → DONE without an answer, all: an error may have left their KV half written."""
        for sequence in self.running:
            for one in self._leave(sequence):
                self._become(one, State.DONE)
        self.running.abandon()

    # What they have in common.

    def _wait_again(self, sequence: TokenSequence) -> None:
        sequence.rewind()
        for one in self._leave(sequence):
            if self.is_asked_for(one):
                self._become(one, State.WAITING)
                self.scheduler.add(one)
            else:
                self._become(one, State.DONE)
        self._totals.sequences_preempted += 1

    def _become(self, sequence: TokenSequence, state: State) -> None:
        if state not in NEXT[sequence.state]:
            raise IllegalTransition(f"from {sequence.state.value} to {state.value}")
        sequence.state = state

    def _hold(self, task: Task, sequences: Sequence[TokenSequence]) -> None:
        self._tasks[task.id] = TaskSequences(task, sequences)
        self.prompt_logprobs.add(sequences)

    def _generating(self, sequences: Sequence[TokenSequence]) -> list[TokenSequence]:
        """Gives those that generate something; the others are DONE."""
        for sequence in sequences:
            if sequence.budget == 0:
                self._become(sequence, State.DONE)
        return [sequence for sequence in sequences if sequence.budget > 0]

    def _dequeued(self, sequence: TokenSequence) -> list[TokenSequence]:
        """Takes a sequence out of its queue; returns its duplicates, which leave with it."""
        if sequence in self.sequential:
            del self.sequential[sequence]
            return []
        return self.scheduler.take(sequence)

    def _leave(self, sequence: TokenSequence) -> list[TokenSequence]:
        """Ends what a sequence of the batch has of others; gives it, and those it answered for."""
        sequence.shared = None  # else the prefix's memory would be held as long as the task
        everybody, sequence.duplicates = [sequence, *sequence.duplicates], []
        return everybody

    def _stop_unasked(self) -> None:
        """Takes out of the batch what is asked for neither for itself nor for a duplicate."""
        for sequence in self.running:
            for duplicate in [one for one in sequence.duplicates if not self.is_asked_for(one)]:
                sequence.duplicates.remove(duplicate)
                self._become(duplicate, State.DONE)
        unasked = [one for one in self.running if not any(self.asked_for([one]))]
        self.running.remove(unasked)
        for sequence in unasked:
            self._leave(sequence)
            self._become(sequence, State.DONE)
