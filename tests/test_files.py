"""Files: whole or not there, on the disk when it is said so, and locked."""

import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_rq import files
from mlx_rq.files import lock, put_in_place, replacing, sync, sync_path, temporary


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Notes what is synced and renamed, by the name that it has then, in this order."""
    noted: list[tuple[str, str]] = []
    rename = Path.replace

    def note_sync(descriptor: int) -> None:
        noted.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    def note_rename(self: Path, target: Path) -> Path:
        noted.append(("rename", target.name))
        return rename(self, target)

    monkeypatch.setattr(files, "_sync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    return noted


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the names in /proc")


@on_linux
def test_a_file_is_on_the_disk_before_it_is_renamed_and_its_name_after(
    tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    with replacing(tmp_path / "a.json") as file:
        fresh = Path(os.readlink(f"/proc/self/fd/{file.fileno()}")).name
        file.write(b"new")
    assert steps == [("sync", fresh), ("rename", "a.json"), ("sync", tmp_path.name)]
    assert fresh != "a.json"
    assert (tmp_path / "a.json").read_bytes() == b"new"


@on_linux
def test_a_folder_is_put_in_place_with_the_names_in_it(
    tmp_path: Path, steps: list[tuple[str, str]]
) -> None:
    made = tmp_path / "made"
    made.mkdir()
    put_in_place(made, tmp_path / "model")
    assert steps == [("sync", "made"), ("rename", "model"), ("sync", tmp_path.name)]


def test_who_reads_meanwhile_finds_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with replacing(path) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        file.write(b"w")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_synced_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_sync", is_full)
    path = tmp_path / "a.json"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match="No space left") as refused, replacing(path):
        pass
    assert refused.value.filename == str(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_half()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_who_write_the_same_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with replacing(path) as one, replacing(path) as other:
        one.write(b"one")
        other.write(b"other")
    assert path.read_bytes() == b"one"


def test_a_private_file_can_be_read_by_its_user_only(tmp_path: Path) -> None:
    with replacing(tmp_path / "secret", mode=0o600) as file:
        file.write(b"secret")
        assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_a_temporary_file_lies_beside_its_target(tmp_path: Path) -> None:
    assert temporary(tmp_path / "a.csv") == tmp_path / "a.csv.tmp"


def asked_of_the_system(monkeypatch: pytest.MonkeyPatch, *, can_full_sync: bool) -> list[str]:
    """Has a system with F_FULLFSYNC, as macOS is one; notes which of both is called."""
    asked: list[str] = []

    def full_sync(descriptor: int, command: int) -> None:
        assert command == 51
        asked.append("full")
        if not can_full_sync:
            raise OSError(45, "Operation not supported")

    monkeypatch.setattr(files, "_FULL_SYNC", 51)
    monkeypatch.setattr(fcntl, "fcntl", full_sync)
    monkeypatch.setattr(os, "fsync", lambda descriptor: asked.append("fsync"))
    return asked


def test_the_disk_itself_is_told_to_write_where_the_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_of_the_system(monkeypatch, can_full_sync=True)
    with (tmp_path / "a").open("wb") as file:
        file.write(b"a")
        sync(file)
        assert (tmp_path / "a").read_bytes() == b"a", "flushed first"
    sync_path(tmp_path)
    assert asked == ["full", "full"]


def test_a_file_system_that_cannot_is_asked_for_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asked_of_the_system(monkeypatch, can_full_sync=False)
    sync_path(tmp_path)
    assert asked == ["full", "fsync"]


def test_one_has_a_lock_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as one, path.open("ab") as other:
        assert lock(one)
        assert not lock(other)
        assert not lock(other, shared=True)
        one.close()
        assert lock(other, wait=True)


def test_many_have_a_shared_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch()
    with path.open("rb") as one, path.open("rb") as other, path.open("rb") as third:
        assert lock(one, shared=True)
        assert lock(other, shared=True)
        assert not lock(third)


def test_a_child_that_got_the_file_keeps_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("ab") as file:
        assert lock(file)
        child = subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[file.fileno()]
        )
    with path.open("ab") as other:
        assert not lock(other)
        child.communicate(b"\n")
        assert lock(other)


def test_an_error_names_the_file_that_was_meant(tmp_path: Path) -> None:
    wanted = tmp_path / "nowhere" / "a.json"
    with pytest.raises(FileNotFoundError) as caught, replacing(wanted):
        pass
    assert caught.value.filename == str(wanted)


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """As root, `/dev/null` would be a file from then on."""
    os.mkfifo(pipe := tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"), replacing(pipe):
        pass
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]
