"""The states of a sequence, and the ways between them.

    COMPILING ──→ WAITING ⇄ RUNNING ──→ DONE

`SequenceTable` alone changes a sequence's state; the reason for each change is a method of it.
"""

from enum import Enum


class State(Enum):
    """Where a sequence is on its way."""

    COMPILING = "compiling"
    """Its grammar is not compiled yet."""
    WAITING = "waiting"
    """It has no place in the batch: not yet, or no more, since it was preempted."""
    RUNNING = "running"
    """It is in the batch, or has its answer from a duplicate that is."""
    DONE = "done"
    """It has nothing more to generate: it is answered, or nobody asks any more."""


NEXT = {
    State.COMPILING: {State.WAITING, State.DONE},
    State.WAITING: {State.RUNNING, State.DONE},
    State.RUNNING: {State.WAITING, State.DONE},
    State.DONE: set[State](),
}
"""From each state, those that may follow. From everywhere to DONE: a task may be cancelled."""


class IllegalTransition(Exception):
    """A sequence was to become what it cannot become from where it is."""
