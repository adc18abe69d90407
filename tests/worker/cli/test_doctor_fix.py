"""`mlx-rq doctor --fix`: what it mends, what it says of that, and what it leaves alone."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from mlx_rq.files import lock
from mlx_rq.jobs.queue.discovery import FOLDER, LOCK_FILE, URL_FILE
from mlx_rq.worker.cli.doctor import command
from mlx_rq.worker.cli.doctor.finding import Finding, Fix
from mlx_rq.worker.cli.doctor.machine import Mlx
from mlx_rq.worker.cli.doctor.places import data_findings
from mlx_rq.worker.cli.doctor.private import private_findings
from mlx_rq.worker.cli.doctor.queue import queue_findings
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.valkey import PID_FILE


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home in which nothing is, with the data folder in it that the command takes."""
    for name in [name for name in os.environ if name.startswith(("MLX_RQ_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MLX_RQ_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "try_mlx", lambda: Mlx(metal=True))
    return tmp_path


def doctor(*options: str, url: str) -> Result:
    return CliRunner().invoke(main, ["doctor", "--no-job", "--redis-url", url, *options])


def put(path: Path, mode: int, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def a_queue_that_was_killed(data: Path) -> Path:
    put(data / FOLDER / LOCK_FILE, 0o600)
    data.joinpath(FOLDER).chmod(0o700)
    return put(data / FOLDER / PID_FILE, 0o600, "4711\n")


class TestTheCommand:
    def test_says_what_it_does_and_what_it_did(self, home: Path, redis_url: str) -> None:
        url = put(home / "data" / FOLDER / URL_FILE, 0o644, "redis://:x@127.0.0.1:1/0")
        url.parent.chmod(0o700)
        look = doctor(url=redis_url)
        assert look.exit_code == 1
        said = " ".join(look.stdout.split())
        assert "holds a password → chmod go-rwx" in said
        assert "→ `mlx-rq doctor --fix` does it" in said
        assert mode(url) == 0o644
        mended = doctor("--fix", url=redis_url)
        assert (mended.exit_code, mode(url)) == (0, 0o600)
        lines = [line.split() for line in mended.stdout.splitlines()]
        assert ["fix", "secrets", "chmod", "go-rwx"] in [line[:4] for line in lines]
        assert ["fixed", "secrets", "it", "is", "done"] in lines
        assert max(map(len, mended.stdout.splitlines())) <= 80

    def test_says_it_to_machines(
        self, home: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused() -> None:
            raise PermissionError(1, "Operation not permitted")

        wrong = Finding("secrets", "error", "open", "close", Fix("chmod x", refused))
        monkeypatch.setattr(command, "private_findings", lambda *_: iter([wrong]))
        told = doctor("--fix", "--json", url=redis_url)
        findings = json.loads(told.stdout)["findings"]
        (secret,) = (one for one in findings if one["area"] == "secrets")
        assert secret == {**wrong._asdict(), "fix": "chmod x", "fixed": False}
        (data,) = (one for one in findings if one["area"] == "data")
        assert (data["fix"], data["fixed"]) == (f"mkdir -p -m 700 {home / 'data'}", True)
        assert mode(home / "data") == 0o700
        assert told.exit_code == 1
        assert "could not be done: [Errno 1] Operation" in doctor("--fix", url=redis_url).stdout

    def test_looks_at_the_files_with_keys_that_options_name(
        self, home: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys, hooks = put(home / "keys", 0o644, "k"), put(home / "hooks", 0o640, "s")
        config = put(home / "mlx-rq.toml", 0o644, f'[serve]\napi-key-file = "{keys}"\n')
        monkeypatch.setenv("MLX_RQ_WEBHOOK_SECRET_FILE", str(hooks))
        assert doctor("--fix", url=redis_url).exit_code == 0
        assert (mode(keys), mode(hooks), mode(config)) == (0o640, 0o640, 0o644)


class TestRights:
    def test_of_a_configuration_with_a_password(self, home: Path) -> None:
        config = home / ".config" / "mlx-rq" / "config.toml"
        put(config, 0o644, 'redis-url = "redis://queue:6379/0"')
        assert list(private_findings(home / "data", [])) == []
        put(config, 0o664, 'redis-url = "redis://worker:s3cret@queue:6379/0"')
        (found,) = private_findings(home / "data", [])
        assert (found.level, "s3cret" in found.text) == ("error", False)
        assert found.fix is not None
        found.fix.do()
        assert mode(config) == 0o600
        (found,) = private_findings(home / "data", [])
        assert found.level == "ok"

    def test_of_a_service_and_of_the_folders_of_jobs(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sys.platform", "linux")
        unit = put(home / ".config" / "systemd" / "user" / "mlx-rq-up.service", 0o640)
        for name in (FOLDER, "http"):
            (home / "data" / name).mkdir(mode=0o755, parents=True)
        found = list(private_findings(home / "data", []))
        for one in found:
            assert one.fix is not None
            one.fix.do()
        places = (unit, home / "data" / FOLDER, home / "data" / "http")
        assert [mode(place) for place in places] == [0o600, 0o700, 0o700]
        assert len(found) == 3

    def test_of_somebody_elses_file_are_his_to_mend(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        keys = put(home / "keys", 0o644)
        monkeypatch.setattr("os.getuid", lambda: keys.stat().st_uid + 1)
        (found,) = private_findings(home / "data", [keys])
        assert (found.advice, found.fix) == (f"Have its owner say: chmod o-rwx {keys}", None)


class TestTheDataFolder:
    def test_that_its_owner_cannot_use(self, home: Path) -> None:
        data = home / "data"
        data.mkdir(mode=0o500)
        (found,) = data_findings(data)
        assert (found.level, found.advice) == ("error", f"chmod u+rwx {data}")
        assert found.fix is not None
        found.fix.do()
        assert mode(data) == 0o700

    def test_that_is_none(self, home: Path) -> None:
        (found,) = data_findings(put(home / "data", 0o600))
        assert (found.level, found.fix) == ("error", None)

    def test_with_the_pid_of_a_queue_that_was_killed(self, home: Path) -> None:
        pid = a_queue_that_was_killed(home / "data")
        _, found = data_findings(home / "data")
        assert "names its process, 4711, which has ended" in found.text
        assert found.fix is not None
        found.fix.do()
        assert not pid.exists()
        assert sorted(path.name for path in pid.parent.iterdir()) == [LOCK_FILE]

    def test_of_a_queue_that_was_started_meanwhile_is_left_alone(self, home: Path) -> None:
        pid = a_queue_that_was_killed(home / "data")
        _, found = data_findings(home / "data")
        assert found.fix is not None
        with (pid.parent / LOCK_FILE).open("ab") as server:
            assert lock(server)
            found.fix.do()
            assert pid.exists()
            assert len(list(data_findings(home / "data"))) == 1


def test_settings_of_the_embedded_queue_are_mended_and_others_are_not(
    connection: Redis, redis_url: str
) -> None:
    def wrong(**options: Any) -> dict[str, Fix | None]:
        found = queue_findings(connection, **options)
        return {one.area: one.fix for one in found if one.level != "ok"}

    before = connection.config_get("appendonly")["appendonly"]
    connection.config_set("appendonly", "no")
    connection.config_set("maxmemory", 10**9)
    connection.config_set("maxmemory-policy", "allkeys-lru")
    try:
        assert wrong() == {"persistence": None, "eviction": None}
        fixes = wrong(ours=True)
        does = [fix.does for fix in fixes.values() if fix is not None]
        assert does == ["CONFIG SET appendonly yes", "CONFIG SET maxmemory-policy noeviction"]
        for fix in fixes.values():
            assert fix is not None
            fix.do()
        assert wrong(ours=True) == {}
    finally:
        connection.config_set("appendonly", before)
        connection.config_set("maxmemory", 0)
        connection.config_set("maxmemory-policy", "noeviction")
