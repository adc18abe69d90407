"""One worker with several models, with a real Valkey and engines that do as they are told."""

import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from adapting import fresh_model, write_adapter
from driving import finish
from fakes import PATIENCE, FakeEngine, RunningWorker, StartWorker, answer, eventually, until_idle
from redis import Redis

from mlx_rq import Job, JobFailed, submit, submit_many
from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Adapter, Task
from mlx_rq.engine.options import EngineOptions
from mlx_rq.jobs.openai.validation import validate
from mlx_rq.jobs.queue.overview import overview
from mlx_rq.jobs.queue.workers import ModelState, live_workers
from mlx_rq.worker import worker as worker_module
from mlx_rq.worker.models import changes, choice, setbacks
from mlx_rq.worker.models.changes import Interrupted, ModelChanges
from mlx_rq.worker.models.choice import Backlog, Change
from mlx_rq.worker.models.loading_notes import LoadingNotes
from mlx_rq.worker.models.observed import states_elsewhere
from mlx_rq.worker.models.switch import EngineSwitch, ServedModel
from mlx_rq.worker.pause import Pause, QuietHours
from mlx_rq.worker.process.power import KeepAwake

BODY = {"prompt": "Once", "max_tokens": 4}
IN_VAIN = "model bad: /models/bad holds no model*.safetensors"


class Shelf:
    """Models a, b and c; counts what is loaded. `bad` raises instead."""

    def __init__(self, *names: str, **engine_options: Any) -> None:
        self.loaded: list[str] = []
        self.engines = {name: self._engine(name, engine_options) for name in names}
        self.switch = EngineSwitch(
            [
                ServedModel((name, f"org/{name}", *(["default"] * (not n))), self._load(name))
                for n, name in enumerate(names)
            ]
        )

    def _engine(self, name: str, options: dict[str, Any]) -> FakeEngine:
        def answer_with(task: Task) -> dict[str, Any]:
            return {**answer(task), "model": name}

        return FakeEngine(name, answer_with=answer_with, **options)

    def _load(self, name: str) -> Callable[[], FakeEngine]:
        def load() -> FakeEngine:
            self.loaded.append(name)
            if name == "bad":
                raise RuntimeError(f"\n{IN_VAIN}\nand more")
            return self.engines[name]

        return load


class AdaptedShelf(Shelf):
    """Models a and b, of which a has the adapters x and y; `bad` does not fit it.

    Those that a is to mix are given by their names.
    """

    def __init__(self, mixes: str = "", **engine_options: Any) -> None:
        super().__init__("a", "b", **engine_options)
        self.engines["a"].mixes = [f"a:{own}" for own in mixes]
        a, b = self.switch.models.values()
        adapted = [
            ServedModel(
                tuple(f"{name}:{own}" for name in a.names),
                a.load,
                a.id,
                Adapter(f"a:{own}", Path(own)),
            )
            for own in ("x", "y", "bad")
        ]
        self.switch = EngineSwitch([a, *adapted, b])

    def _engine(self, name: str, options: dict[str, Any]) -> FakeEngine:
        def answer_with(task: Task) -> dict[str, Any]:
            on = engine.adapted[-1] if engine.adapted else None
            mixed = task.model if task.model in engine.mixes else None
            return {**answer(task), "model": on or mixed or name}

        def adapt(adapter: Adapter | None) -> None:
            plain(adapter)
            if adapter is not None and adapter.model_id == "a:bad":
                engine.adapted[-1] = None
                raise RuntimeError(IN_VAIN)

        engine = FakeEngine(name, answer_with=answer_with, **options)
        plain = engine.adapt
        engine.adapt = adapt  # type: ignore[method-assign]
        return engine


def jobs_for(*models: str) -> list[Job]:
    return submit_many([{**BODY, "model": model} for model in models])


def answered_by(jobs: list[Job]) -> list[str]:
    return [job.result(PATIENCE)["model"] for job in jobs]


def described(connection: Redis) -> dict[str, Any]:
    (worker,) = live_workers(connection)
    return worker


