"""Which process of which machine a worker is, so that others there can tell that it died.

Host names and network addresses change with the network, and two containers may have the same. So
a machine goes by an id of its own, in the data folder, and by the boot of its kernel; a process by
its number in its PID namespace and the time when it was started. Where one of these is not known
or is another, nothing can be said of the process, and its leases decide.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ID_FILE = "machine-id"


def machine(data_dir: Path) -> str:
    """Names this boot of this machine (or container); empty where that cannot be told."""
    parts = [_own_id(data_dir), _boot_id(), _pid_namespace()]
    return "/".join(parts) if all(parts) else ""


def start_of(pid: int) -> str | None:
    """Tells when a process was started, in its system's words; empty where none of that id runs.

    None where that cannot be told.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except (PermissionError, OverflowError):
        pass
    if sys.platform == "linux":
        try:
            state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        started = fields[18]
    else:
        state, _, started = _said_by("ps", "-o", "stat=,lstart=", "-p", str(pid)).partition(" ")
    # A zombie has ended, but its parent has not asked how.
    return "" if state.startswith("Z") else started.strip() or None


@cache
def this_process() -> Mapping[str, Any]:
    """Gives what `has_died` asks of a process, of this one."""
    return {"pid": os.getpid(), "process_start": start_of(os.getpid())}


def has_died(worker: Mapping[str, Any], machine: str) -> bool:
    """Tells whether a worker, as it described itself, ran here and is certain to have ended."""
    pid, started = worker.get("pid"), worker.get("process_start")
    if not machine or worker.get("machine") != machine:
        return False
    if not isinstance(pid, int) or pid <= 0 or not isinstance(started, str) or not started:
        return False
    return start_of(pid) not in (started, None)


def _own_id(data_dir: Path) -> str:
    """Reads the machine's id, which is made when it is first asked for."""
    path = data_dir / ID_FILE
    try:
        if not path.exists():
            data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            fresh = path.with_name(f"{ID_FILE}.{secrets.token_hex(4)}.tmp")
            fresh.write_text(secrets.token_hex(16))
            try:
                os.link(fresh, path)
            except FileExistsError:
                pass  # another process was quicker
            finally:
                fresh.unlink()
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _boot_id() -> str:
    """Names the time since the kernel was started."""
    if sys.platform == "linux":
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""
    return _said_by("sysctl", "-n", "kern.bootsessionuuid")


def _pid_namespace() -> str:
    """Names the processes among which a process id is one."""
    if sys.platform != "linux":
        return "all"
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def _said_by(*command: str) -> str:
    """Runs a command of the system; gives what it prints, or nothing where it fails."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "TZ": "UTC"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=10, text=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
