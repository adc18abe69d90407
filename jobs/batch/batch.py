"""Runs a file of requests through the queue: resume, check, run, tidy.

1. `recover`: what earlier runs wrote says which lines are done.
2. `_check`: every line is read once before anything runs: none may be bad, no custom_id may occur
   twice. Kept of a line are 16 bytes.
3. `Flight.run`: the lines that are left go through the queue, a window of them at a time; endings
   are written as they come and, once they are safe, forgotten by Redis.
4. `tidy`: one record for each line, in order.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from mlx_rq.jobs.batch.files import Done, Outputs
from mlx_rq.jobs.batch.flight import DEFAULT_WINDOW, Flight
from mlx_rq.jobs.batch.lines import Line, Source, digest
from mlx_rq.jobs.batch.records import Ended
from mlx_rq.jobs.batch.state import State
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue.options import BATCH_PRIORITY, JobOptions

Order = Literal["input", "finished"]

_SYNC_SECONDS = 1.0


@dataclass
class Tally:
    """Accounts for every line of the input.

    `resumed` lines were done before this run; `outdated` answers belong to no line any more.
    """

    total: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    outdated: int = 0

    @property
    def done(self) -> int:
        """Lines that have an answer or an error."""
        return self.answered + self.errors.total()

    @property
    def missing(self) -> int:
        """Lines that have neither."""
        return self.total - self.done

    @property
    def exit_code(self) -> int:
        """0: all answered. 1: all done, some with errors. 2: not finished."""
        if self.missing or not self.total:
            return 2
        return 1 if self.errors else 0

    def count(self, code: str | None) -> None:
        """Counts a line that ended with this error code, or without one with an answer."""
        if code is None:
            self.answered += 1
        else:
            self.errors[code] += 1

    def __str__(self) -> str:
        errors = self.errors.total()
        kinds = ", ".join(f"{count:,} {code}" for code, count in self.errors.most_common())
        return (
            f"{self.total:,} in: {self.answered:,} answered, "
            f"{errors:,} error{'' if errors == 1 else 's'}{f' ({kinds})' if kinds else ''}, "
            f"{self.missing:,} missing"
        )


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
            ordered=options.order == "input",
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
        try:
            self._fly(watch)
        finally:
            self._outputs.close()
        if not self.tally.missing:
            in_order = self._options.order == "input"
            self._outputs.tidy(self._source, self.tally.total, in_order=in_order)

    def _fly(self, watch: Callable[["Batch"], None]) -> None:
        unsafe: list[Ended] = []
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
        """Reads the input once and counts what is done.

        Raises RequestError where a custom_id occurs twice, a line is bad, or there is none.
        """
        tally, done = Tally(), self._done
        seen: set[bytes] = set()
        bad = 0
        first_bad: Line | None = None
        for line in self._source:
            if self._stopping:
                break
            tally.total += 1
            if line.custom_id is not None:
                identity = digest(line.custom_id.encode())
                if identity in seen:
                    raise self._duplicate(line)
                seen.add(identity)
            if line.fault is not None and not self._options.skip_bad_lines:
                bad += 1
                first_bad = first_bad or line
            if line.fingerprint in done.answered:
                tally.answered += 1
            elif self._is_done(line):
                tally.errors[done.failed[line.fingerprint].code] += 1
        if first_bad is not None and first_bad.fault is not None:
            raise self._bad(first_bad, first_bad.fault, bad - 1)
        if not tally.total and not self._stopping:
            raise RequestError(f"{self._source.name} holds no requests.", code="empty_file")
        tally.resumed = tally.done
        tally.outdated = len(done.answered) - tally.answered
        return tally

    def _duplicate(self, line: Line) -> RequestError:
        first = next(other for other in self._source if other.custom_id == line.custom_id)
        unit = self._source.unit
        return RequestError(
            f"{self._source.name}, {unit} {line.number}: the custom_id {line.custom_id!r} is that "
            f"of {unit} {first.number} already. Nothing was run. Give every {unit} its own.",
            code="duplicate_custom_id",
            param="custom_id",
        )

    def _bad(self, line: Line, fault: RequestError, others: int) -> RequestError:
        unit = self._source.unit
        more = f" So are {others:,} others." if others else ""
        return RequestError(
            f"{self._source.name}, {unit} {line.number}: {fault}{more} Nothing was run. Correct "
            f"the input, or take --skip-bad-lines to get an error record for such a {unit}.",
            code=fault.code,
            param=fault.param,
        )
