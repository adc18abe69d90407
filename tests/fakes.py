"""Stand-ins for the tests: an engine that does as it is told, and a worker that runs in a thread.

Redis is never faked: every test that needs one gets a real valkey-server (see `conftest.py`).
"""

import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from mlx_rq.engine.interface import Adapter, IntegrityError, Outcome, Partial, Steps, Task, Totals
from mlx_rq.jobs.openai.requests import ANY_MODEL, CompletionRequest
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.worker.models.switch import EngineSwitch
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.pause import Pause
from mlx_rq.worker.process.power import KeepAwake
from mlx_rq.worker.worker import MLXWorker

PATIENCE = 60.0
"""Seconds after which a test gives up on something that should have happened long before."""

CASES = Path(__file__).parent / "cases"

StartWorker = Callable[..., "RunningWorker"]

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def answer(task: Task) -> dict[str, Any]:
    """An answer as OpenAI's client parses it in strict validation; its text names the task."""
    common = {"created": 1_764_201_600, "model": "fake", "system_fingerprint": "fp_fake"}
    if isinstance(task.request, CompletionRequest):
        choice = {"index": 0, "text": f"text for {task.id}", "logprobs": None}
        return {
            "id": f"cmpl-{task.id}",
            "object": "text_completion",
            **common,
            "choices": [{**choice, "finish_reason": "length"}],
            "usage": USAGE,
        }
    message = {"role": "assistant", "content": f"chat for {task.id}", "refusal": None}
    return {
        "id": f"chatcmpl-{task.id}",
        "object": "chat.completion",
        **common,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE,
    }


