"""What the tests of the engine share."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache directory for pulled models; $MLX_RQ_TEST_CACHE keeps it from run to run."""
    if kept := os.environ.get("MLX_RQ_TEST_CACHE"):
        yield Path(kept)
        return
    made = tmp_path_factory.mktemp("cache")
    yield made
    shutil.rmtree(made)  # pytest would keep a gigabyte per run
