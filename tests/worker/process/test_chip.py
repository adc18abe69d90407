"""What a processor is called."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlx_rq.worker.process.chip import chip, linux_chip


def test_a_mac_is_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysctl(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-n", "machdep.cpu.brand_string"]
        return subprocess.CompletedProcess(command, 0, "Apple M1\n", "")

    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(subprocess, "run", sysctl)
    assert chip.__wrapped__() == "Apple M1"


def test_where_nothing_names_it_the_architecture_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert chip.__wrapped__() == "arm64"


def test_linux_names_it_for_each_core(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A: Chip\n\nprocessor\t: 1\nmodel name\t: B\n")
    assert linux_chip(file) == "A: Chip"
    file.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n")
    assert linux_chip(file) == ""
