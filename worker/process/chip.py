"""What the machine's processor is called, for people."""

import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

_TIMEOUT_SECONDS = 5.0


@cache
def chip() -> str:
    """Names the processor, as in `Apple M2 Max`; its architecture where nothing says more."""
    try:
        name = _mac_chip() if sys.platform == "darwin" else linux_chip(Path("/proc/cpuinfo"))
    except (OSError, subprocess.SubprocessError):
        name = ""
    return name or platform.machine()


def _mac_chip() -> str:
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True
    ).stdout.strip()


def linux_chip(cpuinfo: Path) -> str:
    """Reads what the kernel says of the first core; empty where it does not name it."""
    for line in cpuinfo.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""
