"""Doors for the tests of this folder."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from doors import OpenDoor, StartDoor, open_door
from mlx_rq.api_stub.settings import Settings


@pytest.fixture
def start_door(redis_url: str, tmp_path: Path) -> Iterator[StartDoor]:
    """Opens doors that stay open until the end of the test; takes the fields of Settings."""
    with ExitStack() as stack:

        def start(**fields: Any) -> OpenDoor:
            fields = {"data_dir": tmp_path / "data", "redis_url": redis_url, **fields}
            return stack.enter_context(open_door(Settings(**fields)))

        yield start


@pytest.fixture
def door(start_door: StartDoor) -> OpenDoor:
    """A door as it is without any options."""
    return start_door()
