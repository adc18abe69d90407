"""The folder with the files and batches of a server: whose it is, and what is swept out of it."""

import io
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import StartServer

from mlx_rq.api_stub import file_store as storage
from mlx_rq.api_stub.batch_runner import BatchRunner
from mlx_rq.api_stub.file_store import LEFT_OVER_SECONDS, FileStore


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("there_before", [False, True])
def test_only_its_user_can_open_it(
    start_server: StartServer, tmp_path: Path, there_before: bool
) -> None:
    folder = tmp_path / "data" / "http"
    if there_before:
        folder.mkdir(parents=True, mode=0o755)
    start_server(data_dir=tmp_path / "data")
    assert {mode(path) for path in (folder, folder / "files", folder / "batches")} == {0o700}


@pytest.fixture
def files(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "files")


@pytest.fixture
def batches(tmp_path: Path, files: FileStore, nobody_listens: str) -> Iterator[BatchRunner]:
    runner = BatchRunner(tmp_path / "batches", files, nobody_listens, lambda model: True)
    yield runner
    runner.close()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets so much time pass that what lies about is left over."""

    def wait() -> None:
        now = time.time() + LEFT_OVER_SECONDS + 1
        monkeypatch.setattr(storage.time, "time", lambda: now)

    return wait


def test_content_without_a_record_goes_after_an_hour(
    files: FileStore, later: Callable[[], None]
) -> None:
    kept = files.create(io.BytesIO(b"{}"), "in.jsonl", "user_data", None)["id"]
    orphan = files.path("file-orphan")
    orphan.write_text("{}")
    files.sweep()
    assert orphan.exists()
    later()
    files.sweep()
    assert not orphan.exists()
    assert files.path(kept).exists()


def test_content_that_was_linked_a_moment_ago_stays(tmp_path: Path, files: FileStore) -> None:
    old = tmp_path / "output.jsonl"
    old.write_text("{}")
    os.utime(old, (1, 1))
    os.link(old, files.path("file-new"))
    files.sweep()
    assert files.path("file-new").exists()


def test_folders_of_batches_that_are_none_go_after_an_hour(
    batches: BatchRunner, tmp_path: Path, later: Callable[[], None]
) -> None:
    statuses = ("in_progress", "cancelling", "completed", "expired", "cancelled", "failed")
    for status in statuses:
        batches.records.add({"id": f"batch_{status}", "status": status}, None)
    batches.records.add({"id": "batch_unsaved", "status": "failed"}, None)
    root = tmp_path / "batches"
    for name in (*(f"batch_{status}" for status in statuses), "batch_unsaved", "batch_none"):
        (root / name).mkdir()
        (root / name / "input.jsonl").write_text("{}")
    (root / "batch_unsaved" / "output.jsonl").write_text("{}")

    def left() -> set[str]:
        return {path.name.removeprefix("batch_") for path in root.iterdir() if path.is_dir()}

    batches.sweep()
    assert left() == {*statuses, "unsaved", "none"}
    later()
    batches.sweep()
    assert left() == {"in_progress", "cancelling", "unsaved"}
    assert len(batches.records.all()) == len(statuses) + 1