def test_each_job_is_answered_by_its_model_and_each_model_is_loaded_once(
    start_worker: StartWorker,
) -> None:
    shelf = Shelf("a", "b", "c")
    jobs = jobs_for(*"abcabcbb", "org/c", "default")
    worker = start_worker(switch=shelf.switch, burst=True)
    assert answered_by(jobs) == [*"abcabcbb", "c", "a"]
    assert worker.join() == 10
    assert sorted(shelf.loaded) == ["a", "b", "c"]
    assert shelf.loaded[0] == "b"  # of which most jobs wait
    assert shelf.switch.totals.tasks == 10
    left = shelf.loaded[-1]
    assert {name: engine.closed for name, engine in shelf.engines.items()} == {
        name: int(name != left) for name in "abc"
    }


def test_a_model_that_cannot_be_loaded_fails_its_own_jobs_and_no_others(
    start_worker: StartWorker, connection: Redis
) -> None:
    shelf = Shelf("a", "bad")
    jobs = jobs_for("bad", "a", "org/bad", "bad")
    worker = start_worker(switch=shelf.switch)
    assert jobs[1].result(PATIENCE)["model"] == "a"
    for job in (jobs[0], jobs[2], jobs[3], *jobs_for("bad")):
        with pytest.raises(JobFailed) as failed:
            job.result(PATIENCE)
        assert failed.value.error == {
            "message": f"The model could not be loaded: {IN_VAIN}",
            "type": "server_error",
            "param": "model",
            "code": "model_not_loaded",
        }
    assert shelf.loaded.count("bad") == 1  # not for each job
    worker.worker._leases.say()
    assert described(connection)["models"][1]["state"] == "failed"
    assert described(connection)["models"][1]["why"] == IN_VAIN


def test_jobs_of_a_model_that_cannot_be_loaded_end_in_a_burst(start_worker: StartWorker) -> None:
    jobs = jobs_for("bad", "a", "bad")
    worker = start_worker(switch=Shelf("a", "bad").switch, burst=True)
    assert worker.join() == 3
    assert [job.status() for job in jobs] == ["failed", "completed", "failed"]


def test_a_model_that_could_not_be_loaded_is_tried_again_after_a_while(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setbacks, "AGAIN_SECONDS", 0.0)
    shelf = Shelf("bad")
    start_worker(switch=shelf.switch)
    (job,) = jobs_for("bad")
    eventually(lambda: len(shelf.loaded) >= 2, "another try")
    assert job.status() == "queued"


def test_what_runs_is_finished_and_what_waits_goes_back_before_a_change(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "LOOK_SECONDS", 0.0)
    shelf = Shelf("a", "b", capacity=2, hold=True)
    of_a = jobs_for(*"aaaaa")
    worker = start_worker(switch=shelf.switch, max_wait=0.0)
    first = shelf.engines["a"].wait_for_tasks(5)[:2]
    (of_b,) = jobs_for("b")
    eventually(lambda: [job.status() for job in of_a].count("queued") == 3, "giving back")
    assert shelf.loaded == ["a"]
    assert {job.id for job in of_a if job.status() == "in_progress"} == set(first)

    shelf.engines["a"].release(*first)
    shelf.engines["b"].release()
    assert of_b.result(PATIENCE)["model"] == "b"
    shelf.engines["a"].release()
    assert answered_by(of_a) == ["a"] * 5
    assert shelf.loaded == ["a", "b", "a"]
    assert worker.stop() == 6


