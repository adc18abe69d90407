"""Runs a file of requests through the queue: resume, check, run, tidy.

1. `recover`: what earlier runs wrote says which lines are done.
2. `checked`: every line is read once before anything runs: none may be bad, no custom_id may occur
   twice.
3. `Flight.run`: the lines that are left go through the queue, a window of them at a time; endings
   are written as they come (into a pipe, in the order of the input if so wanted) and, once they are
   safe, forgotten by Redis.
4. `tidy`: one record for each line, in order.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mlx_rq.jobs.batch.check import checked
from mlx_rq.jobs.batch.done import Done
from mlx_rq.jobs.batch.files import Outputs
from mlx_rq.jobs.batch.flight import DEFAULT_WINDOW, Flight
from mlx_rq.jobs.batch.lines import Line, Source
from mlx_rq.jobs.batch.records import Ended
from mlx_rq.jobs.batch.state import State
from mlx_rq.jobs.batch.tally import Tally
from mlx_rq.jobs.queue.options import BATCH_PRIORITY, JobOptions

Order = Literal["input", "finished"]

_SYNC_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How a batch is run. `window` bounds the jobs that are on the way at once."""

    order: Order = "input"
    skip_bad_lines: bool = False
    retry_errors: bool = False
    window: int = DEFAULT_WINDOW
    job: JobOptions = field(default_factory=lambda: JobOptions(BATCH_PRIORITY))
    redis_url: str | None = None


class Batch:
    """One run over an input. `tally` tells how far it is, also after an interruption."""

    def __init__(
        self, source: Source, outputs: Outputs, state: State, options: BatchOptions
    ) -> None:
        self._source, self._outputs, self._state = source, outputs, state
        self._options = options
        self._done = Done()
        self._stopping = False
        self.tally = Tally()
        self.flight = Flight(
            options.job,
            redis_url=options.redis_url,
            window=options.window,
            ordered=options.order == "input" and not outputs.sortable,
            key_of=self._key_of,
        )

    def stop(self) -> None:
        """Lets `run` return within a second or so, with lines missing. A signal may call it."""
        self._stopping = True

    def run(self, watch: Callable[["Batch"], None]) -> None:
        """Gives every line its record; calls `watch` at least once a second.

        Raises RequestError, before anything runs, where the input or an output is not right.
        """
        self._done = self._outputs.recover(ours=self._state.run is not None)
        tally = self._check()
        if self._stopping:
            return
        self.tally = tally
        if self._state.run is None or not self._outputs.answers.exists():
            self._state.start()
        self.flight.batch = self._state.run
        self._outputs.create()
        unsafe: list[Ended] = []
        try:
            self._fly(watch, unsafe)
        finally:
            self._outputs.close()
            if unsafe:  # no more
                self.flight.forget(unsafe)
        if not self.tally.missing:
            in_order = self._options.order == "input"
            self._outputs.tidy(self._source, self.tally.total, in_order=in_order)

    def _fly(self, watch: Callable[["Batch"], None], unsafe: list[Ended]) -> None:
        """Writes what ends; `unsafe` is what may not be on the disk yet."""
        sync_at = 0.0
        for ended in self.flight.run(self._remaining()):
            for code in self._outputs.append(ended):
                self.tally.count(code)
            unsafe += ended
            if unsafe and time.monotonic() >= sync_at:
                self._outputs.sync()
                self.flight.forget(unsafe)
                unsafe.clear()
                sync_at = time.monotonic() + _SYNC_SECONDS
            watch(self)
            if self._stopping:
                return

    def _is_done(self, line: Line) -> bool:
        if line.fingerprint in self._done.answered:
            return True
        return line.fingerprint in self._done.failed and not self._options.retry_errors

    def _remaining(self) -> Iterator[Line]:
        return (line for line in self._source if not self._is_done(line))

    def _key_of(self, line: Line) -> str:
        """Names a line in the queue: the same for the same line of the same run.

        A line that is tried again gets a key of its own, made of the job that failed.
        """
        failure = self._done.failed.get(line.fingerprint)
        return f"batch-{self._state.run}-{line.fingerprint.hex()}-{failure and failure.job_id}"

    def _check(self) -> Tally:
        """Reads the input once and counts what is done; raises RequestError as `checked` does."""
        tally, done = Tally(), self._done
        for line in checked(self._source, skip_bad_lines=self._options.skip_bad_lines):
            if self._stopping:
                break
            tally.total += 1
            if line.fingerprint in done.answered:
                tally.answered += 1
            elif self._is_done(line):
                tally.errors[done.failed[line.fingerprint].code] += 1
        tally.resumed = tally.done
        tally.outdated = len(done.answered) - tally.answered
        return tally
