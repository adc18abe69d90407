"""The threads that compile grammars: stuck ones are replaced, and nobody waits for ever."""

import gc
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from mlx_rq.engine.structured import compilers
from mlx_rq.engine.structured.compilers import Compilation, Compilers, thread_cpu
from mlx_rq.engine.structured.constraint import GrammarFault
from mlx_rq.engine.structured.grammar import Grammar

PATIENCE = 60.0
"""Seconds after which a test says that what it waits for does not come."""


class Workshop:
    """Compilers whose clocks stand still, and that hold up each grammar until its gate opens."""

    def __init__(self, **options: Any) -> None:
        self.now = 100.0
        self.idle = 0.0
        """How much of the time no grammar had the processor."""
        self.begun: Counter[str] = Counter()
        self.gates: dict[str, threading.Event] = defaultdict(threading.Event)
        self._entered: dict[str, threading.Event] = defaultdict(threading.Event)
        self.compilers = Compilers(
            self._compile,
            clock=lambda: self.now,
            cpu=lambda: lambda: self.now - self.idle,
            seconds=2,
            **options,
        )

    def _compile(self, grammar: Grammar) -> Any:
        name = grammar.lark or ""
        self.begun[name] += 1
        self._entered[name].set()
        assert self.gates[name].wait(2 * PATIENCE)
        return name

    def submit(self, name: str, *, held_up: bool = True) -> Compilation:
        if not held_up:
            self.gates[name].set()
        return self.compilers.submit(Grammar(name, ()))

    def is_begun(self, name: str) -> bool:
        return self._entered[name].wait(PATIENCE)

    def stick(self, *names: str) -> list[Compilation]:
        """Has grammars go on past their time, all at once."""
        stuck = [self.submit(name) for name in names]
        assert all(self.is_begun(name) for name in names)
        self.now += 2
        return stuck


def outcome(compilation: Compilation) -> Any:
    """What comes of a compilation whose time does not pass; fails where nothing comes."""
    ended = threading.Event()
    outcomes: list[Any] = []

    def wait() -> None:
        try:
            outcomes.append(compilation.result())
        except GrammarFault as fault:
            outcomes.append(fault)
        ended.set()

    threading.Thread(target=wait, daemon=True).start()
    assert ended.wait(PATIENCE), "nobody compiles it"
    return outcomes[0]


def test_when_all_the_stuck_ones_come_back_as_many_threads_work_as_at_first() -> None:
    shop = Workshop(threads=2, most_stuck=4)
    names = ["a", "b", "c", "d", "e", "f"]
    stuck = []
    for pair in (names[:2], names[2:4], names[4:]):
        stuck += shop.stick(*pair)
        assert all(compilation.ready for compilation in stuck)

    waiting = shop.submit("waiting", held_up=False)
    assert not waiting.ready
    for name in names:
        shop.gates[name].set()

    assert outcome(waiting) == "waiting"
    for name in ("x", "y"):  # two at a time: both have begun before either may end
        shop.submit(name)
    assert shop.is_begun("x")
    assert shop.is_begun("y")


def test_no_more_threads_work_than_at_first_when_stuck_ones_come_back() -> None:
    shop = Workshop(threads=1, most_stuck=1)
    (stuck,) = shop.stick("a")
    assert stuck.ready
    assert outcome(shop.submit("b", held_up=False)) == "b"
    shop.gates["a"].set()
    assert outcome(shop.submit("a")) == "a"

    first, second = shop.submit("x"), shop.submit("y")
    assert shop.is_begun("x")
    assert sum(shop.begun[name] for name in "xy") == 1
    shop.gates["x"].set()
    shop.gates["y"].set()
    assert [outcome(first), outcome(second)] == ["x", "y"]


def test_where_all_are_stuck_a_grammar_does_not_wait_for_ever() -> None:
    shop = Workshop(threads=1, most_stuck=1)
    for name in ("a", "b"):
        (stuck,) = shop.stick(name)
        assert stuck.ready
    waiting = shop.submit("c", held_up=False)
    shop.now += 19
    assert not waiting.ready

    shop.now += 1

    assert waiting.ready
    assert "keep all compilers busy" in str(outcome(waiting))
    for name in ("a", "b"):
        shop.gates[name].set()
    assert outcome(shop.submit("c", held_up=False)) == "c"


def test_stuck_threads_are_replaced_though_nobody_waits_for_their_grammars_any_more() -> None:
    shop = Workshop(threads=2)
    shop.stick("a", "b")  # whose jobs are cancelled: nobody asks for them again
    assert outcome(shop.submit("c", held_up=False)) == "c"


def test_a_grammar_that_came_through_late_is_there_for_the_next_who_asks() -> None:
    shop = Workshop()
    (slow,) = shop.stick("slow")
    assert isinstance(outcome(slow), GrammarFault)
    assert slow.compiled is None

    again = shop.submit("slow")
    assert not again.ready, "as much time as anybody's"
    shop.gates["slow"].set()

    assert outcome(again) == again.compiled == "slow"
    assert shop.submit("slow").ready
    assert shop.begun["slow"] == 1


def test_a_grammar_that_never_ends_holds_up_one_thread_however_often_it_is_asked_for() -> None:
    shop = Workshop(threads=1, most_stuck=1)
    (first,) = shop.stick("hostile")
    second = shop.submit("hostile")
    assert (first.ready, second.ready) == (True, False)
    shop.now += 2
    assert isinstance(outcome(second), GrammarFault)

    assert shop.begun["hostile"] == 1
    assert outcome(shop.submit("harmless", held_up=False)) == "harmless"