def test_no_model_is_loaded_in_a_pause(
    start_worker: StartWorker, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(worker_module, "IDLE_SECONDS", 0.01)
    shelf, moment = Shelf("a", "b", hold=True), datetime(2026, 11, 28, 8)
    shelf.engines["b"].release()
    pause = Pause(quiet_hours=[QuietHours.read("09:00-18:00")], now=lambda: moment)
    worker = start_worker(switch=shelf.switch, pause=pause, grace=3600.0, max_wait=0.0)
    (first,) = jobs_for("a")
    shelf.engines["a"].wait_for_tasks(1)
    (second,) = jobs_for("b")
    eventually(lambda: worker.worker._changes.due)
    moment = moment.replace(hour=9)
    eventually(lambda: described(connection)["paused"] == "quiet hours 09:00-18:00")
    shelf.engines["a"].release()
    first.result(PATIENCE)
    steps = shelf.engines["a"].steps
    shelf.engines["a"].wait_until(lambda engine: engine.closed == 1 or engine.steps > steps + 2)
    assert (second.status(), shelf.loaded) == ("queued", ["a"])
    moment = moment.replace(hour=18)
    assert answered_by([second]) == ["b"]


def test_it_says_what_is_loaded_and_what_is_next_and_why(
    start_worker: StartWorker, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "LOOK_SECONDS", 0.0)
    shelf = Shelf("a", "b", hold=True)
    jobs_for("a")
    worker = start_worker(switch=shelf.switch)
    shelf.engines["a"].wait_for_tasks(1)
    jobs_for("b", "b")
    eventually(lambda: worker.worker._changes.next is not None, "a look")
    worker.worker._leases.say()
    said = described(connection)
    assert said["model"] == "a"
    assert said["serves"] == ["a", "org/a", "default", "b", "org/b"]
    assert said["models"] == [
        {"id": "a", "names": ["a", "org/a", "default"], "state": "loaded", "why": None},
        {"id": "b", "names": ["b", "org/b"], "state": "can_be_loaded", "why": None},
    ]
    why = "2 jobs wait for it: when the loaded one has no more work"
    assert said["next"] == {"model": "b", "why": why}
    assert f"worker {worker.name[:8]} loads 'b' next: {why}" in overview(connection)["notes"]


def test_adapters_take_turns_on_a_model_that_is_loaded_once(
    start_worker: StartWorker, connection: Redis
) -> None:
    shelf = AdaptedShelf()
    jobs = jobs_for("a", "b", *["a:x", "a:y"] * 3, "a", "org/a:x", "default:y")
    jobs += submit_many([{**BODY, "adapters": "x"}, {**BODY, "model": "a", "adapters": "y"}])
    worker = start_worker(switch=shelf.switch, burst=True)
    assert answered_by(jobs) == [
        *("a", "b", *["a:x", "a:y"] * 3, "a", "a:x", "a:y"),
        *("a:x", "a:y"),
    ]
    assert worker.join() == len(jobs)
    assert sorted(shelf.loaded) == ["a", "b"]
    changes = shelf.engines["a"].adapted
    assert sorted(map(str, changes)) in (["None", "a:x", "a:y"], ["a:x", "a:y"])


def test_what_runs_ends_with_its_own_adapter_before_another_is_put_on(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "LOOK_SECONDS", 0.0)
    shelf = AdaptedShelf(capacity=2, hold=True)
    (of_x,) = jobs_for("a:x")
    worker = start_worker(switch=shelf.switch)
    engine = shelf.engines["a"]
    engine.wait_for_tasks(1)
    (of_y,) = jobs_for("a:y")
    eventually(lambda: worker.worker._changes.next is not None, "a look")
    assert engine.adapted == ["a:x"]
    engine.release()
    assert answered_by([of_x, of_y]) == ["a:x", "a:y"]
    assert engine.adapted == ["a:x", "a:y"]


def test_adapters_that_are_mixed_are_there_with_their_model(
    start_worker: StartWorker, connection: Redis
) -> None:
    shelf = AdaptedShelf(mixes="xy", hold=True)
    engine = shelf.engines["a"]
    jobs = jobs_for("a:x", "a", "a:y", "a:x", "a:bad", "b")
    worker = start_worker(switch=shelf.switch)
    engine.wait_for_tasks(4)
    worker.worker._leases.say()
    states = {model["id"]: model["state"] for model in described(connection)["models"]}
    assert [name for name in states if states[name] == "loaded"] == ["a", "a:x", "a:y"]
    for held in shelf.engines.values():
        held.release()
    answered = [job.result(PATIENCE)["model"] for job in (*jobs[:4], jobs[5])]
    assert answered == ["a:x", "a", "a:y", "a:x", "b"]
    with pytest.raises(JobFailed):
        jobs[4].result(PATIENCE)
    assert [one for one in engine.adapted if one is not None] == []
    assert sorted(shelf.loaded) == ["a", "b"]


def test_tasks_have_the_adapter_by_whose_name_they_are_asked_for(tmp_path: Path) -> None:
    """With an engine that computes: the answers of those that have it to themselves."""
    adapter = Adapter("tiny:x", write_adapter(tmp_path / "x"))
    options = EngineOptions(batch_size=4, mix_adapters=True)

    def load() -> MLXEngine:
        return MLXEngine(fresh_model(), options)

    body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    request = validate("completion", body)
    expected = []
    for on in (None, adapter):
        engine = load()
        engine.adapt(on)
        engine.add([Task("alone", request)])
        expected.append(finish(engine, 1)["alone"]["choices"])

    base = ServedModel(("tiny", "default"), load)
    adapted = ServedModel(("tiny:x", "default:x"), load, base.id, adapter)
    switch = EngineSwitch([base, adapted])
    switch.load("tiny:x")
    assert switch.present == [base, adapted]
    names = ["tiny", "tiny:x", "default", "default:x"]
    switch.add([Task(name, request, model=name) for name in names])
    answers: dict[str, Any] = {}
    while len(answers) < len(names):
        answers |= {outcome.id: outcome.result["choices"] for outcome in switch.step()}
    assert expected[0] != expected[1]
    assert [answers[name] for name in names] == 2 * expected
    assert switch.totals.decode_steps < 2 * 8  # all of them together
    switch.unload()


def test_each_claim_begins_with_the_jobs_of_another_adapter_that_is_mixed(
    start_worker: StartWorker,
) -> None:
    shelf = AdaptedShelf(mixes="xy", capacity=2)
    jobs = jobs_for(*["a"] * 20, "a:y", "a:y")
    start_worker(switch=shelf.switch, burst=True, window=2)
    assert answered_by(jobs) == [*["a"] * 20, "a:y", "a:y"]
    began = [task.model for task in shelf.engines["a"].added]
    assert began.index("a:y") <= 4
    assert began.count("a:y") == 2


def test_a_model_and_what_is_mixed_with_it_count_as_one() -> None:
    waiting = {"a": 3, "a:x": 9, "a:y": 0, "a:bad": 0, "b": 8}
    shelf = AdaptedShelf(mixes="xy")
    desk = ModelChanges(
        shelf.switch,
        lambda: {name: Backlog((jobs,)) for name, jobs in waiting.items()},
        max_wait=30.0,
        unload_after=None,
        beat=lambda: None,
    )

    def next_change(**now: int) -> Change | None:
        waiting.update(dict.fromkeys(waiting, 0), **now)
        desk.look([])
        return desk.next

    assert next_change(**waiting) == Change("a:x", "9 jobs wait for it, and nothing is loaded")
    desk.load_next()
    assert shelf.switch.loaded is shelf.switch.models["a"]
    later = "8 jobs wait for it: when the loaded one has no more work"
    assert next_change(**{"a:y": 1}, b=8) == Change("b", later, due=False)
    assert next_change(b=8) == Change("b", "8 jobs wait for it, and the loaded one has no work")
    desk.load_next()
    why = "4 jobs wait for it, and the loaded one has no work"
    assert next_change(**{"a:x": 1, "a:y": 3}) == Change("a", why)
    desk.load_next()
    assert shelf.engines["a"].adapted == []
    assert not desk.never


def test_where_all_adapters_are_mixed_nothing_ever_changes() -> None:
    shelf = AdaptedShelf(mixes="xy")
    models = shelf.switch.models
    switch = EngineSwitch([models["a"], models["a:x"], models["a:y"]])
    desk = ModelChanges(switch, dict, max_wait=30.0, unload_after=None, beat=lambda: None)
    assert not desk.never
    switch.load("a")
    assert desk.never


def test_an_adapter_that_does_not_fit_fails_its_own_jobs_and_no_others(
    start_worker: StartWorker, connection: Redis
) -> None:
    shelf = AdaptedShelf()
    bad, *good = jobs_for("a:bad", "a", "a:x")
    worker = start_worker(switch=shelf.switch)
    assert answered_by(good) == ["a", "a:x"]
    with pytest.raises(JobFailed) as failed:
        bad.result(PATIENCE)
    assert failed.value.error["message"] == f"The model could not be loaded: {IN_VAIN}"
    assert shelf.loaded == ["a"]
    worker.worker._leases.say()
    states = {model["id"]: model["state"] for model in described(connection)["models"]}
    assert states["a:bad"] == "failed"
    assert sorted(states.values()) == ["can_be_loaded"] * 3 + ["failed", "loaded"]


def test_a_model_that_cannot_be_loaded_has_no_adapters_either(start_worker: StartWorker) -> None:
    shelf = Shelf("bad")
    (base,) = shelf.switch.models.values()
    adapter = ServedModel(("bad:x",), base.load, "bad", Adapter("bad:x", Path("x")))
    shelf.switch = EngineSwitch([base, adapter])
    jobs = jobs_for("bad:x", "bad")
    start_worker(switch=shelf.switch)
    for job in jobs:
        with pytest.raises(JobFailed):
            job.result(PATIENCE)
    assert shelf.loaded == ["bad"]


class Awake(KeepAwake):
    """Notes that the machine may sleep, and says nothing of that by itself."""

    released = 0

    def turn(self, working: bool) -> None:
        pass

    def release(self) -> None:
        self.released += 1


def test_an_idle_model_is_unloaded_and_loaded_again_for_the_next_job(
    start_worker: StartWorker, connection: Redis
) -> None:
    shelf, awake = Shelf("a"), Awake()
    worker = start_worker(switch=shelf.switch, unload_after=0.05, awake=awake)
    assert shelf.loaded == []
    assert answered_by(jobs_for("a")) == ["a"]
    shelf.engines["a"].wait_until(lambda engine: engine.closed == 1)
    eventually(lambda: described(connection)["models"][0]["state"] == "can_be_loaded", "saying so")
    assert awake.released == 1
    until_idle(connection)
    assert answered_by(jobs_for("a")) == ["a"]
    assert shelf.loaded == ["a", "a"]
    assert worker.stop() == 2


def test_a_worker_that_is_stopped_does_not_wait_for_a_model() -> None:
    def load() -> FakeEngine:
        desk.interrupt()  # as the handler of a signal does
        raise AssertionError("it went on")

    switch = EngineSwitch([ServedModel(("a",), load)])
    desk = ModelChanges(
        switch,
        lambda: {"a": Backlog((1,))},
        max_wait=1.0,
        unload_after=None,
        beat=lambda: None,
    )
    desk.interrupt()  # nothing is loaded: nothing to break off
    desk.look([])
    with pytest.raises(Interrupted):
        desk.load_next()
    assert switch.loaded is None
    assert switch.loading is None


def test_loading_for_long_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "_BEAT_SECONDS", 0.001)
    beats: list[None] = []

    def load() -> FakeEngine:
        eventually(lambda: len(beats) >= 3, "beats")
        return FakeEngine()

    desk = ModelChanges(
        EngineSwitch([ServedModel(("a",), load)]),
        lambda: {"a": Backlog((1,))},
        max_wait=1.0,
        unload_after=None,
        beat=lambda: beats.append(None),
    )
    desk.look([])
    desk.load_next()
    assert desk.describe()["models"][0]["state"] == "loaded"


