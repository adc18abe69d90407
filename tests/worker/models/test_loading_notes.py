"""What a worker knows of those before it that died while they loaded a model."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fakes import FakeEngine

from mlx_rq.engine.interface import Adapter
from mlx_rq.files import lock
from mlx_rq.worker.models import loading_notes, setbacks
from mlx_rq.worker.models.changes import Interrupted, ModelChanges
from mlx_rq.worker.models.choice import Backlog, Change
from mlx_rq.worker.models.loading_notes import LoadingNotes
from mlx_rq.worker.models.switch import EngineSwitch, ServedModel

A = ServedModel(("a",), FakeEngine)
A_X = ServedModel(("a:x",), FakeEngine, "a", Adapter("a:x", Path("x")))
B = ServedModel(("b",), FakeEngine)


def die_while_loading(model: str, folder: Path) -> None:
    child = os.fork()
    if not child:
        with LoadingNotes(folder).noted(model):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def desk(*models: ServedModel, notes: LoadingNotes, clock: Callable[[], float]) -> ModelChanges:
    """What decides for a new worker, with a job for each model, once it has looked."""
    made = ModelChanges(
        EngineSwitch(models),
        lambda: {model.id: Backlog((1,)) for model in models},
        max_wait=1.0,
        unload_after=None,
        beat=lambda: None,
        notes=notes,
        clock=clock,
    )
    made.look([])
    return made


def said(desk: ModelChanges) -> tuple[str, bool, tuple[ServedModel, ...]]:
    return "" if desk.next is None else desk.next.model, desk.later, desk.unloadable


def test_a_model_rests_then_fails_its_jobs_and_is_tried_again_much_later(tmp_path: Path) -> None:
    notes, now = LoadingNotes(tmp_path), 1000.0

    def clock() -> float:
        return now

    for deaths, rest in ((1, setbacks.AGAIN_SECONDS), (2, 2 * setbacks.AGAIN_SECONDS)):
        die_while_loading("a", tmp_path)
        assert notes.deaths()["a"].count == deaths
        resting = desk(A, A_X, notes=notes, clock=clock)
        assert said(resting) == ("", True, ())
        now += rest - 30  # some time has passed since the death
        resting.look([])
        assert said(resting) == ("", True, ())
        now += 31
        resting.look([])
        assert said(resting) == ("a", False, ())
    die_while_loading("a", tmp_path)
    given_up = desk(A, A_X, B, notes=notes, clock=clock)
    assert said(given_up) == ("b", False, (A, A_X))
    assert given_up.error(A_X)["message"] == (
        "The model could not be loaded: 3 workers died while they loaded it, most likely for want "
        "of memory; choose a smaller one, or one of fewer bits"
    )
    now += setbacks.GIVEN_UP_SECONDS + 1
    given_up.look([])
    assert given_up.unloadable == ()


def test_others_go_on_and_an_adapter_rests_alone(tmp_path: Path) -> None:
    die_while_loading("a:x", tmp_path)
    notes = LoadingNotes(tmp_path)
    assert said(desk(A, A_X, notes=notes, clock=lambda: 0.0)) == ("a", True, ())
    die_while_loading("b", tmp_path)
    assert said(desk(B, A, notes=notes, clock=lambda: 0.0)) == ("a", True, ())


def test_what_is_loaded_in_the_end_is_forgiven(tmp_path: Path) -> None:
    die_while_loading("a", tmp_path)
    notes, now = LoadingNotes(tmp_path), 0.0
    made = desk(A, notes=notes, clock=lambda: now)
    now += setbacks.AGAIN_SECONDS
    made.look([])
    made.load_next()
    assert notes.deaths() == {}
    made.look([])
    assert said(made) == ("", False, ())


def test_a_model_that_is_loaded_is_forgiven_though_its_adapter_does_not_fit() -> None:
    reasons, now = ["no disk", ""], 0.0

    class Unfit(FakeEngine):
        def adapt(self, adapter: Adapter | None) -> None:
            raise ValueError("it does not fit")

    def load() -> FakeEngine:
        if reason := reasons.pop(0):
            raise OSError(reason)
        return Unfit()

    x = ServedModel(A_X.names, load, "a", A_X.adapter)
    made = desk(ServedModel(("a",), load), x, notes=LoadingNotes(None), clock=lambda: now)
    for _ in range(2):
        made.next = Change("a:x", "a job waits for it")
        made.load_next()
        now += setbacks.AGAIN_SECONDS + 1
    now -= 2
    made.look([])
    assert said(made) == ("", False, (x,))
    assert made.error(x)["message"] == "The model could not be loaded: it does not fit"


def test_what_another_process_loads_now_is_no_death(tmp_path: Path) -> None:
    notes = LoadingNotes(tmp_path)
    with notes.noted("a"):
        assert notes.deaths() == {}
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RuntimeError), notes.noted("a"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_death_of_the_day_before_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text('{"model": "a", "at": 1.0}')
    assert LoadingNotes(tmp_path).deaths() == {}
    assert list(tmp_path.iterdir()) == []


def test_a_note_that_cannot_be_written_or_read_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with LoadingNotes(tmp_path / "file" / "x").noted("a"):
        pass
    (tmp_path / "b.json").write_text("[]")
    assert LoadingNotes(tmp_path).deaths() == {}


def test_a_model_that_rests_is_not_one_that_could_be_loaded(tmp_path: Path) -> None:
    """Others would give its jobs back for this worker, and leave it the wake-ups."""
    die_while_loading("a", tmp_path)
    made = desk(A, B, notes=LoadingNotes(tmp_path), clock=lambda: 0.0)
    assert list(made.able) == ["b"]
    assert list(made.awaited) == ["b"]


def test_a_death_that_is_to_come_counts_from_now(tmp_path: Path) -> None:
    (tmp_path / "ahead.json").write_text(f'{{"model": "a", "at": {time.time() + 1e9}}}')
    now = 0.0
    made = desk(A, notes=LoadingNotes(tmp_path), clock=lambda: now)
    assert said(made) == ("", True, ())
    now += setbacks.AGAIN_SECONDS
    made.look([])
    assert said(made) == ("a", False, ())


@pytest.mark.parametrize("fault", [OSError("no room"), Interrupted()])
def test_a_note_that_could_not_be_finished_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def sync(file: object) -> None:
        raise fault

    monkeypatch.setattr(loading_notes, "sync", sync)
    with suppress(Interrupted, RuntimeError), LoadingNotes(tmp_path).noted("a"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_those_who_read_at_once_miss_no_death(tmp_path: Path) -> None:
    die_while_loading("a", tmp_path)
    notes = LoadingNotes(tmp_path)
    (path,) = tmp_path.iterdir()
    with path.open() as file:
        lock(file, shared=True)
        assert notes.deaths()["a"].count == 1