def failure(code: str, message: str = "The engine would not.") -> dict[str, Any]:
    """An outcome that is an error object."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return {"error": error}


class FakeEngine:
    """An engine (see `mlx_rq.engine.interface.Engine`) that answers at once, or as it is told.

    `hold=True` keeps every task until `release()`. `answer_with` makes the result of a task,
    `refuse` may end a task when it is added, `raise_in_step` is raised by the next step.
    """

    def __init__(
        self,
        model_id: str = "fake",
        *,
        capacity: int = 16,
        hold: bool = False,
        answer_with: Callable[[Task], Mapping[str, Any]] = answer,
        refuse: Callable[[Task], Mapping[str, Any] | None] = lambda task: None,
    ) -> None:
        self.model_id = model_id
        self.fingerprint = "fp_fake"
        self.prefix_sharing = "held once (fake)"
        self.drafting = ""
        self.totals = Totals()
        self.on_progress: Callable[[], None] = lambda: None
        self.capacity = self._most = capacity
        self.answer_with = answer_with
        self.refuse = refuse
        self.raise_in_step: BaseException | None = None
        self.fault: str | None = None
        """What the next check finds."""
        self.tokens_of_a_task = 10
        self.spares = False
        """Whether another engine might as well do what waits."""
        self.steps = 0
        self.closed = 0
        self.adapted: list[str | None] = []
        """The adapters that were put on it, None where one was taken off."""
        self.mixes: Collection[str] = ()
        """The adapters that it can mix."""
        self.added: list[Task] = []
        self.cancelled: list[str] = []
        self.took: Steps | None = None
        """The steps that tasks have taken when they end."""
        self.asked = 0
        """How often somebody asked what tasks have said so far."""
        self._said: dict[str, Sequence[Partial]] = {}
        self._counted: dict[str, int] = {}
        self._tasks: dict[str, Task] = {}
        self._holding = hold
        self._released: set[str] = set()
        self._changed = threading.Condition()

    @property
    def running(self) -> int:
        return min(len(self._tasks), self.capacity)

    @property
    def waiting(self) -> int:
        return max(0, len(self._tasks) - self.capacity)

    @property
    def waiting_tokens(self) -> int:
        return self.tokens_of_a_task * self.waiting

    @property
    def in_flight(self) -> list[str]:
        return list(self._tasks)[: self.capacity]

    @property
    def task_ids(self) -> list[str]:
        return list(self._tasks)

    def memory(self) -> dict[str, int | None]:
        held = {"active": 6_000_000_000, "cache": 500, "peak": 7_000, "ceiling": 8_000_000_000}
        return {**held, "weights": 4_200_000_000}

    def check(self) -> None:
        if self.fault is not None:
            raise IntegrityError(self.fault)

    def throttle(self, share: float) -> None:
        self.capacity = max(1, int(self._most * share))

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        refused = []
        with self._changed:
            for task in tasks:
                assert task.id not in self._tasks, "a task was added twice"
                self.added.append(task)
                if (refusal := self.refuse(task)) is not None:
                    refused.append(Outcome(task.id, refusal))
                else:
                    self._tasks[task.id] = task
                    self.totals.tasks += 1
            self._changed.notify_all()
        return refused

    def step(self) -> list[Outcome]:
        with self._changed:
            self.steps += 1
            self._changed.notify_all()
            if self.raise_in_step is not None:
                raise self.raise_in_step
            batch = list(self._tasks.values())[: self.capacity]
            ready = [task for task in batch if not self._holding or task.id in self._released]
            if not ready and batch:
                self._changed.wait(0.01)  # as if a step of decode took its time
            for task in ready:
                del self._tasks[task.id]
            return [Outcome(task.id, self.answer_with(task), self.took) for task in ready]

    def partial(self, task_ids: Collection[str]) -> Mapping[str, Sequence[Partial]]:
        with self._changed:
            self.asked += 1
            return {
                task_id: self._said[task_id]
                for task_id in task_ids
                if task_id in self._said and task_id in self._tasks
            }

    def generated(self) -> dict[str, int]:
        with self._changed:
            return {task_id: self._counted.get(task_id, 0) for task_id in self.in_flight}

    def spare(self, count: int) -> list[str]:
        with self._changed:
            waiting = list(self._tasks)[self.capacity :] if self.spares else []
            return waiting[::-1][:count]

    def cancel(self, task_id: str) -> None:
        with self._changed:
            self.cancelled.append(task_id)
            self._tasks.pop(task_id, None)
            self._changed.notify_all()

    def adapt(self, adapter: Adapter | None) -> None:
        with self._changed:
            assert not self._tasks, "an engine was adapted that had tasks"
            self.adapted.append(None if adapter is None else adapter.model_id)

    def mix(self, adapters: Mapping[str, Adapter]) -> list[str]:
        ids = dict.fromkeys(adapter.model_id for adapter in adapters.values())
        return [model_id for model_id in ids if model_id in self.mixes]

    def close(self) -> None:
        with self._changed:
            assert not self._tasks, "an engine was closed that had tasks"
            self.closed += 1
            self._changed.notify_all()

    # What tests do with it:

    def hold(self) -> None:
        """Answers nothing any more until it is released."""
        with self._changed:
            self._holding = True
            self._released.clear()

    def release(self, *task_ids: str) -> None:
        """Answers the named tasks, or without names everything, now and from now on."""
        with self._changed:
            self._released.update(task_ids)
            self._holding = self._holding and bool(task_ids)
            self._changed.notify_all()

    def say(self, task_id: str, *said: Partial) -> None:
        """Lets a task have said so much by now."""
        with self._changed:
            self._said[task_id] = said

    def count(self, task_id: str, tokens: int) -> None:
        """Lets a task have generated so many tokens by now."""
        with self._changed:
            self._counted[task_id] = tokens

    def fail_next_step(self, error: BaseException) -> None:
        """Makes the next step raise."""
        with self._changed:
            self.raise_in_step = error
            self._changed.notify_all()

    def wait_until(self, happened: Callable[["FakeEngine"], bool]) -> None:
        """Returns once something has happened to the engine; fails the test where it does not."""
        with self._changed:
            assert self._changed.wait_for(lambda: happened(self), PATIENCE)

    def wait_for_tasks(self, count: int) -> list[str]:
        """Returns the ids of the tasks added so far, once there are as many as this."""
        self.wait_until(lambda engine: len(engine.added) >= count)
        return [task.id for task in self.added]


class RunningWorker:
    """An MLXWorker at work in a thread of its own."""

    def __init__(self, worker: MLXWorker, engine: FakeEngine) -> None:
        self.worker = worker
        self.engine = engine
        self.ended: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mlx-rq worker", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        return self.worker.name

    def _run(self) -> None:
        try:
            self.ended = self.worker.run()
        except BaseException as error:
            self.error = error

    def ask_to_stop(self) -> None:
        """Does what SIGTERM does, and wakes the worker where it waits for a wake-up."""
        self.worker.request_stop(15, None)
        self.ring()

    def claim_no_more(self) -> None:
        """Lets it finish what it holds, however long that takes."""
        self.worker._stop.asked = True
        self.take_turns()

    def take_turns(self) -> None:
        """Waits until it has taken a whole turn from now on."""
        steps = self.engine.steps
        self.engine.wait_until(lambda engine: engine.steps >= steps + 2)

    def ring(self) -> None:
        """Wakes the worker where it waits for jobs."""
        options = self.worker.connection.connection_pool.connection_kwargs
        if "host" not in options:  # it is found through Sentinels
            self.worker.connection.rpush(keys.wake_up(ANY_MODEL), 1)
            return
        with Redis(host=options["host"], port=options["port"], db=options["db"]) as connection:
            connection.rpush(keys.wake_up(ANY_MODEL), 1)

    def join(self) -> int:
        """Waits for the end of the worker; returns how many jobs it ended, or raises its error."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), "the worker did not stop"
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        assert self.ended is not None
        return self.ended

    def stop(self) -> int:
        """Stops the worker in good order; what it still holds is handed back."""
        self.ask_to_stop()
        return self.join()

    def stop_at_once(self) -> int:
        """Does what a second signal does: hands back without finishing."""
        self.worker.request_stop(15, None)
        return self.stop()


