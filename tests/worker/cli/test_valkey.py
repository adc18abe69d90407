"""The embedded Valkey: loopback, a password that nobody sees, found by those on this machine."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fakes import eventually
from redis import Redis
from redis.exceptions import AuthenticationError

from mlx_rq import RedisUnavailable, fetch, submit
from mlx_rq.jobs.queue.connection import DEFAULT_URL, URL_VARIABLE, resolve_url
from mlx_rq.jobs.queue.discovery import FOLDER, LOCK_FILE, URL_FILE, embedded_url
from mlx_rq.worker.cli import valkey as valkey_module
from mlx_rq.worker.cli.valkey import LOG_FILE, PID_FILE, embedded_valkey

HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data folder with the signs that macOS and people put into paths; no URL is set."""
    folder = tmp_path / 'Application Support "ü"'
    monkeypatch.setenv("MLX_RQ_DATA_DIR", str(folder))
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    return folder


@pytest.fixture
def url(data_dir: Path) -> Iterator[str]:
    """The URL of an embedded server that runs."""
    with embedded_valkey(data_dir / FOLDER, port=None) as url:
        yield url


def password_of(url: str) -> str:
    password = urlsplit(url).password
    assert password is not None
    return password


class TestTheServer:
    def test_it_lets_nobody_in_without_the_password(self, url: str) -> None:
        port = urlsplit(url).port
        assert port is not None
        with Redis(port=port) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
        with Redis.from_url(url) as friend:
            assert friend.ping()
        assert len(password_of(url)) == 43  # 32 random bytes

    def test_it_listens_on_loopback_in_protected_mode_and_keeps_what_it_has(self, url: str) -> None:
        with Redis.from_url(url) as connection:
            settings = connection.config_get(
                "bind", "protected-mode", "appendonly", "appendfsync", "maxmemory-policy"
            )
        assert settings == {
            "bind": "127.0.0.1",
            "protected-mode": "yes",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "maxmemory-policy": "noeviction",
        }

    def test_only_its_user_can_read_the_password_and_the_jobs(
        self, data_dir: Path, url: str
    ) -> None:
        folder = data_dir / FOLDER
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / URL_FILE).stat().st_mode) == 0o600

    def test_the_password_is_in_no_other_file_and_no_process_title(
        self, data_dir: Path, url: str
    ) -> None:
        submit(messages=HI)
        password = password_of(url)
        holds_it = [
            path.name
            for path in (data_dir / FOLDER).rglob("*")
            if path.is_file() and password.encode() in path.read_bytes()
        ]
        assert holds_it == [URL_FILE]
        titles = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True)
        assert "valkey-server 127.0.0.1:" in titles.stdout
        assert password not in titles.stdout

    def test_password_and_jobs_last_over_a_restart(self, data_dir: Path) -> None:
        with embedded_valkey(data_dir / FOLDER, port=None) as first:
            job = submit(messages=HI)
        with embedded_valkey(data_dir / FOLDER, port=None) as second:
            assert password_of(second) == password_of(first)
            assert fetch(job.id).status() == "queued"

    def test_what_is_said_to_our_whole_group_does_not_reach_it(
        self, data_dir: Path, url: str
    ) -> None:
        pid = int((data_dir / FOLDER / PID_FILE).read_text())
        assert os.getsid(pid) == pid
        (keeper,) = keepers(os.getpid())
        assert os.getsid(keeper) == keeper

    def test_another_server_on_the_same_folder_is_refused(self, data_dir: Path, url: str) -> None:
        again = embedded_valkey(data_dir / FOLDER, port=None)
        who = rf"An embedded Valkey runs on .* already, started by process {os.getpid()}\."
        with pytest.raises(RedisUnavailable, match=who), again:
            pass
        assert embedded_url() == url

    def test_a_port_that_is_taken_is_said(self, data_dir: Path, url: str) -> None:
        port = urlsplit(url).port
        other = embedded_valkey(data_dir / "another", port=port)
        with pytest.raises(RedisUnavailable, match=f"Port {port} is taken"), other:
            pass

    def test_a_full_disk_is_named(self, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(descriptor: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(valkey_module.os, "write", full)
        with pytest.raises(OSError, match="No space left") as refused, embedded_valkey(data_dir):
            pass
        assert refused.value.filename == str(data_dir)

    def test_one_that_cannot_start_says_why(self, data_dir: Path) -> None:
        folder = data_dir / FOLDER
        (folder / "appendonlydir").mkdir(parents=True)
        (folder / "appendonlydir" / "appendonly.aof.manifest").write_text("nonsense\n")
        with (
            pytest.raises(
                RedisUnavailable, match=r"did not start: .* says why. Its last line: '.+'"
            ),
            embedded_valkey(folder, port=None),
        ):
            pass
        assert (folder / LOG_FILE).stat().st_size > 0
        assert embedded_url() is None


def keepers(owner: int) -> list[int]:
    """Finds what a process started to end its servers when it is gone."""
    listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True)
    lines = [line.split(None, 2) for line in listed.stdout.decode().splitlines()]
    return [int(pid) for pid, parent, name in lines if (int(parent), name) == (owner, "sh")]


@pytest.fixture
def killed(data_dir: Path) -> Iterator[Callable[[bool], int]]:
    """Starts a server in a process that is killed, with its keeper or without; gives its pid."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from mlx_rq.worker.cli.valkey import embedded_valkey\n"
        "with embedded_valkey(Path(sys.argv[1]), port=None): print(flush=True); time.sleep(99)"
    )
    servers: list[int] = []

    def kill(with_keeper: bool) -> int:
        command = [sys.executable, "-c", code, str(data_dir / FOLDER)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
            assert owner.stdout is not None
            owner.stdout.readline()
            servers.append(int((data_dir / FOLDER / PID_FILE).read_text()))
            if with_keeper:
                (keeper,) = keepers(owner.pid)
                os.kill(keeper, signal.SIGKILL)
            owner.kill()
        return servers[0]

    yield kill
    for pid in servers:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


class TestWhereWhoStartedItIsKilled:
    def test_it_ends(self, data_dir: Path, killed: Callable[[bool], int]) -> None:
        killed(False)
        eventually(lambda: embedded_url() is None, "the end of the server")
        assert not (data_dir / FOLDER / PID_FILE).exists()  # in good order

    def test_one_that_was_left_is_taken_over_with_what_it_holds(
        self, data_dir: Path, killed: Callable[[bool], int]
    ) -> None:
        left = killed(True)
        left_url = embedded_url()
        job = submit(messages=HI)
        with embedded_valkey(data_dir / FOLDER, port=None) as url:
            assert fetch(job.id).status() == "queued"
            assert left_url is not None
            assert password_of(url) == password_of(left_url)
            assert int((data_dir / FOLDER / PID_FILE).read_text()) != left

    def test_one_that_does_not_answer_is_named_by_its_process(
        self,
        data_dir: Path,
        killed: Callable[[bool], int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(valkey_module, "_LOOK_SECONDS", 0.2)
        monkeypatch.setattr(valkey_module, "_STOP_SECONDS", 0.2)
        left = killed(True)
        os.kill(left, signal.SIGSTOP)
        with (
            pytest.raises(RedisUnavailable, match=f"end its process with `kill {left}`"),
            embedded_valkey(data_dir / FOLDER, port=None),
        ):
            pass


class TestThoseOnTheSameMachine:
    def test_find_it_where_they_got_no_url(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        assert resolve_url() == url
        assert submit(messages=HI).status() == "queued"
        assert resolve_url("redis://here:3/4") == "redis://here:3/4"
        monkeypatch.setenv(URL_VARIABLE, "redis://elsewhere:1/2")
        assert resolve_url() == "redis://elsewhere:1/2"

    def test_do_not_go_by_the_file_of_one_that_is_gone(self, data_dir: Path, url: str) -> None:
        with Redis.from_url(url) as connection:
            process = connection.info("server")["process_id"]
            os.kill(process, 9)
        eventually(lambda: embedded_url() is None, "the end of the server")
        assert (data_dir / FOLDER / URL_FILE).exists()
        assert resolve_url() == DEFAULT_URL

    def test_without_any_it_is_localhost(self, data_dir: Path) -> None:
        assert resolve_url() == DEFAULT_URL

    def test_that_may_not_read_the_file_it_is_localhost(self, data_dir: Path) -> None:
        folder = data_dir / FOLDER
        folder.mkdir(parents=True)
        (folder / LOCK_FILE).touch()
        (folder / URL_FILE).mkdir()  # as unreadable as can be, also for root
        assert resolve_url() == DEFAULT_URL