def test_the_time_begins_after_the_set_up() -> None:
    open_up = threading.Event()
    waiting = threading.Semaphore(0)

    def set_up() -> None:
        waiting.release()
        assert open_up.wait(PATIENCE)

    shop = Workshop(threads=2, set_up=set_up)
    both = [shop.submit(name, held_up=False) for name in "ab"]
    for _ in both:
        assert waiting.acquire(timeout=PATIENCE)
    shop.now += 60
    assert not any(compilation.ready for compilation in both)
    open_up.set()
    assert [outcome(compilation) for compilation in both] == ["a", "b"]


class Panic(BaseException):
    """What llguidance's Rust raises when it panics: no Exception."""


@pytest.mark.parametrize("accident", [Panic, MemoryError])
def test_an_accident_is_the_outcome_of_one_compilation_and_ends_no_thread(
    accident: Callable[[str], BaseException],
) -> None:
    accidents = [accident("out of luck")]

    def compile(grammar: Grammar) -> Any:
        if accidents:
            raise accidents.pop()
        return grammar.lark

    compilers = Compilers(compile, threads=1, clock=lambda: 0.0)
    fault = outcome(compilers.submit(Grammar("a", ())))
    assert str(fault) == "it cannot be compiled: out of luck"
    assert outcome(compilers.submit(Grammar("a", ()))) == "a", "it tells nothing of the grammar"


def test_a_fault_of_the_grammar_is_remembered() -> None:
    begun = Counter[str]()

    def compile(grammar: Grammar) -> Any:
        begun[grammar.lark or ""] += 1
        raise GrammarFault(0, "wrong")

    compilers = Compilers(compile, threads=1, clock=lambda: 0.0)
    faults = [outcome(compilers.submit(Grammar("a", ()))) for _ in range(2)]
    assert [str(fault) for fault in faults] == ["wrong", "wrong"]
    assert begun["a"] == 1


def test_a_fault_that_is_kept_keeps_nobody_who_was_told_of_it() -> None:
    class Asker:
        """Whoever has a grammar compiled, with all that it holds."""

        def ask(self, compilation: Compilation) -> None:
            with pytest.raises(GrammarFault, match="no grammar"):
                compilation.result()

    def refuse(grammar: Grammar) -> Any:
        raise GrammarFault(0, "no grammar")

    compilation = Compilers(refuse).submit(Grammar("x", ()))
    asker = Asker()
    gone = weakref.ref(asker)
    asker.ask(compilation)

    del asker
    gc.collect()

    assert gone() is None


def test_the_end_of_the_program_waits_for_what_is_being_compiled() -> None:
    shop = Workshop(threads=1)
    compilation = shop.submit("slow")
    assert shop.is_begun("slow")
    leaving = threading.Thread(target=shop.compilers.wait_at_exit, args=(time.monotonic() + 60,))
    leaving.start()
    assert leaving.is_alive()

    shop.gates["slow"].set()
    leaving.join(PATIENCE)

    assert not leaving.is_alive()
    assert compilation.ready
    shop.stick("stuck")
    assert not shop.compilers.wait_at_exit(time.monotonic())  # and not for ever
    shop.gates["stuck"].set()


def test_a_program_that_ends_while_the_engine_works_on_ends_without_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that comes back from the engine once the interpreter has gone is a crash."""
    ends: list[int] = []
    cpu = iter(range(100))
    shop = Workshop()
    shop.compilers._cpu = lambda: lambda: float(next(cpu))  # it computes whenever one looks
    shop.submit("endless")
    assert shop.is_begun("endless")
    monkeypatch.setattr(compilers, "_all", [shop.compilers])
    monkeypatch.setattr(compilers, "_LONGEST_EXIT", 0.01)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr("os._exit", ends.append)
    compilers._wait_at_exit()
    assert ends == [1]
    assert "still being compiled" in caplog.text
    shop.gates["endless"].set()


def test_a_busy_machine_has_no_grammar_given_up() -> None:
    shop = Workshop(threads=1)
    waiting = shop.submit("good")
    assert shop.is_begun("good")
    shop.now += 19
    shop.idle += 18  # it had the processor for a second
    assert not waiting.ready
    shop.now += 0.9
    assert not waiting.ready
    shop.gates["good"].set()
    assert outcome(waiting) == "good"


def test_a_grammar_that_never_gets_the_processor_is_given_up_in_the_end() -> None:
    shop = Workshop(threads=1)
    waiting = shop.submit("starved")
    assert shop.is_begun("starved")
    shop.now += 20
    shop.idle += 20
    assert waiting.ready
    assert str(outcome(waiting)) == "it cannot be compiled now: the machine is too busy."
    shop.gates["starved"].set()


def test_the_cpu_of_a_thread_is_read_by_another() -> None:
    clocks: SimpleQueue[Callable[[], float]] = SimpleQueue()
    go_on, worked = threading.Event(), threading.Event()
    over = threading.Event()

    def work() -> None:
        clocks.put(thread_cpu())
        go_on.wait(PATIENCE)
        begun = time.thread_time()
        while time.thread_time() - begun < 0.05:
            pass
        worked.set()
        over.wait(PATIENCE)

    thread = threading.Thread(target=work)
    thread.start()
    cpu = clocks.get(timeout=PATIENCE)
    before = cpu()
    go_on.set()
    assert worked.wait(PATIENCE)
    assert cpu() - before >= 0.05
    over.set()
    thread.join()


def test_what_is_kept_is_bounded_by_what_it_took() -> None:
    shop = Workshop(kept=8, kept_seconds=3.5)
    for name in "abcd":  # a second each: three of them fit
        waiting = shop.submit(name)
        assert shop.is_begun(name)
        shop.now += 1
        shop.gates[name].set()
        assert outcome(waiting) == name
    for name in "dcbade":
        assert outcome(shop.submit(name, held_up=False)) == name
    assert shop.begun == {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1}