def test_jobs_are_left_to_a_worker_that_has_their_model_loaded(
    start_worker: StartWorker, connection: Redis
) -> None:
    first = Shelf("a", "b", hold=True)
    (of_a,) = jobs_for("a")
    there = start_worker(switch=first.switch)
    first.engines["a"].wait_for_tasks(1)
    there.worker._leases.say()
    second = Shelf("a", "b")
    helper = start_worker(switch=second.switch)
    until_idle(connection)
    models = second.switch.models.values()
    assert states_elsewhere(connection, models, "nobody") == {"a": "loaded", "b": "can_be_loaded"}
    assert states_elsewhere(connection, models, there.name) == dict.fromkeys("ab", "can_be_loaded")
    asked = helper.worker._changes  # who has a loaded is woken for its jobs
    eventually(lambda: list(asked.awaited) == ["b", "org/b"], "a look")
    more = jobs_for(*"aaab")
    assert answered_by(more[3:]) == ["b"]
    assert second.loaded == ["b"]  # of which only one waited
    first.engines["a"].release()
    assert answered_by([of_a, *more[:3]]) == ["a"] * 4
    assert first.loaded == ["a"]


def test_jobs_of_a_model_that_cannot_be_loaded_here_are_left_to_a_worker_that_may() -> None:
    def load() -> FakeEngine:
        raise RuntimeError(IN_VAIN)

    others: dict[str, ModelState] = {"bad": "can_be_loaded"}
    bad = ServedModel(("bad",), load)
    large = ServedModel(("large",), load, too_large="its weights take 40 GB, and 16 GB are there")
    desk = ModelChanges(
        EngineSwitch([bad, large, ServedModel(("good",), FakeEngine)]),
        lambda: {"bad": Backlog((1,)), "large": Backlog((99,)), "good": Backlog((0,))},
        max_wait=30.0,
        unload_after=None,
        beat=lambda: None,
        others=lambda: others,
    )
    desk.look([])
    assert desk.next is not None
    assert desk.next.model == "bad"
    desk.load_next()
    desk.look([])
    assert (desk.next, desk.unloadable, desk.more) == (None, (), False)
    assert list(desk.able) == ["good"]  # what others have too much of is not asked for
    others["bad"] = "failed"
    desk.look([])
    assert desk.unloadable == (bad,)  # and never the one that is too large
    assert desk.describe()["models"][1] == {
        "id": "large",
        "names": ["large"],
        "state": "failed",
        "why": "its weights take 40 GB, and 16 GB are there",
    }


