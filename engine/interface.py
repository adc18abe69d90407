"""The seam between the life of a job and the making of tokens.

The worker knows an engine only by this protocol, so that tests put a fake behind it which answers
slowly, wrongly, or not at all.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mlx_rq.jobs.openai.job_request import JobRequest


@dataclass(frozen=True, slots=True)
class Task:
    """A job as the engine sees it: an id, a validated request, and how urgent it is.

    A smaller `rank` is generated first. `submitted_at` is Unix time, None where nobody knows.
    `model` is the name by which it is asked for: it tells adapters that are mixed from each other.
    `others_follow` says that others are to come that begin like it.
    """

    id: str
    request: JobRequest
    rank: int = 0
    submitted_at: float | None = None
    model: str = ""
    others_follow: bool = False


class Steps(NamedTuple):
    """How many seconds before its end a task was rendered, admitted, and had its first token.

    None for what did not happen. `preempted` counts how often it had to make room, `failed` how
    often the device failed below it. `first_with` is the task for which the prefix was computed
    that it was admitted with; empty where that is itself, or there was none.
    """

    rendered: float | None
    admitted: float | None
    first_token: float | None
    preempted: int = 0
    failed: int = 0
    first_with: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a task ended: the response object, or `{"error": …}`; `steps` where they are known."""

    id: str
    result: Mapping[str, Any]
    steps: Steps | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Partial:
    """What one choice of a task has said so far, as far as its end will not take it back."""

    choice: int
    reasoning: str = ""
    content: str = ""


@dataclass(slots=True)
class Totals:
    """What an engine has computed since it started: counts of tokens, seconds of time."""

    tasks: int = 0
    prompt_tokens: int = 0
    distinct_tokens: int = 0
    """Distinct tokens of all prompts so far: what had to be computed at least.

    What a grammar decided of the answers is counted with the prompts.
    """
    prefilled_tokens: int = 0
    positions_computed: int = 0
    decoded_tokens: int = 0
    decode_steps: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafted_tokens: int = 0
    """Tokens that a draft model proposed."""
    accepted_tokens: int = 0
    """Those of them that the model chose, too."""
    sequences_preempted: int = 0
    sequences_sharing: int = 0
    """Sequences that referred to the KV of a prefix instead of copying it."""
    prefixes_held: int = 0
    prefix_bytes: int = 0
    prefixes_evicted: int = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder of weights that are put on a model; `model_id` is what clients call the two."""

    model_id: str
    folder: Path


class IntegrityError(Exception):
    """What is known of jobs and sequences contradicts itself; the message says where."""


class DeviceExhausted(RuntimeError):
    """The device has no memory, or no time, for anything at all now: that is no task's doing."""


class Engine(Protocol):
    """Turns tasks into outcomes, many at a time. Used from one thread only."""

    on_progress: Callable[[], None]
    """Called from inside a step, whenever a piece of it is done."""

    @property
    def model_id(self) -> str:
        """What clients call the model."""

    @property
    def fingerprint(self) -> str:
        """Names the model and the versions that answer."""

    @property
    def prefix_sharing(self) -> str:
        """Says whether sequences refer to the KV of shared prefixes or copy it, and why."""

    @property
    def drafting(self) -> str:
        """Says which model drafts, and with what success; empty where none does."""

    @property
    def totals(self) -> Totals: ...

    @property
    def waiting(self) -> int:
        """Tasks that hold no place in the batch yet."""

    @property
    def waiting_tokens(self) -> int:
        """Tokens of the prompts of those that wait."""

    @property
    def running(self) -> int:
        """Tasks of which a sequence is in the batch."""

    @property
    def capacity(self) -> int:
        """Sequences that the batch has room for."""

    def memory(self) -> Mapping[str, int | None]:
        """Says what MLX holds: bytes `active`, in its `cache`, at the `peak`, and its `ceiling`.

        Of the active ones, `weights` are the model's.

        May be called from any thread. Nobody need have set a ceiling.
        """

    @property
    def in_flight(self) -> Collection[str]:
        """Ids of the tasks that the next step computes for: those at fault, should it abort."""

    @property
    def task_ids(self) -> Collection[str]:
        """Ids of the tasks that have not ended."""

    def check(self) -> None:
        """Raises IntegrityError where what the engine holds contradicts itself."""

    def throttle(self, share: float) -> None:
        """Uses only a part (0 to 1) of the sequences and the memory that there are, from now on."""

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Takes tasks in; returns the outcomes of those for which there is nothing to generate."""

    def step(self) -> list[Outcome]:
        """Does a bounded piece of work and returns the tasks that ended by it."""

    def partial(self, task_ids: Collection[str]) -> Mapping[str, Sequence[Partial]]:
        """Tells what tasks have said so far; those that have said nothing, or ended, are left out.

        Costs nothing for other tasks.
        """

    def generated(self) -> Mapping[str, int]:
        """Tells how many tokens each task of the batch has generated so far."""

    def spare(self, count: int) -> Collection[str]:
        """Ids of up to so many tasks, the last first, that another engine might as well do."""

    def cancel(self, task_id: str) -> None:
        """Forgets a task, waiting or running. Does nothing where it is unknown."""

    def close(self) -> None:
        """Frees the memory that the model and its caches take. It is not used afterwards."""


class ModelEngine(Engine, Protocol):
    """An engine of one model, on which adapters can be put."""

    def adapt(self, adapter: Adapter | None) -> None:
        """Puts an adapter on the model in place of another, or takes it off; no tasks may be left.

        Raises ModelError where it does not fit, and what reading it raises; then none is on.
        """

    def mix(self, adapters: Mapping[str, Adapter]) -> Collection[str]:
        """Has tasks of the model and of its adapters computed together, where that pays.

        Adapters are given by the names that tasks have for them. Tells which are mixed, by id:
        their tasks are taken whenever no other adapter is on.
        """
