"""Constraints on what rows may write: the seam to a constraint engine, and one masking op a batch.

A grammar is compiled off the MLX thread while its row waits (`Compilers`). Each row then has a
`Constraint` of its own, which takes in the tokens that the row chose and marks those that may come
next. The engine behind the seam is `mlx_rq.engine.guidance`; another one needs `compile` and the
two protocols.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlx_rq.engine.check import Check
from mlx_rq.engine.grammar import Grammar

Masks = NDArray[np.int32]
"""One row of bits for each row of the batch, 32 tokens a word; all ones where a row is free."""


class Constraint(Protocol):
    """What one row may write next."""

    @property
    def taken(self) -> int:
        """How many tokens it has taken in."""

    @property
    def done(self) -> bool:
        """Whether the text is complete, so that no token may follow."""

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""

    @property
    def fault(self) -> str | None:
        """Why the engine gave the row up; its tokens mean nothing then."""

    @property
    def cut(self) -> bool:
        """Whether the text was steered to its end because the budget ran out."""

    @property
    def captures(self) -> list[dict[str, str]]:
        """The named parts of the text, in order: `name` and `text` of each."""

    def accept(self, token: int) -> None:
        """Takes in the token that the row chose."""

    def fill(self, others: Sequence["tuple[Constraint, int]"], masks: Masks) -> None:
        """Marks what this constraint and `others` (with their places in the batch) allow next."""


class Compiled(Protocol):
    """A grammar, ready to be used by any number of rows."""

    checks: Sequence[Check | None]
    """Validates what each part of the grammar describes, where that is JSON."""
    warnings: Sequence[str]
    shortest: Sequence[int] | None
    """The tokens of a short text that fits the grammar; None where none was found."""

    def start(self, budget: int, *, close: bool) -> Constraint | None:
        """Gives a row's constraint, None where all is allowed.

        With `close`, the text is steered to its end before its budget of tokens runs out.
        """


class GrammarFault(ValueError):
    """A grammar does not compile: which of its parts is to blame, and why."""

    def __init__(self, part: int, message: str) -> None:
        super().__init__(message)
        self.part = part


@mx.compile
def _masked(logits: mx.array, words: mx.array) -> mx.array:
    bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]].astype(mx.bool_)
    return mx.where(allowed, logits, -mx.inf)


def mask(logits: mx.array, constraints: Sequence[Constraint | None]) -> mx.array:
    """Sets to -inf what the rows' constraints forbid in logits [rows, vocabulary].

    Rows without a constraint, and rows that are done or given up, stay exactly as they are.
    """
    live = [
        (constraint, index)
        for index, constraint in enumerate(constraints)
        if constraint is not None and not constraint.done
    ]
    if not live:
        return logits
    masks = np.full((len(constraints), (logits.shape[1] + 31) // 32), -1, np.int32)
    live[0][0].fill(live, masks)
    return _masked(logits, mx.array(masks.view(np.uint32)))


@dataclass(eq=False, slots=True)
class Compilation:
    """A grammar that is being compiled, or was."""

    grammar: Grammar
    clock: Callable[[], float]
    seconds: float
    give_up: Callable[[], None]
    started: float | None = None
    _ended: threading.Event = field(default_factory=threading.Event)
    _compiled: Compiled | None = None
    _fault: GrammarFault | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, compile: Callable[[Grammar], Compiled]) -> bool:
        """Compiles on the thread that calls; returns whether that was in time."""
        self.started = self.clock()
        try:
            return self._end(compiled=compile(self.grammar))
        except GrammarFault as fault:
            return self._end(fault=fault)
        except Exception as error:  # whatever it is, the row must not wait for ever
            return self._end(fault=GrammarFault(0, f"it cannot be compiled: {error}"))

    def _end(self, *, compiled: Compiled | None = None, fault: GrammarFault | None = None) -> bool:
        """Sets the result, unless there is one; returns whether it did."""
        with self._lock:
            if self._ended.is_set():
                return False
            self._compiled, self._fault = compiled, fault
            self._ended.set()
            return True

    @property
    def ready(self) -> bool:
        """Whether `result` is there; gives the compilation up once its time is over."""
        if self._ended.is_set():
            return True
        if self.started is None or self.clock() - self.started < self.seconds:
            return False
        message = f"it takes more than {self.seconds:g} s to compile; make it simpler."
        if self._end(fault=GrammarFault(0, message)):
            self.give_up()
        return True

    def result(self) -> Compiled:
        """Waits for the compiled grammar; raises GrammarFault where there will be none."""
        while not self.ready:
            self._ended.wait(0.01)
        if self._compiled is None:
            raise self._fault or GrammarFault(0, "it was not compiled")
        return self._compiled


class Compilers:
    """Compiles grammars on a few threads, each within a time limit, and keeps the newest.

    A thread cannot be stopped: one that goes on past the limit is replaced by another (up to
    `most_stuck` at a time) and ends when it is through.
    """

    def __init__(
        self,
        compile: Callable[[Grammar], Compiled],
        *,
        threads: int = 2,
        seconds: float = 2.0,
        kept: int = 256,
        most_stuck: int = 4,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compile = compile
        self._seconds = seconds
        self._kept = kept
        self._clock = clock
        self._may_run = threading.Semaphore(threads + most_stuck)
        self._cache: OrderedDict[str, Compilation] = OrderedDict()
        self._queue: SimpleQueue[Compilation] = SimpleQueue()
        for _ in range(threads):
            self._add_thread()

    def submit(self, grammar: Grammar) -> Compilation:
        """Has a grammar compiled, unless one of the same content was."""
        key = _key(grammar)
        compilation = self._cache.get(key)
        if compilation is None:
            compilation = Compilation(grammar, self._clock, self._seconds, self._add_thread)
            self._cache[key] = compilation
            self._queue.put(compilation)
        self._cache.move_to_end(key)
        while len(self._cache) > self._kept:
            self._cache.popitem(last=False)
        return compilation

    def _add_thread(self) -> None:
        if self._may_run.acquire(blocking=False):
            threading.Thread(target=self._work, name="mlx-rq-compiler", daemon=True).start()

    def _work(self) -> None:
        while self._queue.get().run(self._compile):
            pass
        self._may_run.release()


def _key(grammar: Grammar) -> str:
    digest = hashlib.sha256((grammar.lark or "").encode())
    for part in grammar.parts:
        digest.update(b"\0" + part.lark.encode())
    return digest.hexdigest()
