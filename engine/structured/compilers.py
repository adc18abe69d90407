"""Compiles grammars beside the generation: a few threads, a limit each, the newest kept.

The limit counts the CPU that a grammar takes, not the time: on a busy machine none is refused for
what others do. The constraint engine bounds its own work, and lets other threads run meanwhile; the
limit is for what escapes its bounds.
"""

import atexit
import hashlib
import json
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from weakref import WeakSet

from mlx_rq.engine.structured.constraint import Compiled, GrammarFault
from mlx_rq.engine.structured.grammar import Grammar

_logger = logging.getLogger(__name__)

_LONGEST_EXIT = 10.0
"""Seconds that the end of the program waits for grammars that are being compiled."""

_AT_WORK = 0.5
"""Seconds of CPU in that time by which a thread is told from one that only waits."""

_STACK = 256 * 1024 * 1024
"""Of a thread, only what is used of it: the engine follows references one within the other, and a
row of them as long as a schema may be takes 64 MB. What a thread has else would end the program.
"""

_STARVED = 10
"""How many times its limit a grammar may take on the clock, whatever keeps it from the processor.

As long it waits where all threads are stuck with others.
"""


def thread_cpu() -> Callable[[], float]:
    """Gives a clock of the CPU that this thread uses, for others to read."""
    if sys.platform == "linux":
        return partial(time.clock_gettime, time.pthread_getcpuclockid(threading.get_ident()))
    return time.process_time  # macOS has none for others: with the CPU of all threads, then


@dataclass(eq=False, slots=True)
class _Run:
    """The compiling of one grammar. It may go on when those who waited for it have given up."""

    grammar: Grammar
    started: float | None = None
    cpu: Callable[[], float] = lambda: 0.0
    """The CPU that it has taken so far; read under the lock, for its thread may end."""
    late: bool = False
    """Whether it went past its limit before it ended, so that its thread was replaced."""
    ended: threading.Event = field(default_factory=threading.Event)
    compiled: Compiled | None = None
    fault: GrammarFault | None = None
    accident: bool = False
    """Whether it failed in a way that tells nothing about the grammar."""


class Compilation:
    """A grammar that is being compiled, or was, as those have it who wait for it.

    Several may wait for one run. Whoever comes when it is past its limit already waits as long
    again: it may be through by then.
    """

    def __init__(self, run: _Run, compilers: "Compilers", since: float, taken: float) -> None:
        """`since` when it is waited for, and how much CPU was `taken` then."""
        self._run = run
        self._compilers = compilers
        self._since = since
        self._taken = taken

    @property
    def ready(self) -> bool:
        """Whether `result` need not wait: the compilation has ended, or is past its limit."""
        return self._run.ended.is_set() or self._compilers._is_over(
            self._run, self._since, self._taken
        )

    @property
    def compiled(self) -> Compiled | None:
        """The compiled grammar; None where there is none, or none yet. Never waits."""
        return self._run.compiled

    def result(self) -> Compiled:
        """Waits for the compiled grammar; raises GrammarFault where there is none in time."""
        while not self.ready:
            self._run.ended.wait(0.01)
        if (compiled := self._run.compiled) is not None:
            return compiled
        if (fault := self._run.fault) is None:
            raise GrammarFault(0, self._compilers._why_late(self._run))
        # Another one each time: one that is kept would keep the frames that it went through.
        raise GrammarFault(fault.part, str(fault))


