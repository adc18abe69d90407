"""`mlx-rq service`: the files that it writes, what it has the system do, logs that are rotated."""

import os
import plistlib
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mlx_rq.worker.cli.doctor.services import service_findings
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.service import launchd
from mlx_rq.worker.cli.service.definition import Service, needed, why_it_may_go
from mlx_rq.worker.cli.service.logged import run_logged
from mlx_rq.worker.cli.service.systemd import Systemd

HARD = Service(
    "night",
    ["worker", "--model", 'a "b" %i $HOME \\ c'],
    {"MLX_RQ_NAME": 'x "y" %h $z'},
    Path("/tmp"),
)


LAUNCHD = {
    "Label": str,
    "ProgramArguments": list,
    "WorkingDirectory": str,
    "EnvironmentVariables": dict,
    "RunAtLoad": bool,
    "KeepAlive": bool,
    "ThrottleInterval": int,
    "ExitTimeOut": int,
    "ProcessType": str,
}
"""Of the keys that launchd.plist(5) has, those that are used, and what each takes."""


class Home:
    """A home without services, and a system whose service manager only notes what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.told = folder, folder / "told"
        self.told.touch()
        (folder / "bin").mkdir()
        for name in ("launchctl", "systemctl", "loginctl"):
            self.program(name, f'echo "{name} $*" >> {shlex.quote(str(self.told))}')

    def program(self, name: str, script: str) -> None:
        """Puts a program where the command finds it."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def calls(self) -> list[str]:
        """What was told since the last time."""
        lines = self.told.read_text().splitlines()
        self.told.write_text("")
        return lines


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    for name in [name for name in os.environ if name.startswith(("MLX_RQ_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return Home(tmp_path)


@pytest.fixture
def run(home: Home) -> Callable[..., Result]:
    def run(*arguments: str, input: str | None = None, **environment: str) -> Result:
        result = CliRunner().invoke(main, ["service", *arguments], input=input, env=environment)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    return run


def test_a_unit_is_shown_without_secrets_then_written_with_them_and_started(
    home: Home, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    secrets = {"HF_TOKEN": "hf_secret", "MLX_RQ_REDIS_URL": "redis://:hidden@h:1/0"}
    asked = run("install", "worker", "--model", "m", input="n\n", **secrets)
    unit = home.folder / ".config/systemd/user/mlx-rq-worker.service"
    assert (asked.exit_code, unit.exists(), home.calls()) == (1, False, [])
    left = run("install", "worker", "--model", "m", input="")  # as Ctrl-C is to click
    assert (left.exit_code, unit.exists()) == (130, False)
    assert left.stderr.endswith("\nStopped. Nothing was written.\n")
    assert 'Environment="HF_TOKEN=***"' in asked.stdout
    assert '"worker" "--model" "m"' in asked.stdout
    assert "hidden" not in asked.output

    assert run("install", "worker", "--model", "m", input="y\n", **secrets).exit_code == 0
    text = unit.read_text()
    assert 'Environment="HF_TOKEN=hf_secret"' in text
    assert 'Environment="MLX_RQ_REDIS_URL=redis://:hidden@h:1/0"' in text
    assert f"WorkingDirectory={home.folder}" in text
    assert stat.S_IMODE(unit.stat().st_mode) == 0o600
    assert home.calls() == [
        "systemctl --user daemon-reload",
        "systemctl --user enable mlx-rq-worker.service",
        "systemctl --user restart mlx-rq-worker.service",
        "loginctl show-user --property=Linger --value",
    ]


def test_a_unit_is_stopped_started_asked_and_removed(
    home: Home, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    home.program("loginctl", "echo no")
    installed = run("install", "--yes")
    assert "note: It ends when you log out" in installed.stderr
    home.calls()
    for word in ("stop", "start"):
        assert run(word).exit_code == 0
    assert home.calls() == [f"systemctl --user {w} mlx-rq-up.service" for w in ("stop", "start")]
    home.program("systemctl", "printf 'ActiveState=active\\nSubState=running\\nMainPID=7\\n'")
    status = run("status")
    assert (status.exit_code, status.stdout[:31]) == (0, "up: active (running), pid 7, la")
    home.program("systemctl", "echo no such bus >&2; exit 1")
    assert run("status").exit_code == 1
    failed = run("start")
    assert failed.stderr == "Error: systemctl --user start mlx-rq-up.service: no such bus\n"
    assert run("uninstall").exit_code == 0
    assert not (home.folder / ".config/systemd/user/mlx-rq-up.service").exists()
    assert "there is no service 'up'" in run("stop").stderr


def test_the_users_systemd_is_found_where_the_shell_does_not_name_it(
    home: Home, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after su, or sudo -u: there the variable is missing, and its folder is not."""
    monkeypatch.setattr(sys, "platform", "linux")
    bus = home.folder / "bus"
    monkeypatch.setattr("mlx_rq.worker.cli.service.systemd._RUNTIME", str(home.folder / "{uid}"))
    monkeypatch.setattr(os, "getuid", lambda: "bus")
    run("install", "--yes")
    home.program("systemctl", 'echo "ActiveState=active$XDG_RUNTIME_DIR"')
    assert run("status").stdout.startswith("up: active (")
    bus.mkdir()
    assert run("status").stdout.startswith(f"up: active{bus} (")
    assert run("status", XDG_RUNTIME_DIR="/given").stdout.startswith("up: active/given (")


def test_where_systemd_cannot_be_asked_nothing_is_said_that_is_not_known(
    home: Home, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    home.program("systemctl", "echo Failed to connect to bus: No medium found >&2; exit 1")
    installed = run("install", "--yes")
    assert installed.exit_code == 1
    why, then = installed.stderr.splitlines()
    assert why.endswith("say once: sudo loginctl enable-linger USER")
    assert then.endswith("does not run yet: `mlx-rq service start up` starts it.")
    assert run("status").stderr.startswith("Error: systemctl --user show --property=")
    removed = run("uninstall")
    assert removed.exit_code == 0
    assert removed.stderr.startswith("note: it may still run: systemctl --user disable --now ")


def test_what_is_installed_for_once_is_told_that_it_may_go(
    home: Home, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    once = "/home/me/.cache/uv/archive-v0/x1/bin/mlx-rq"
    monkeypatch.setattr("mlx_rq.worker.cli.service.command.our_program", lambda: [once])
    assert "uv tool install 'mlx-rq[all]'" in run("install", input="n\n").stderr
    assert why_it_may_go(["/home/me/.cache/pypoetry/virtualenvs/x/bin/mlx-rq"]) is None
    assert why_it_may_go(["/opt/homebrew/bin/mlx-rq"]) is None


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_the_doctor_looks_at_services(
    home: Home, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, platform: str
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert list(service_findings()) == []
    ours = home.folder / 'a "b" %i $x \\n' / "mlx-rq"
    ours.parent.mkdir()
    ours.touch(mode=0o755)
    monkeypatch.setattr("mlx_rq.worker.cli.service.command.our_program", lambda: [str(ours)])
    assert run("install", "--yes", "--name", "night").exit_code == 0
    (stopped,) = service_findings()
    advice = "mlx-rq service start night; mlx-rq service logs night"
    assert (stopped.level, stopped.advice) == ("warning", advice)
    home.program("systemctl", "echo ActiveState=active")
    home.program("launchctl", "echo 'state = running'")
    (runs,) = service_findings()
    assert (runs.level, runs.text[:6]) == ("ok", "night:")
    ours.unlink()
    (gone,) = service_findings()
    assert (gone.level, f"night starts {ours}, which is" in gone.text) == ("error", True)


def test_systemd_itself_has_nothing_against_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd here")
    unit = tmp_path / "mlx-rq-night.service"
    unit.write_text(Systemd().text(HARD, [sys.executable, "-P", "-m", "mlx_rq.worker"]))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "warning"}
    said = subprocess.run(
        [program, "--user", "verify", unit], capture_output=True, text=True, env=environment
    )
    assert (said.returncode, said.stderr) == (0, "")


def test_signs_that_mean_something_to_systemd_do_not_in_a_unit() -> None:
    text = Systemd().text(HARD, ["/bin/mlx-rq"])
    said = r'ExecStart="/bin/mlx-rq" "worker" "--model" "a \"b\" %%i $$HOME \\ c"'
    assert said in text.splitlines()
    assert r'Environment="MLX_RQ_NAME=x \"y\" %%h $z"' in text.splitlines()


def test_an_agent_of_launchd(
    home: Home, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert run("install", "--name", "night", "--yes", "up", "--no-http").exit_code == 0
    path = home.folder / "Library/LaunchAgents/mlx-rq.night.plist"
    agent = plistlib.loads(path.read_bytes())
    log = str(home.folder / "Library/Logs/mlx-rq/night.log")
    assert {key: type(value) for key, value in agent.items()} == LAUNCHD
    assert agent["ProcessType"] in ("Background", "Standard", "Adaptive", "Interactive")
    assert {type(value) for value in agent["EnvironmentVariables"].values()} == {str}
    ours = ["-P", "-m", "mlx_rq.worker", "service", "run", "--log", log, "up", "--no-http"]
    assert agent["ProgramArguments"][1:] == ours
    assert (agent["KeepAlive"], agent["RunAtLoad"], agent["ExitTimeOut"]) == (True, True, 90)
    assert agent["EnvironmentVariables"]["PATH"] == os.environ["PATH"]
    domain = f"gui/{os.getuid()}"
    assert home.calls() == [
        f"launchctl bootout {domain}/mlx-rq.night",
        f"launchctl print {domain}/mlx-rq.night",
        f"launchctl print {domain}/mlx-rq.night",
        f"launchctl bootstrap {domain} {path}",
    ]
    home.program("launchctl", "printf '\\tstate = running\\n\\tpid = 12\\n'")
    status = run("status", "night")
    assert (status.exit_code, status.stdout) == (0, "night: state running, pid 12\n")
    home.program("tail", 'echo "tail $*"')
    assert Systemd().logs("up", 5, True)[-1] == "--follow"
    assert run("logs", "night", "-n", "5").exit_code == 0
    home.program("launchctl", "exit 113")
    assert run("uninstall", "night").exit_code == 0
    assert not path.exists()


LAUNCHCTL = """
loaded={folder}/loaded leaving={folder}/leaving
case $1 in
    print)
        test -e $loaded || {{ echo 'Could not find service' >&2; exit 113; }}
        echo '  state = running'
        if test -e $leaving; then  # it is seen twice more
            echo >> $leaving
            test "$(wc -l < $leaving)" -gt 2 && rm $loaded $leaving
        fi;;
    bootout)
        test -e $loaded || {{ echo 'Boot-out failed: 3: No such process' >&2; exit 3; }}
        touch $leaving; echo 'Boot-out failed: 36: Operation now in progress' >&2; exit 36;;
    bootstrap)
        test -e $loaded && {{ echo 'Bootstrap failed: 5: Input/output error' >&2; exit 5; }}
        touch $loaded;;
esac
exit 0
"""
"""A launchd whose services take a while to end; until then it takes none of the same name."""


@pytest.fixture
def slow_launchd(home: Home, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Gives the file that is there while the service is loaded."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(launchd, "_POLL_SECONDS", 0.001)
    home.program("launchctl", LAUNCHCTL.format(folder=home.folder))
    return home.folder / "loaded"


def test_an_agent_that_takes_a_while_to_end_is_waited_for(
    slow_launchd: Path, run: Callable[..., Result]
) -> None:
    for _ in range(2):  # the second takes the place of the first, which runs
        assert run("install", "--yes").exit_code == 0
        assert slow_launchd.exists()
    assert run("start").exit_code == 0, "it runs, which is what was asked for"
    assert run("stop").exit_code == 0
    assert not slow_launchd.exists()
    assert "Could not find service" in run("stop").stderr
    assert run("start").exit_code == 0
    assert slow_launchd.exists()
    assert run("uninstall").exit_code == 0
    assert not slow_launchd.exists()


def test_an_agent_that_does_not_end_is_told_of(
    slow_launchd: Path, home: Home, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("install", "--yes").exit_code == 0
    monkeypatch.setattr(launchd, "_GONE_WITHIN_SECONDS", 0.0)
    stopped = run("stop")
    assert stopped.exit_code == 1
    assert stopped.stderr == "Error: up is still stopping: `mlx-rq service status up` tells\n"


def test_a_name_that_launchd_has_not_let_go_of_yet_is_tried_again(
    slow_launchd: Path, home: Home, run: Callable[..., Result]
) -> None:
    fails_twice = "echo >> $0.tries; test $(wc -l < $0.tries) -gt 2 && exit 0"
    eio = "echo 'Bootstrap failed: 5: Input/output error' >&2; exit 5"
    home.program("launchctl", f"test $1 = bootstrap || exit 113; {fails_twice}; {eio}")
    assert run("install", "--yes").exit_code == 0


def test_without_a_login_at_the_screen_an_agent_cannot_start(
    slow_launchd: Path, home: Home, run: Callable[..., Result]
) -> None:
    said = "Bootstrap failed: 125: Domain does not support specified action"
    home.program("launchctl", f"echo {said!r} >&2; exit 125")
    installed = run("install", "--yes")
    assert installed.exit_code == 1
    why, then = installed.stderr.splitlines()
    assert why.endswith(
        f"{said}. launchd starts agents of users who are logged in at the screen only, not by ssh: "
        "log in there, and have macOS do so after a restart (automatic login)"
    )
    assert then.endswith("does not run yet: `mlx-rq service start up` starts it.")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["install", "batch"], "'batch' is none of up, worker, serve"),
        (["install", "up", "--bacth", "3"], "No such option '--bacth'"),
        (["install", "up", "--batch", "many"], "'many' is neither a number"),
        (["install", "--name", "../x", "up"], "take letters, digits, - and _"),
    ],
)
def test_what_would_fail_at_each_start_is_not_installed(
    home: Home, run: Callable[..., Result], arguments: list[str], error: str
) -> None:
    refused = run(*arguments)
    assert (refused.exit_code, home.calls()) == (2, [])
    assert error in refused.stderr


def test_of_a_shells_environment_what_counts_is_taken() -> None:
    assert needed({"MLX_METAL_FAST_SYNCH": "1"}) == {"MLX_METAL_FAST_SYNCH": "1"}
    hook = Service("up", ["up"], {"MLX_RQ_WEBHOOK": "https://x.org/s3cret"}, Path("/"))
    assert hook.without_secrets().environment == {"MLX_RQ_WEBHOOK": "***"}
    shell = {"MLX_RQ_MODEL": "m", "MLX_RQ_PARENT_PIPE": "5", "HF_HOME": "/h", "HTTPS_PROXY": "p"}
    shell |= {"https_proxy": "p", "AWS_SECRET": "s", "LD_PRELOAD": "l", "MLX_RQ_DATA_DIR": "d"}
    taken = ["HF_HOME", "HTTPS_PROXY", "LD_PRELOAD", "MLX_RQ_MODEL", "https_proxy"]
    assert list(needed(shell, without={"MLX_RQ_DATA_DIR"})) == taken


def test_output_goes_into_a_log_that_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "up.log"
    script = "i=0; while [ $i -lt 30 ]; do echo line $i >&2; i=$((i+1)); done; exit 3"
    assert run_logged(["/bin/sh", "-c", script], log, most_bytes=100) == 3
    kept = sorted(path.name for path in log.parent.iterdir())
    assert kept == ["up.log", *(f"up.log.{number}" for number in (1, 2))]
    assert log.read_text().splitlines()[-1] == "line 29"
    assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


def test_a_signal_is_handed_on(tmp_path: Path) -> None:
    """The program tells its parent, which this process is, to stop: as launchd would."""
    script = "trap 'echo stopped; exit 5' TERM; kill -TERM $PPID; while :; do read x; done"
    assert run_logged(["/bin/sh", "-c", script], tmp_path / "log") == 5
    assert (tmp_path / "log").read_text() == "stopped\n"
