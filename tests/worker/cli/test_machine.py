"""A machine that cannot generate is told why in a sentence, before anything fails to import."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

from mlx_rq.worker.cli import common
from mlx_rq.worker.cli.machine import is_translated, unfit, why_not_here
from mlx_rq.worker.cli.main import main

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("system", "machine", "macos", "translated", "words"),
    [
        ("darwin", "arm64", "14.0", False, None),
        ("darwin", "arm64", "26.1", False, None),
        ("darwin", "x86_64", "15.5", True, "made for Intel and is run by Rosetta"),
        ("darwin", "x86_64", "15.5", False, "MLX needs Apple silicon; this Mac is x86_64."),
        ("darwin", "arm64", "13.7.8", False, "MLX needs macOS ≥ 14; this is macOS 13.7.8."),
        ("linux", "x86_64", "", False, None),
        ("linux", "aarch64", "", False, None),
    ],
)
def test_which_machines_can_generate(
    system: str, machine: str, macos: str, translated: bool, words: str | None
) -> None:
    why = unfit(system, machine, macos, translated)
    assert why is None if words is None else why is not None and words in why


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac answers for itself")
def test_this_one_can() -> None:
    assert not is_translated()
    assert why_not_here() is None


@pytest.mark.parametrize("command", [["worker"], ["up"], ["demo"], ["model", "list"]], ids=" ".join)
def test_a_command_that_needs_mlx_says_it(
    command: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLX_RQ_DATA_DIR", str(tmp_path))
    monkeypatch.setattr(common, "why_not_here", lambda: "MLX needs Apple silicon.")
    ended = CliRunner().invoke(main, command)
    assert (ended.exit_code, ended.output) == (1, "Error: MLX needs Apple silicon.\n")


def test_on_a_mac_that_cannot_pip_installs_all_the_rest() -> None:
    """Else its message about a missing wheel would be all that is said."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    needed = [Requirement(line) for line in extras["worker"]]

    def installed(**machine: str) -> set[str]:
        return {n.name for n in needed if n.marker is None or n.marker.evaluate(machine)}

    intel = installed(sys_platform="darwin", platform_machine="x86_64")
    assert {"mlx", "mlx-lm"} <= installed(sys_platform="darwin", platform_machine="arm64")
    assert {"mlx", "mlx-lm"} <= installed(sys_platform="linux", platform_machine="x86_64")
    assert {"mlx", "mlx-lm"}.isdisjoint(intel)
    assert "transformers" in intel


def test_an_old_python_is_told_so_whatever_it_could_not_read_further_on() -> None:
    code = (ROOT / "mlx_rq" / "__init__.py").read_text()
    program = f"import sys; sys.version_info = (3, 9, 6); exec({code!r})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == (
        "ImportError: mlx-rq needs Python 3.11 or newer, on a Mac a native (arm64) one; "
        "this is Python 3.9."
    )
