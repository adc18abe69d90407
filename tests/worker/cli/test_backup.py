"""`mlx-rq backup` and `restore`: the embedded queue, whole, in one file and back."""

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from mlx_rq import fetch, submit
from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.jobs.queue.discovery import FOLDER
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.valkey import embedded_valkey


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("MLX_RQ_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv(URL_VARIABLE, raising=False)

    def run(*arguments: str, input: str | None = None) -> Result:
        result = CliRunner().invoke(main, arguments, input=input)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    return run


def test_a_queue_is_saved_while_it_runs_and_brought_back(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    folder, file = tmp_path / "data" / FOLDER, tmp_path / "queue.rdb"
    assert "There is no embedded queue in" in run("backup", str(file)).stderr
    with embedded_valkey(folder, port=None) as url:
        jobs = [submit(prompt=f"number {number}", redis_url=url) for number in range(3)]
        with Redis.from_url(url) as connection:
            connection.set("fades", "soon", ex=1000)
        saved = run("backup", str(file))
        assert saved.stdout.endswith(" bytes; 3 jobs wait\n")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        later = submit(prompt="later", redis_url=url)
        refused = run("restore", str(file), "--yes")
        assert (refused.exit_code, "runs on" in refused.stderr) == (1, True)
    assert run("restore", str(file), input="n\n").exit_code == 1
    assert run("backup", str(tmp_path / "later.rdb")).stdout.endswith("4 jobs wait\n")

    restored = run("restore", str(file), "--yes")
    assert "is restored: 3 jobs wait." in restored.stdout
    with embedded_valkey(folder, port=None) as url, Redis.from_url(url) as connection:
        assert [fetch(job.id, redis_url=url).status() for job in jobs] == ["queued"] * 3
        assert not connection.exists(f"rq:job:{later.id}")
        assert 0 < connection.ttl("fades") <= 1000
        submit(prompt="goes on", redis_url=url)
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    assert [name[:14] for name in names] == ["appendonlydir", "appendonlydir."]
    assert run("backup", str(file)).stdout.endswith("4 jobs wait\n")  # the new one lasted


def test_what_is_no_backup_changes_nothing(run: Callable[..., Result], tmp_path: Path) -> None:
    folder, file = tmp_path / "data" / FOLDER, tmp_path / "queue.rdb"
    with embedded_valkey(folder, port=None) as url:
        submit(prompt="kept", redis_url=url)
    file.write_bytes(b"REDIS0011 and then nonsense")
    refused = run("restore", str(file), "--yes")
    assert (refused.exit_code, "is no backup that Valkey can read" in refused.stderr) == (1, True)
    for nothing in (b"", b"a,b\n1,2\n"):
        other = tmp_path / "other.csv"
        other.write_bytes(nothing)
        refused = run("restore", str(other), "--yes")
        assert refused.stderr == f"Error: {other} is no backup that Valkey can read.\n"
    refused = run("backup", str(other))
    assert (refused.exit_code, "is there already, and is no backup" in refused.stderr) == (2, True)
    assert other.read_bytes() == b"a,b\n1,2\n"
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["appendonlydir"]
    assert run("backup", str(file)).stdout.endswith("1 job waits\n")
