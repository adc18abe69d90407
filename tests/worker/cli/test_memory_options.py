"""`--memory` and its kin: what cannot be meant, or cannot be, is said at once."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fakes import FakeEngine
from tiny import tiny_model

from mlx_rq.engine.interface import DeviceExhausted
from mlx_rq.engine.models.device import weight_bytes
from mlx_rq.worker.cli.main import main


@pytest.fixture
def worker(redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Starts a worker with options, which loads a tiny model and does nothing."""

    class Engine(FakeEngine):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

    class Worker:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def run(self) -> None:
            if raised:
                raise raised.pop()

    raised: list[Exception] = []

    def started(*options: str) -> Result:
        command = ["worker", "--unsupervised", "--model", "org/a", "--data-dir", str(tmp_path)]
        return CliRunner().invoke(main, [*command, "--batch", "4", *options])

    monkeypatch.setattr("mlx_rq.engine.models.load.load", lambda *_, **__: tiny_model("llama"))
    monkeypatch.setattr("mlx_rq.engine.engine.MLXEngine", Engine)
    monkeypatch.setattr("mlx_rq.worker.worker.MLXWorker", Worker)
    monkeypatch.setattr("mlx_rq.engine.models.device.MLXDevice.limit", lambda self: None)
    started.raised = raised  # type: ignore[attr-defined]
    return started


@pytest.mark.parametrize("option", ["--memory", "--kv-budget"])
def test_a_unit_that_was_forgotten_is_asked_for(worker: Any, option: str) -> None:
    result = worker(option, "12")

    assert result.exit_code == 2
    assert (
        f"Invalid value for '{option}': '12' is 12 bytes: say a unit, as in 12GB" in result.output
    )


def test_less_memory_than_the_weights_take_is_refused(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worker("--memory", "2MB").exit_code == 0  # the tiny one's are a quarter of that
    monkeypatch.setattr("mlx_rq.engine.models.device.weight_bytes", lambda model: 4_000_000_000)
    assert weight_bytes(tiny_model("llama").model) < 2_000_000

    result = worker("--memory", "2GB")

    assert result.exit_code == 1
    assert "model org/a: its weights take 4.00 GB, and --memory is 2.00 GB." in result.output


def test_a_device_that_is_exhausted_is_told_in_a_sentence(worker: Any) -> None:
    worker.raised.append(DeviceExhausted("[METAL] Insufficient Memory"))

    result = worker()

    assert result.exit_code == 1  # the supervisor starts it again
    assert result.output == "Error: nothing can be computed now: [METAL] Insufficient Memory\n"
