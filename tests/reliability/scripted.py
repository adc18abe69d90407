"""An engine that does to each task what its prompt says, and says on stdout what it does.

    answer             after two steps                raise in add, raise in step
    slow 20            after so many steps            abort, abort in add   (ends the process)
    hold PATH          once that file is there        hang                  (for ever)
    forget             takes it in and drops it       wrong id, wrong shape

Answers are a function of the job's id, so that one that was altered is found out.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fakes import FakeEngine, answer

from mlx_rq.engine.interface import Outcome, Task


def say(what: str) -> None:
    """Writes a line in one piece: several processes share the pipe."""
    os.write(1, f"{os.getpid()} {what}\n".encode())


def verb(task: Task) -> str:
    """What is to be done to a task: its prompt up to a bar."""
    return str(getattr(task.request, "prompt", "answer")).partition(" |")[0]


class ScriptedEngine(FakeEngine):
    """See above. `seam` is called with the name of each place where a worker may be killed.

    `hangs` is called again and again by one that hangs.
    """

    def __init__(
        self,
        capacity: int,
        pace: float = 0.0,
        seam: Callable[[str], None] = lambda name: None,
        hangs: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(capacity=capacity)
        self._pace = pace
        self._seam = seam
        self._hangs = hangs
        self._steps: dict[str, int] = {}

    def throttle(self, share: float) -> None:
        super().throttle(share)
        say(f"rows {self.capacity}")

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        for task in tasks:
            assert task.id not in self._tasks, "a task was added twice"
            if verb(task) == "raise in add":
                raise RuntimeError(f"told to raise when {task.id} is added")
            if verb(task) == "abort in add":
                for in_flight in tasks:
                    say(f"began {in_flight.id}")
                os.abort()
            if verb(task) != "forget":
                self._tasks[task.id] = task
                self._steps[task.id] = 0
        return []

    def step(self) -> list[Outcome]:
        batch = [self._tasks[task_id] for task_id in self.in_flight]
        for task in batch:  # all of them are in this step, whichever it is that ends it
            if self._steps[task.id] == 0:
                say(f"began {task.id}")
        outcomes = [outcome for task in batch if (outcome := self._advance(task)) is not None]
        if batch:
            time.sleep(self._pace)  # as if computing took its time
        if outcomes:
            self._seam("generated")
        return outcomes

    def _advance(self, task: Task) -> Outcome | None:
        step = self._steps[task.id]
        self._steps[task.id] += 1
        self._seam("prefill" if step == 0 else "decode")
        does, _, argument = verb(task).partition(" ")
        match verb(task):
            case "raise in step":
                raise RuntimeError(f"told to raise at {task.id}")
            case "abort":
                os.abort()
            case "hang":
                say("hangs")
                while True:
                    self._hangs()
                    time.sleep(0.01)
        if does == "hold":
            if not Path(argument).exists():
                time.sleep(0.01)
                return None
        elif step < (int(argument) if does == "slow" else 1):
            return None
        return self._answered(task)

    def _answered(self, task: Task) -> Outcome:
        self.cancel(task.id)
        self.totals.tasks += 1
        say(f"answered {task.id}")
        result: Mapping[str, Any] = answer(task)
        if verb(task) == "wrong shape":
            result = {"object": "text_completion", "text": b"no JSON"}
        return Outcome("0" * 32 if verb(task) == "wrong id" else task.id, result)

    def cancel(self, task_id: str) -> None:
        if self._tasks.pop(task_id, None) is not None:
            del self._steps[task_id]
            say(f"left {task_id}")