@contextmanager
def worker_in_thread(
    redis_url: str,
    engine: FakeEngine | None = None,
    *,
    switch: EngineSwitch | None = None,
    served_names: Sequence[str] = (),
    name: str | None = None,
    connection: Redis | None = None,
    pause: Pause | None = None,
    awake: KeepAwake | None = None,
    **options: Any,
) -> Iterator[RunningWorker]:
    """Runs a worker while the block runs, then stops it; `options` are those of WorkerOptions.

    It checks itself. A `switch` has engines of several models, one of which `engine` may be.
    """
    engine = engine or FakeEngine()
    worker = MLXWorker(
        switch or EngineSwitch.of(engine, served_names),
        connection or new_connection(redis_url),
        new_connection(redis_url),
        options=WorkerOptions(**{"check": True, **options}),
        name=name,
        pause=pause,
        awake=awake,
    )
    running = RunningWorker(worker, engine)
    try:
        yield running
    finally:
        if running._thread.is_alive():
            running.worker.request_stop(15, None)
            running.ask_to_stop()  # twice: nothing that a test left held is waited for
        running._thread.join(PATIENCE)
        assert not running._thread.is_alive(), "the worker did not stop"
        if running.error is not None:
            raise running.error


def eventually(condition: Callable[[], bool], what: str = "it") -> None:
    """Waits for something in Redis that wakes nobody."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        threading.Event().wait(0.01)


def until_idle(connection: Redis) -> None:
    """Waits until a worker waits for a wake-up."""
    eventually(
        lambda: any(
            client["cmd"] == "blpop" and "b" in client["flags"]
            for client in connection.client_list()
        ),
        "an idle worker",
    )


@contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    """Ignores a signal here, and in processes that are started meanwhile."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def free_port() -> int:
    """A port that nobody listens on (the system does not give it out again soon)."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
