"""What a step computes: a bounded piece of each kind of work, so that those who decode go on.

A chunk of a prompt whose own logprobs are asked for; a chunk of each prefix that the next prefill
batch stands on, and the admission of that batch; a decode step. How much, is said by `StepSize`
(what there is room for) and `Pace` (what there is time for).
"""

import logging
from collections.abc import Callable
from itertools import islice

from mlx_rq.engine.interface import Totals
from mlx_rq.engine.scheduling.pace import LEAST, Pace
from mlx_rq.engine.scheduling.pressure import Pressure
from mlx_rq.engine.scheduling.scheduler import WaitingBatch
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequences import SequenceTable
from mlx_rq.engine.scheduling.step_size import StepSize

logger = logging.getLogger("mlx_rq.engine")

_ADMIT_SHARE = 4
"""Sequences are admitted once this part of the batch (1/4) is free: each admission copies KV."""


class Step:
    """One step after the other over an engine's sequences: `score`, then `compute`."""

    def __init__(
        self,
        sequences: SequenceTable,
        step_size: StepSize,
        pressure: Pressure,
        totals: Totals,
        *,
        on_progress: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """`on_progress` is called after each forward pass of a prefill, and after a decode step."""
        self._sequences = sequences
        self._running = sequences.running
        self._scheduler = sequences.scheduler
        self._size = step_size
        self._pressure = pressure
        self._totals = totals
        self._pace = Pace()
        self._on_progress = on_progress
        self._clock = clock
        self._has_scored = False
        """Whether the last step that began scored a prompt."""

    def next_to_score(self) -> TokenSequence | None:
        """Begins a step; gives the sequence whose prompt it is to score, if any."""
        before, self._has_scored = self._has_scored, False
        running, sequence = self._running, self._sequences.prompt_logprobs.head
        if sequence is None or self._one_thing_at_a_time:
            return None
        if running.decoding and (before or not running.takes_sequences):
            return None  # who decodes waits for one piece of a prompt in a step, not for two
        return sequence

    def score(self) -> None:
        """Scores a chunk of that sequence's prompt."""
        tokens = self._pace.tokens(self._size, decoding=self._running.decoding > 0)
        scored = self._sequences.prompt_logprobs.advance(tokens)
        self._totals.prefilled_tokens += scored
        self._totals.positions_computed += scored
        if scored:
            self._has_scored = True
            self._size.worked(has_room=False)

    def compute(self) -> list[TokenSequence]:
        """Does the rest of the step; gives the sequences that ended by it.

        Where a prompt was scored, no other is begun beside those that decode.
        """
        size, running = self._size, self._running
        started, prefilled = self._clock(), running.prefilled
        self._pressure.relieve()
        running.memory.share = size.memory
        self._sequences.make_room()
        decoding = running.decoding > 0
        tokens = self._pace.tokens(size, decoding=decoding)
        if not (self._has_scored and decoding):
            self._admit(tokens)
        tokens -= running.prefilled - prefilled
        finished = running.decode(tokens, alone=self._nobody_joins)
        self._on_progress()
        took, prefilled = self._clock() - started, running.prefilled - prefilled
        self._pace.took(took, prefilled=prefilled, decoded=decoding)
        computed = bool(prefilled or decoding)
        if computed and size.worked(has_room=not self._pressure.high):
            logger.info("steps of at most %d sequences, %d prompt tokens", size.rows, size.chunk)
        return finished

    @property
    def _one_thing_at_a_time(self) -> bool:
        """Whether nothing is to be computed beside what decodes: the memory is too small."""
        return bool(self._running) and (self._size.smallest or self._pressure.high)

    @property
    def _nobody_joins(self) -> bool:
        """Whether a sequence that runs alone will go on alone, with memory to spare."""
        nobody = self._size.rows == 1 or not self._sequences.waiting
        return nobody and not self._one_thing_at_a_time

    def _admit(self, tokens: int) -> None:
        """Admits sequences once there is room for them; prefills what they stand on before."""
        sequences, running = self._sequences, self._running
        if not running.takes_sequences:
            return
        if sequences.sequential:
            if not running:
                sequences.admit(sequences.next_sequential)
            return
        batch = self._scheduler.head(self._clock())
        if batch is None or self._one_thing_at_a_time:
            return
        # Before places are free, so that admission need not wait for it.
        if self._builds(batch, tokens):
            self._admit_some(batch)

    def _builds(self, batch: WaitingBatch, tokens: int) -> bool:
        """Prefills so many tokens of a batch's prefixes; says whether they are whole by now."""
        running, prefixes = self._running, self._running.prefix_cache
        left = tokens
        # For a few tokens more, those that run are not to wait for another pass.
        least = min(tokens, LEAST) if running else 1
        for key in batch.prefixes:
            if left < least:
                return False
            if not running.may_build(key, self._scheduler.next_use):
                return False  # those that run will make room
            before = prefixes.prefilled_tokens
            whole = prefixes.build(key, left) is not None
            self._on_progress()
            left -= prefixes.prefilled_tokens - before
            if not whole:
                return False
        return not running or left >= least

    def _admit_some(self, batch: WaitingBatch) -> None:
        """Admits as many of a batch as there is room for, unless those are few."""
        running, rows = self._running, self._size.rows
        free = rows - len(running)
        enough = min(len(batch.sequences), max(1, rows // _ADMIT_SHARE))
        if running and free < enough:
            return
        # Only now that places are free: `room_for` evicts prefixes.
        prefix = running.prefix_cache[batch.prefixes[-1]] if batch.prefixes else None
        candidates = list(islice(batch.sequences, free))
        room, shared = running.room_for(candidates, prefix, self._scheduler.next_use)
        if room >= enough or not running:
            admitted = list(islice(batch.sequences, max(1, room)))
            if prefix is None:
                prefix, shared = running.held_for(admitted)
            self._sequences.admit(admitted, prefix, shared)
