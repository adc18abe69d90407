"""A systemd user unit: it runs for its user, and is started again when it ends."""

import os
from collections.abc import Sequence
from pathlib import Path

from mlx_rq.worker.cli.service.definition import STOP_SECONDS, Service
from mlx_rq.worker.cli.service.programs import call, output, quietly

PROGRAM = "systemctl"


class Systemd:
    """The service manager of most Linux systems."""

    def file(self, name: str) -> Path:
        """Says where the definition lies."""
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(base) / "systemd" / "user" / _unit(name)

    def text(self, service: Service, ours: Sequence[str]) -> str:
        """Writes the definition; `ours` begins our command line."""
        program = " ".join(_quoted(word, dollar=True) for word in (*ours, *service.program))
        environment = [
            f"Environment={_quoted(f'{name}={value}')}"
            for name, value in service.environment.items()
        ]
        lines = [
            "[Unit]",
            f"Description=mlx-rq ({service.name})",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            "Type=exec",
            f"WorkingDirectory={str(service.folder).replace('%', '%%')}",
            f"ExecStart={program}",
            *environment,
            "Restart=always",
            "RestartSec=10",
            # Its parts are told by itself, one after the other: the queue goes last.
            "KillMode=mixed",
            f"TimeoutStopSec={STOP_SECONDS}",
            "",
            "[Install]",
            "WantedBy=default.target",
        ]
        return "\n".join(lines) + "\n"

    def installed(self, name: str) -> str | None:
        """Has the definition taken, and started; says what else there is to know."""
        call(PROGRAM, "--user", "daemon-reload")
        call(PROGRAM, "--user", "enable", _unit(name))
        call(PROGRAM, "--user", "restart", _unit(name))
        if output("loginctl", "show-user", "--property=Linger", "--value").strip() == "no":
            return "It ends when you log out, unless you say: loginctl enable-linger"
        return None

    def removed(self, name: str) -> None:
        """Has it forgotten, before its file goes."""
        quietly(PROGRAM, "--user", "disable", "--now", _unit(name))

    def start(self, name: str) -> None:
        call(PROGRAM, "--user", "start", _unit(name))

    def stop(self, name: str) -> None:
        call(PROGRAM, "--user", "stop", _unit(name))

    def status(self, name: str) -> tuple[bool, str]:
        """Says whether it runs, and in a line what is known."""
        shown = ("ActiveState", "SubState", "MainPID", "ExecMainStatus", "NRestarts")
        said = output(PROGRAM, "--user", "show", f"--property={','.join(shown)}", _unit(name))
        found = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        line = (
            f"{found.get('ActiveState', 'unknown')} ({found.get('SubState', '?')}), "
            f"pid {found.get('MainPID', '?')}, last exit code {found.get('ExecMainStatus', '?')}, "
            f"restarted {found.get('NRestarts', '?')} times"
        )
        return found.get("ActiveState") == "active", line

    def logs(self, name: str, lines: int, follow: bool) -> list[str]:
        """Gives the program that shows the log, which journald keeps and rotates."""
        shown = ["journalctl", "--user", "--unit", _unit(name), "--lines", str(lines)]
        return [*shown, *(["--follow"] if follow else ["--no-pager"])]


def _unit(name: str) -> str:
    return f"mlx-rq-{name}.service"


def _quoted(text: str, *, dollar: bool = False) -> str:
    """Writes a word so that systemd takes it as it is."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
    return f'"{text.replace("$", "$$") if dollar else text}"'
