"""Compiles grammars beside the generation: a few threads, a time limit each, the newest kept."""

import atexit
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from weakref import WeakSet

from mlx_rq.engine.structured.constraint import Compiled, GrammarFault
from mlx_rq.engine.structured.grammar import Grammar

_LONGEST_EXIT = 10.0
"""Seconds that the end of the program waits for grammars that are being compiled."""

_STARVED = 10
"""A grammar waits for this many times its own time, where all threads are stuck with others."""


@dataclass(eq=False, slots=True)
class _Run:
    """The compiling of one grammar. It may go on when those who waited for it have given up."""

    grammar: Grammar
    started: float | None = None
    late: bool = False
    """Whether its time was over before it ended, so that its thread was replaced."""
    ended: threading.Event = field(default_factory=threading.Event)
    compiled: Compiled | None = None
    fault: GrammarFault | None = None
    accident: bool = False
    """Whether it failed in a way that tells nothing about the grammar."""


class Compilation:
    """A grammar that is being compiled, or was, as those have it who wait for it.

    Several may wait for one run. Whoever comes when its time is over already gets the same time
    again: what a busy machine held up may be through by then.
    """

    def __init__(self, run: _Run, compilers: "Compilers", since: float) -> None:
        self._run = run
        self._compilers = compilers
        self._since = since

    @property
    def ready(self) -> bool:
        """Whether `result` need not wait: the compilation has ended, or its time is over."""
        return self._run.ended.is_set() or self._compilers._is_over(self._run, self._since)

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
    """Compiles grammars on a few threads, each within a time limit, and keeps the newest.

    A thread cannot be stopped: one that goes on past the limit is replaced by another, up to
    `most_stuck` at a time. Once it is through, it works on if there are less than `threads` others.
    `set_up` is called before the first grammar's time begins; it may be called more than once.
    """

    def __init__(
        self,
        compile: Callable[[Grammar], Compiled],
        *,
        set_up: Callable[[], object] = lambda: None,
        threads: int = 2,
        seconds: float = 2.0,
        kept: int = 256,
        most_stuck: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compile = compile
        self._set_up = set_up
        self._threads = threads
        self._seconds = seconds
        self._kept = kept
        self._most_stuck = most_stuck
        self._clock = clock
        self._cache: OrderedDict[str, Compilation] = OrderedDict()
        self._queue: SimpleQueue[_Run | None] = SimpleQueue()
        self._lock = threading.Lock()  # for all that follows, and for `late` and `ended` of runs
        self._running: set[_Run] = set()
        self._alive = 0
        with self._lock:
            self._add_threads()
        _all.add(self)

    def wait_at_exit(self, until: float) -> None:
        """Waits for grammars that are being compiled, up to a time on the clock of the machine.

        A thread that comes back from the engine after the interpreter has gone would crash.
        """
        with self._lock:
            running = list(self._running)
        for run in running:
            run.ended.wait(max(0.0, until - time.monotonic()))

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
            compilation = Compilation(_Run(grammar), self, self._clock())
            self._queue.put(compilation._run)
        elif compilation.ready and not compilation._run.ended.is_set():
            compilation = Compilation(compilation._run, self, self._clock())
        self._cache[key] = compilation
        self._cache.move_to_end(key)
        while len(self._cache) > self._kept:
            self._cache.popitem(last=False)
        return compilation

    def _is_over(self, run: _Run, since: float) -> bool:
        """Says whether the time is over for those who wait for a run since then."""
        started, now = run.started, self._clock()
        if started is None:
            # Not by its own run alone: whoever waited for the one that is stuck may be gone.
            able = self._replace_stuck()
            return able == 0 and now - since >= _STARVED * self._seconds
        over = now - max(started, since) >= self._seconds
        if over:
            self._replace_stuck()
        return over

    def _why_late(self, run: _Run) -> str:
        if run.started is None:
            return "it cannot be compiled now: other grammars keep all compilers busy."
        return f"it takes more than {self._seconds:g} s to compile; make it simpler."

    def _replace_stuck(self) -> int:
        """Has other threads work for those whose grammar takes more than its time.

        Returns how many are not stuck then.
        """
        with self._lock:
            now = self._clock()
            for run in self._running:
                if run.started is not None and now - run.started >= self._seconds:
                    run.late = True
            self._add_threads()
            return self._able

    def _add_threads(self) -> None:
        while self._able < self._threads and self._alive < self._threads + self._most_stuck:
            threading.Thread(target=self._work, name="mlx-rq-compiler", daemon=True).start()
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
                run.ended.set()
                if self._able > self._threads:
                    self._alive -= 1
                    return

    def _compile_one(self, run: _Run) -> None:
        try:
            self._set_up()
            with self._lock:
                run.started = self._clock()
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
    until = time.monotonic() + _LONGEST_EXIT
    for compilers in list(_all):
        compilers.wait_at_exit(until)


def _key(grammar: Grammar) -> str:
    """Tells grammars apart, and what is checked at the end: equal ones may differ in that."""
    parts = [(part.lark, part.schema, part.unenforced) for part in grammar.parts]
    return hashlib.sha256(json.dumps([grammar.lark, parts]).encode()).hexdigest()
