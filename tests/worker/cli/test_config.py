"""One configuration: files, profiles, the environment and options, and what is wrong in a file."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from mlx_rq.worker.cli.config_files import FILES_VARIABLE
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.processes import environment_with


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs the command line in a folder of its own, with no other configuration."""
    for name in list(os.environ):
        if name.startswith("MLX_RQ_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "mlx-rq").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, **environment: str) -> Result:
        result = CliRunner().invoke(main, arguments, env=environment)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    return run


def users(text: str) -> None:
    Path("home/mlx-rq/config.toml").write_text(text)


def folders(text: str) -> None:
    Path("mlx-rq.toml").write_text(text)


def of(result: Result) -> dict[str, tuple[Any, str]]:
    """What `config show COMMAND --json` said: values and sources."""
    assert result.exit_code == 0, result.output
    return {row["option"]: (row["value"], row["source"]) for row in json.loads(result.stdout)}


def test_each_counts_more_than_the_one_before(run: Callable[..., Result], tmp_path: Path) -> None:
    users('model = "users"\ngrace = 1\nstall = 61\nlease = 11\n')
    folders("grace = 2\nstall = 62\nlease = 12\n")
    said = of(run("config", "show", "worker", "--json", MLX_RQ_STALL="63"))
    home = str(tmp_path / "home/mlx-rq/config.toml")
    assert said["model"] == (["users"], home)
    assert said["grace"] == ("2", "mlx-rq.toml")
    assert said["stall"] == ("63", "MLX_RQ_STALL of the environment")
    assert said["window"] == (1024, "default")

    assert of(run("config", "show", "submit", "--json"))["model"][0] == "users"  # there, only one
    seen: dict[str, Any] = {}
    worker = main.commands["worker"]
    with main.make_context("mlx-rq", ["worker"]) as context:
        seen = worker.make_context("worker", ["--lease", "13"], parent=context).params
    assert (seen["model"], seen["grace"]) == (("users",), 2.0)
    assert (seen["stall"], seen["lease"]) == (62.0, 13)


def test_a_profile_counts_more_than_all_that_stands_outside(run: Callable[..., Result]) -> None:
    users("[profile.night]\ngrace = 9\n[profile.night.worker]\nbatch = 64\n[worker]\nbatch = 8\n")
    folders("grace = 2\n")
    assert of(run("config", "show", "worker", "--json"))["batch"][0] == "8"
    night = of(run("--profile", "night", "config", "show", "worker", "--json"))
    assert (night["grace"][0], night["batch"][0]) == ("9", "64")
    assert night["batch"][1].endswith("config.toml, profile night")
    assert of(run("config", "show", "worker", "--json", MLX_RQ_PROFILE="night")) == night
    wrong = run("--profile", "nigth", "config", "show")
    assert (wrong.exit_code, "did you mean 'night'?" in wrong.stderr) == (1, True)


def test_a_table_is_one_commands_and_up_takes_the_workers(run: Callable[..., Result]) -> None:
    folders('[worker]\nbatch = 8\nburst = true\n[up]\ngrace = 3\n[batch]\nmodel = "m"\n')
    up = of(run("config", "show", "up", "--json"))
    assert (up["batch"][0], up["grace"][0], "burst" in up) == ("8", "3", False)
    assert of(run("config", "show", "worker", "--json"))["grace"] == (30.0, "default")
    assert of(run("config", "show", "batch", "--json"))["model"] == ("m", "mlx-rq.toml")
    assert of(run("config", "show", "submit", "--json"))["model"] == (None, "default")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('modle = "m"', "mlx-rq.toml: unknown key 'modle': did you mean 'model'?"),
        ("[worker]\nbacth = 3", "unknown key 'bacth': did you mean 'batch'? (of worker)"),
        ("[wroker]", "mlx-rq.toml: unknown table [wroker]: did you mean 'worker'?"),
        ('order = "input"\nprompt = 1\nyes = true', "unknown key 'yes'"),
        ("in-flight = true", "in-flight takes one text or number, not True"),
        ("burst = 1", "burst is true or false, not 1"),
        ("trust-remote-code = true", "not taken from a folder's file"),
        ("a = ", "mlx-rq.toml: not TOML: Invalid value (at end of document)"),
        ("profile = 3", "profiles are tables, as in [profile.night]"),
        ("log-level = 'loud'", "'loud' is not one of"),
        ("log-level = 'loud'", "(from mlx-rq.toml)"),
    ],
)
def test_what_is_wrong_is_said_with_the_file_and_what_would_be_right(
    run: Callable[..., Result], text: str, error: str
) -> None:
    folders(text)
    result = run("config", "show")
    assert result.exit_code in (1, 2)
    assert error in " ".join(result.stderr.split())


def test_a_value_that_its_option_refuses_is_said_with_the_file(run: Callable[..., Result]) -> None:
    folders("[up]\nbatch = 'many'\n")
    result = run("up")
    assert "'many' is neither a number of sequences nor 'auto' (from mlx-rq.toml)" in result.stderr
    assert "(from" not in run("up", "--batch", "many").stderr


def test_what_is_read_from_the_environment_alone_can_stand_in_a_file(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    users('data-dir = "~/queue"\nmax-body = "1MB"\n')
    seen: list[str | None] = []
    probe = click.Command("probe", callback=lambda: seen.append(os.environ.get("MLX_RQ_DATA_DIR")))
    monkeypatch.setitem(main.commands, "probe", probe)
    run("probe")
    run("probe", MLX_RQ_DATA_DIR="/given")
    assert seen == [str(Path.home() / "queue"), "/given"]
    assert "MLX_RQ_DATA_DIR" not in os.environ
    assert "MLX_RQ_MAX_BODY" not in os.environ


def test_all_that_is_set_is_shown_without_passwords(run: Callable[..., Result]) -> None:
    users('redis-url = "redis://:secret@h:1/0"\ngrace = 1\n[batch]\nmodel = "m"\n')
    result = run("config", "show", MLX_RQ_GRACE="5", MLX_RQ_MODEL="x")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "secret" not in result.output
    assert lines[1] == "file: mlx-rq.toml (not there)"
    rows = json.loads(run("config", "show", "--json", MLX_RQ_GRACE="5", MLX_RQ_MODEL="x").stdout)
    assert [(row["command"], row["option"], row["value"], row["used"]) for row in rows] == [
        (None, "redis-url", "redis://:***@h:1/0", True),
        (None, "grace", "1", False),
        ("batch", "model", "m", True),
        (None, "grace", "5", True),
        (None, "model", "x", True),
    ]


def test_one_file_instead_of_both_and_none_for_a_worker_that_is_a_child(
    run: Callable[..., Result],
) -> None:
    folders("grace = 2\n")
    Path("other.toml").write_text("grace = 7\n")
    said = of(run("config", "show", "worker", "--json", MLX_RQ_CONFIG="other.toml"))
    assert said["grace"] == ("7", "other.toml")
    missing = run("config", "show", MLX_RQ_CONFIG="missing.toml")
    assert missing.stderr == "Error: MLX_RQ_CONFIG: there is no file missing.toml\n"
    assert environment_with("redis://h", "worker")[FILES_VARIABLE] == ""
    assert FILES_VARIABLE not in environment_with("redis://h", "serve")
    none = of(run("--profile", "night", "config", "show", "worker", "--json", MLX_RQ_CONFIG=""))
    assert none["grace"] == (30.0, "default")
