"""A launchd agent: it runs while its user is logged in, and is started again when it ends."""

import os
import plistlib
import re
from collections.abc import Sequence
from pathlib import Path
from xml.parsers.expat import ExpatError

from mlx_rq.worker.cli.service.definition import STOP_SECONDS, Service
from mlx_rq.worker.cli.service.programs import call, output, quietly

PROGRAM = "launchctl"


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
        """Has the definition taken, and started."""
        quietly(PROGRAM, "bootout", _target(name))
        self.start(name)
        return None

    def removed(self, name: str) -> None:
        """Has it forgotten, before its file goes."""
        quietly(PROGRAM, "bootout", _target(name))

    def start(self, name: str) -> None:
        call(PROGRAM, "bootstrap", _domain(), str(self.file(name)))

    def stop(self, name: str) -> None:
        call(PROGRAM, "bootout", _target(name))

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
