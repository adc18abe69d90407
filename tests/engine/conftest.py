"""What the tests of the engine share."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_rq.engine import engine
from mlx_rq.engine.kv import sharing


@pytest.fixture(scope="session", autouse=True)
def tried_once() -> Iterator[None]:
    """Tries each model when its first engine is made; the other engines know the outcome."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((engine, "verdict_on"), (sharing, "_disagreement")):
            patch.setattr(module, name, _once(getattr(module, name)))
        yield


def _once(trial: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def remembered(model: Any, *verdict: Any) -> Any:
        if id(model) not in known:
            known[id(model)] = model, trial(model, *verdict)  # the model keeps its id its own
        return known[id(model)][1]

    return remembered


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory for pulled models; $MLX_RQ_TEST_CACHE keeps it from run to run."""
    if kept := os.environ.get("MLX_RQ_TEST_CACHE"):
        yield Path(kept)
        return
    made = tmp_path_factory.mktemp("cache")
    yield made
    shutil.rmtree(made)  # pytest would keep a gigabyte per run
