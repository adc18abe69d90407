"""Errors of the device before there is a job: while models are loaded, tried and measured."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from adapting import fresh_model, write_adapter
from driving import finish, task
from scripted_device import OUT_OF_MEMORY, FailingMLX, ScriptedDevice
from tiny import model_folder, tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Adapter
from mlx_rq.engine.models.decode_speed import DecodeTrial, fewest, measured
from mlx_rq.engine.models.draft import check_draft
from mlx_rq.engine.models.load import ModelError, load

MODEL = tiny_model("llama")


class Small:
    """A network that has memory for so many rows."""

    def __init__(self, rows: int) -> None:
        self._network, self._rows, self.refused = MODEL.model, rows, 0

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        if len(tokens) > self._rows:
            self.refused += 1
            raise RuntimeError(OUT_OF_MEMORY)
        return self._network(tokens, cache=cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)


def test_no_more_sequences_are_measured_than_the_device_has_memory_for() -> None:
    network: Any = Small(rows=12)

    speeds = measured(DecodeTrial(network, context=20, device=ScriptedDevice()).seconds)

    assert list(speeds) == [1, 2, 4, 6, 8, 12]
    assert fewest(speeds) <= 12
    assert network.refused == 2  # an error may pass


def test_a_model_is_loaded_though_the_device_fails_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, mlx = model_folder(tmp_path / "tiny"), FailingMLX(monkeypatch)
    load(str(folder))
    times = mlx.times
    assert times > 0
    for place in range(times):
        mlx.fail_at(place)
        assert load(str(folder)).vocab_size == MODEL.vocab_size
        assert mlx.times > times
    mlx.fail_at(*range(times + 1))
    with pytest.raises(ModelError, match="Insufficient Memory"):
        load(str(folder))


def test_an_adapter_is_put_on_though_the_device_fails_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    adapter = Adapter("tiny:a", write_adapter(tmp_path / "a"))
    mlx = FailingMLX(monkeypatch)

    def said(failing: int) -> tuple[Any, int]:
        engine = MLXEngine(fresh_model(), device=ScriptedDevice())
        mlx.fail_at(failing)
        engine.adapt(adapter)
        times = mlx.times
        assert not engine.add([task("one", {"prompt": "Who?", "temperature": 0, "max_tokens": 8})])
        return finish(engine, 1)["one"]["choices"], times

    undisturbed, times = said(-1)
    assert times > 0
    assert all(said(place)[0] == undisturbed for place in range(times))


def test_a_draft_is_checked_though_the_device_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mlx = FailingMLX(monkeypatch)
    check_draft(MODEL, MODEL)
    times = mlx.times
    assert times > 0
    mlx.fail_at(times - 1)
    check_draft(MODEL, MODEL)
    mlx.fail_at(times - 1, 2 * times - 1)
    with pytest.raises(ModelError, match="the device failed when it was tried"):
        check_draft(MODEL, MODEL)
