"""What the shell is offered: commands, options, models, jobs, folders."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from redis import Redis

from mlx_rq import submit
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.worker.cli.main import main


def offered(*words: str) -> list[tuple[str, str]]:
    """What is offered for the last of some words, and what kind it is."""
    shell = ShellComplete(main, {}, "mlx-rq", "_MLX_RQ_COMPLETE")
    items = shell.get_completions(list(words[:-1]), words[-1])
    return [(item.type, item.value) for item in items]


def test_models_that_were_served_and_ids_of_jobs(redis_url: str, connection: Redis) -> None:
    connection.zadd(keys.MODELS, {"org/one": 1, "other": 2})
    assert offered("submit", "--model", "or") == [("plain", "org/one")]
    assert offered("cancel", "--model", "o") == [("plain", "org/one"), ("plain", "other")]
    job = submit(prompt="Hi")
    assert offered("result", job.id[:6]) == [("plain", job.id)]
    assert offered("status", "*") == []
    assert offered("submit", "--priority", "h") == [("plain", "high")]


def test_models_on_the_disk_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models--org--name").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert offered("worker", "--model", "or") == [("plain", "org/name"), ("dir", "or")]
    assert offered("up", "--model", "sm") == [("plain", "smollm2"), ("dir", "sm")]


def test_without_redis_nothing_is_said(
    nobody_listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(URL_VARIABLE, nobody_listens)
    assert offered("result", "ab") == []
    assert offered("submit", "--model", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_takes_its_script(shell: str, tmp_path: Path) -> None:
    script = CliRunner().invoke(main, ["completion", shell]).stdout
    assert f"_MLX_RQ_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", tmp_path / "script"], check=True, env=os.environ)