def test_only_what_waits_after_a_claim_in_vain_is_left_to_other_workers() -> None:
    waiting = {"a": 9, "b": 0}
    desk = ModelChanges(
        EngineSwitch([ServedModel((name,), FakeEngine) for name in waiting]),
        lambda: {name: Backlog((jobs,)) for name, jobs in waiting.items()},
        max_wait=30.0,
        unload_after=None,
        beat=lambda: None,
    )

    def next_model(**now: int) -> str | None:
        waiting.update(now)
        desk.look([])
        return desk.next.model if desk.next is not None and desk.next.due else None

    assert next_model(a=9) == "a"
    desk.load_next()
    assert next_model() is None
    desk.claimed(9)
    desk.claimed(0)  # the queue is empty: all that waited is here
    assert next_model(a=0, b=1) == "b"
    desk.load_next()
    desk.claimed(1)
    assert next_model(a=9, b=0) == "a"  # given back for the sake of the other
    desk.load_next()
    assert next_model() is None
    desk.claimed(0)
    assert next_model() is None
    assert next_model(b=1) == "b"  # those of a are another worker's


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fakes import FakeEngine
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.worker.models.switch import EngineSwitch, ServedModel
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.worker import MLXWorker

switch = EngineSwitch([
    ServedModel(("a",), lambda: FakeEngine("a")),
    ServedModel(("b",), lambda: os.kill(os.getpid(), signal.SIGKILL)),
])
options = WorkerOptions(burst=True, loading=Path(sys.argv[2]))
MLXWorker(switch, new_connection(), new_connection(), options=options).run()
"""


def test_a_worker_that_is_killed_in_the_middle_of_a_change_loses_nothing(
    redis_url: str, start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next one lets the model rest which it died of, while the others go on."""
    jobs = jobs_for(*"aaabb")
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", KILLED, tests, str(tmp_path)]
    killed = subprocess.run(command, timeout=2 * PATIENCE)
    assert killed.returncode == -signal.SIGKILL
    assert [job.status() for job in jobs] == ["completed"] * 3 + ["queued"] * 2

    # The dead one has a loaded, as far as anybody knows: it is not waited for long.
    monkeypatch.setattr(choice, "FIRST_LOAD_SECONDS", 0.01)
    shelf = Shelf("a", "b")
    cautious = start_worker(switch=shelf.switch, loading=tmp_path)
    assert answered_by(jobs_for("a")) == ["a"]
    eventually(lambda: cautious.worker._changes.later, "a look")
    assert shelf.loaded == ["a"]
    assert cautious.stop() == 1

    monkeypatch.setattr(setbacks, "AGAIN_SECONDS", 0.0)
    start_worker(switch=shelf.switch, loading=tmp_path, burst=True)
    assert answered_by(jobs[3:]) == ["b", "b"]
    assert LoadingNotes(tmp_path).deaths() == {}


def test_jobs_of_another_model_wake_an_idle_worker(
    start_worker: StartWorker, connection: Redis
) -> None:
    shelf = Shelf("a", "b")
    worker: RunningWorker = start_worker(switch=shelf.switch)
    assert answered_by(jobs_for("a")) == ["a"]
    until_idle(connection)
    assert submit(**BODY, model="b").result(PATIENCE)["model"] == "b"
    assert worker.stop() == 2


def test_a_model_stays_where_mixing_adapters_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = AdaptedShelf("xy")
    with monkeypatch.context() as patches:
        patches.setattr(FakeEngine, "mix", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shelf.switch.load("a")

    shelf.switch.load("a")

    assert shelf.switch.loaded is shelf.switch.models["a"]
    assert shelf.loaded == ["a"]
