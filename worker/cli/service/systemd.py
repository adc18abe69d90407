"""A systemd user unit: it runs for its user, and is started again when it ends."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import click

from mlx_rq.worker.cli.service.definition import STOP_SECONDS, Service
from mlx_rq.worker.cli.service.programs import call, output

PROGRAM = "systemctl"
_EXEC_START = re.compile(r'^ExecStart="((?:[^"\\]|\\.)*)"', re.MULTILINE)
_RUNTIME = "/run/user/{uid}"
_NO_BUS = "Failed to connect to bus"
_NO_SESSION = (
    "There is no systemd for this user at the moment: log in as the user, not by su or sudo, or "
    "say once: sudo loginctl enable-linger USER"
)


class Systemd:
    """The service manager of most Linux systems."""

    def file(self, name: str) -> Path:
        """Says where the definition lies."""
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        return Path(base) / "systemd" / "user" / _unit(name)

    def program_in(self, definition: Path) -> str:
        """Reads which program a definition starts; empty where it says none."""
        found = _EXEC_START.search(definition.read_text(errors="replace"))
        return "" if found is None else _unquoted(found[1])

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
        _tell("daemon-reload")
        _tell("enable", _unit(name))
        _tell("restart", _unit(name))
        if output("loginctl", "show-user", "--property=Linger", "--value").strip() == "no":
            return "It ends when you log out, unless you say: loginctl enable-linger"
        return None

    def removed(self, name: str) -> None:
        """Has it stopped and forgotten, before its file goes."""
        _tell("disable", "--now", _unit(name))

    def start(self, name: str) -> None:
        _tell("start", _unit(name))

    def stop(self, name: str) -> None:
        _tell("stop", _unit(name))

    def status(self, name: str) -> tuple[bool, str]:
        """Says whether it runs, and in a line what is known."""
        shown = ("ActiveState", "SubState", "MainPID", "ExecMainStatus", "NRestarts")
        said = _tell("show", f"--property={','.join(shown)}", _unit(name))
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


def _tell(*words: str) -> str:
    """Has the user's own systemd do something; raises ClickException where it fails.

    What `su`, `sudo -u` and some ssh start does not know where that systemd is.
    """
    bus = _RUNTIME.format(uid=os.getuid())
    unknown = "XDG_RUNTIME_DIR" not in os.environ and os.path.isdir(bus)
    environment = {"XDG_RUNTIME_DIR": bus} if unknown else None
    try:
        return call(PROGRAM, "--user", *words, environment=environment)
    except click.ClickException as error:
        if _NO_BUS not in error.message:
            raise
        raise click.ClickException(f"{error.message}. {_NO_SESSION}") from None


def _unit(name: str) -> str:
    return f"mlx-rq-{name}.service"


def _quoted(text: str, *, dollar: bool = False) -> str:
    """Writes a word so that systemd takes it as it is."""
    text = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
    return f'"{text.replace("$", "$$") if dollar else text}"'


def _unquoted(text: str) -> str:
    """Reads a word of a program that `_quoted` wrote."""
    signs = {"$$": "$", "%%": "%", "\\n": "\n"}
    return re.sub(r"\$\$|%%|\\.", lambda found: signs.get(found[0], found[0][1:]), text)