class Compilers:
    """Compiles grammars on a few threads, each within `seconds` of CPU, and keeps the newest.

    A thread cannot be stopped: one that goes on past the limit is replaced by another, up to
    `most_stuck` at a time. Once it is through, it works on if there are less than `threads` others.
    `set_up` is called before the first grammar is counted; it may be called more than once.

    Kept are `kept` grammars, and of those that compiled, what took `kept_seconds` of CPU together:
    the memory of one goes by what it took, 200 MB a second at the most that was seen.
    """

    def __init__(
        self,
        compile: Callable[[Grammar], Compiled],
        *,
        set_up: Callable[[], object] = lambda: None,
        threads: int = 2,
        seconds: float = 2.0,
        kept: int = 256,
        kept_seconds: float = 4.0,
        most_stuck: int = 4,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], Callable[[], float]] = thread_cpu,
    ) -> None:
        self._compile = compile
        self._set_up = set_up
        self._threads = threads
        self._seconds = seconds
        self._kept = kept
        self._kept_seconds = kept_seconds
        self._most_stuck = most_stuck
        self._clock = clock
        self._cpu = cpu
        self._cache: OrderedDict[str, Compilation] = OrderedDict()
        self._queue: SimpleQueue[_Run | None] = SimpleQueue()
        self._lock = threading.Lock()  # for all that follows, and for what is written in runs
        self._running: set[_Run] = set()
        self._alive = 0
        with self._lock:
            self._add_threads()
        _all.add(self)

    def wait_at_exit(self, until: float) -> bool:
        """Waits for grammars that are being compiled, up to a time on the clock of the machine.

        Says whether a thread still works on one. When it comes back from the engine after the
        interpreter has gone, that is a crash.
        """
        with self._lock:
            running = {run: run.cpu() for run in self._running}
        for run in running:
            run.ended.wait(max(0.0, until - time.monotonic()))
        with self._lock:
            open_ones = [run for run in running if not run.ended.is_set()]
            return any(run.cpu() - running[run] >= _AT_WORK for run in open_ones)

    def close(self) -> None:
        """Has the threads end, once they are through with what they compile."""
        with self._lock:
            for _ in range(self._alive):
                self._queue.put(None)

    def submit(self, grammar: Grammar) -> Compilation:
        """Has a grammar compiled, unless one of the same content was, or is being compiled."""
        key = _key(grammar)
        compilation = self._cache.get(key)
        if compilation is None or compilation._run.accident:
            compilation = Compilation(_Run(grammar), self, self._clock(), 0.0)
            self._queue.put(compilation._run)
        elif compilation.ready and not compilation._run.ended.is_set():
            run = compilation._run
            with self._lock:
                compilation = Compilation(run, self, self._clock(), run.cpu())
        self._cache[key] = compilation
        self._cache.move_to_end(key)
        with self._lock:
            while self._keeps_too_much():
                self._cache.popitem(last=False)
        return compilation

    def _keeps_too_much(self) -> bool:
        compiled = [one._run for one in self._cache.values() if one.compiled is not None]
        seconds = sum(min(run.cpu(), self._seconds) for run in compiled)
        return len(self._cache) > self._kept or seconds > self._kept_seconds

    def _is_over(self, run: _Run, since: float, taken: float) -> bool:
        """Says whether those who wait for a run since then, when it had taken so much, give up."""
        if run.started is None:
            # Not by its own run alone: whoever waited for the one that is stuck may be gone.
            able = self._replace_stuck()
            return able == 0 and self._clock() - since >= _STARVED * self._seconds
        with self._lock:
            over = self._is_past(run, max(run.started, since), taken)
        if over:
            self._replace_stuck()
        return over

    def _is_past(self, run: _Run, since: float, taken: float) -> bool:
        """Says whether a run has taken its limit since then, which must be asked under the lock."""
        passed = self._clock() - since
        return passed >= self._seconds and (
            run.cpu() - taken >= self._seconds or passed >= _STARVED * self._seconds
        )

    def _why_late(self, run: _Run) -> str:
        if run.started is None:
            return "it cannot be compiled now: other grammars keep all compilers busy."
        with self._lock:
            if run.cpu() < self._seconds:
                return "it cannot be compiled now: the machine is too busy."
        return f"it takes more than {self._seconds:g} s to compile; make it simpler."

    def _replace_stuck(self) -> int:
        """Has other threads work for those whose grammar goes past its limit.

        Returns how many are not stuck then.
        """
        with self._lock:
            for run in self._running:
                if run.started is not None and self._is_past(run, run.started, 0.0):
                    run.late = True
            self._add_threads()
            return self._able

    def _add_threads(self) -> None:
        while self._able < self._threads and self._alive < self._threads + self._most_stuck:
            before = threading.stack_size(_STACK)
            threading.Thread(target=self._work, name="mlx-rq-compiler", daemon=True).start()
            threading.stack_size(before)
            self._alive += 1

    @property
    def _able(self) -> int:
        """How many threads are not stuck."""
        return self._alive - sum(run.late for run in self._running)

    def _work(self) -> None:
        """Compiles one grammar after the other, as long as this thread is wanted."""
        while (run := self._queue.get()) is not None:
            self._compile_one(run)
            with self._lock:
                self._running.discard(run)
                run.cpu = partial(float, run.cpu())
                run.ended.set()
                if self._able > self._threads:
                    self._alive -= 1
                    return

    def _compile_one(self, run: _Run) -> None:
        try:
            self._set_up()
            cpu = self._cpu()
            begun = cpu()
            with self._lock:
                run.started, run.cpu = self._clock(), lambda: cpu() - begun
                self._running.add(run)
            run.compiled = self._compile(run.grammar)
        except GrammarFault as fault:
            run.fault = GrammarFault(fault.part, str(fault))
        except (
            BaseException
        ) as error:  # a panic of the engine too: the sequence must not wait for ever
            run.fault = GrammarFault(0, f"it cannot be compiled: {error}")
            run.accident = True


_all: "WeakSet[Compilers]" = WeakSet()


@atexit.register
def _wait_at_exit() -> None:
    """Waits for the engine; where it does not come to an end, ends the program without it."""
    until = time.monotonic() + _LONGEST_EXIT
    if any(compilers.wait_at_exit(until) for compilers in list(_all)):
        _logger.warning("A grammar was still being compiled: the program ends without it.")
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)


def _key(grammar: Grammar) -> str:
    """Tells grammars apart, and what is checked at the end: equal ones may differ in that."""
    parts = [(part.lark, part.schema, part.unenforced) for part in grammar.parts]
    return hashlib.sha256(json.dumps([grammar.lark, parts]).encode()).hexdigest()
