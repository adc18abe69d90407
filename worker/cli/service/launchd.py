"""A launchd agent: it runs while its user is logged in, and is started again when it ends."""

import os
import plistlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from xml.parsers.expat import ExpatError

import click

from mlx_rq.worker.cli.service.definition import STOP_SECONDS, Service
from mlx_rq.worker.cli.service.programs import call, output, quietly

PROGRAM = "launchctl"

_GONE_WITHIN_SECONDS = STOP_SECONDS + 10.0
"""launchd kills what has not ended after STOP_SECONDS."""
_LET_GO_WITHIN_SECONDS = 15.0
"""A name that is gone may not be taken again for so long: an error in the meantime is none."""
_POLL_SECONDS = 0.5

_NOT_YET = "Input/output error"
_NO_DOMAIN = "Domain does not support specified action"
_NO_LOGIN = (
    "launchd starts agents of users who are logged in at the screen only, not by ssh: log in "
    "there, and have macOS do so after a restart (automatic login)"
)


class Launchd:
    """The service manager of macOS."""

    def file(self, name: str) -> Path:
        """Says where the definition lies."""
        return Path.home() / "Library" / "LaunchAgents" / f"{_label(name)}.plist"

    def log(self, name: str) -> Path:
        """Says where the log lies; launchd itself keeps none, and rotates none."""
        return Path.home() / "Library" / "Logs" / "mlx-rq" / f"{name}.log"

    def program_in(self, definition: Path) -> str:
        """Reads which program a definition starts; empty where it says none."""
        try:
            return str(plistlib.loads(definition.read_bytes())["ProgramArguments"][0])
        except (ValueError, KeyError, IndexError, TypeError, ExpatError):
            return ""

    def text(self, service: Service, ours: Sequence[str]) -> str:
        """Writes the definition; `ours` begins our command line."""
        log = [*ours, "service", "run", "--log", str(self.log(service.name))]
        definition = {
            "Label": _label(service.name),
            "ProgramArguments": [*log, *service.program],
            "WorkingDirectory": str(service.folder),
            "EnvironmentVariables": dict(service.environment),
            "RunAtLoad": True,
            "KeepAlive": True,
            "ThrottleInterval": 10,
            "ExitTimeOut": STOP_SECONDS,
            "ProcessType": "Interactive",  # others are slowed down
        }
        return plistlib.dumps(definition, sort_keys=False).decode()

    def installed(self, name: str) -> str | None:
        """Has the definition taken, and started; the one before is waited for."""
        self._leave(name)
        self.start(name)
        return None

    def removed(self, name: str) -> None:
        """Has it forgotten, before its file goes."""
        self._leave(name)

    def start(self, name: str) -> None:
        deadline = time.monotonic() + _LET_GO_WITHIN_SECONDS
        while not self._is_loaded(name):
            try:
                call(PROGRAM, "bootstrap", _domain(), str(self.file(name)))
                return
            except click.ClickException as error:
                if _NO_DOMAIN in error.message:
                    raise click.ClickException(f"{error.message}. {_NO_LOGIN}") from None
                if _NOT_YET not in error.message or time.monotonic() > deadline:
                    raise
            time.sleep(_POLL_SECONDS)

    def stop(self, name: str) -> None:
        call(PROGRAM, "print", _target(name))  # says so where it is not loaded
        self._leave(name)

    def _is_loaded(self, name: str) -> bool:
        return bool(output(PROGRAM, "print", _target(name)))

    def _leave(self, name: str) -> None:
        """Has launchd end and forget it, if it is loaded; returns when it has.

        launchd itself does not wait: it would not take the same name again before.
        """
        quietly(PROGRAM, "bootout", _target(name))
        deadline = time.monotonic() + _GONE_WITHIN_SECONDS
        while self._is_loaded(name):
            if time.monotonic() > deadline:
                raise click.ClickException(
                    f"{name} is still stopping: `mlx-rq service status {name}` tells"
                )
            time.sleep(_POLL_SECONDS)

    def status(self, name: str) -> tuple[bool, str]:
        """Says whether it runs, and in a line what is known."""
        said = output(PROGRAM, "print", _target(name))
        found = dict(re.findall(r"^\s*(state|pid|last exit code) = (.+)$", said, re.MULTILINE))
        line = ", ".join(f"{key} {value}" for key, value in found.items())
        return found.get("state") == "running", line or "stopped"

    def logs(self, name: str, lines: int, follow: bool) -> list[str]:
        """Gives the program that shows the log."""
        return ["tail", "-n", str(lines), *(["-F"] if follow else []), str(self.log(name))]


def _label(name: str) -> str:
    return f"mlx-rq.{name}"


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _target(name: str) -> str:
    return f"{_domain()}/{_label(name)}"
