"""The Homebrew formula: filled in for a release, and its commands are those that mlx-rq has."""

import hashlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from mlx_rq.worker.cli.main import main

SCRIPT = Path(__file__).parents[2] / "packaging" / "homebrew.py"
URL = "https://example.org/files/mlx_rq-9.8.7.tar.gz"


def write(sdist: Path, url: str = URL, homepage: str = "https://example.org/") -> Any:
    command = [sys.executable, "-P", SCRIPT, sdist, url, homepage]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def formula(tmp_path_factory: pytest.TempPathFactory) -> str:
    sdist = tmp_path_factory.mktemp("dist") / "mlx_rq-9.8.7.tar.gz"
    sdist.write_bytes(b"an archive")
    written = write(sdist)
    assert (written.returncode, written.stderr) == (0, "")
    return str(written.stdout)


def test_it_is_filled_in(formula: str) -> None:
    assert f'  url "{URL}"\n' in formula
    assert f'  sha256 "{hashlib.sha256(b"an archive").hexdigest()}"\n' in formula
    assert re.findall(r"@[A-Z]\w*@", formula) == []
    assert max(map(len, formula.splitlines())) <= 118  # as `brew style` has it


@pytest.mark.parametrize(
    ("name", "url", "homepage"),
    [
        ("mlx_rq-9.8.7.tar.gz", "https://example.org/mlx_rq-9.8.8.tar.gz", "https://x.org"),
        ("mlx_rq.whl", "https://example.org/mlx_rq.whl", "https://x.org"),
        ("mlx_rq-9.8.7.tar.gz", URL.replace("https", "http"), "https://x.org"),
        ("mlx_rq-9.8.7.tar.gz", URL, 'https://x.org"; system "'),
        ("mlx_rq-9.8.7.tar.gz", URL.replace("files", "#{x}"), "https://x.org"),
    ],
)
def test_what_is_no_release_is_refused(tmp_path: Path, name: str, url: str, homepage: str) -> None:
    (tmp_path / name).write_bytes(b"")
    refused = write(tmp_path / name, url, homepage)
    assert (refused.returncode, refused.stdout, refused.stderr[:7]) == (1, "", "Error: ")


def test_its_service_is_a_command_of_ours(formula: str) -> None:
    (run,) = re.findall(r"^ +run \[opt_bin/\"mlx-rq\", (.+)\]$", formula, re.MULTILINE)
    words = shlex.split(run.replace('var/"', '"/var/').replace(",", ""))
    assert words[:3] == ["service", "run", "--log"]
    group = main.commands["service"]
    assert isinstance(group, click.Group)
    with group.commands["run"].make_context("run", words[2:]) as context:
        assert context.params["command"] == ("up",)


def test_what_it_tests_of_an_install_is_so(formula: str, nobody_listens: str) -> None:
    assert 'shell_output("#{bin}/mlx-rq --version")' in formula
    assert re.search(r"\d+\.\d+", CliRunner().invoke(main, ["--version"]).stdout)
    assert 'status --redis-url redis://127.0.0.1:#{free_port}/0 2>&1", 1)' in formula
    refused = CliRunner().invoke(main, ["status", "--redis-url", nobody_listens])
    assert refused.exit_code == 1
    assert "No Redis at" in refused.output
    assert 'generate_completions_from_executable(bin/"mlx-rq", "completion")' in formula
    assert CliRunner().invoke(main, ["completion", "fish"]).exit_code == 0
