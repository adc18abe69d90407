"""What macOS means by "No route to host", where there is one."""

import errno
import os
import sys


def permission_hint(error: BaseException) -> str:
    """Gives an explanation for errors that a missing permission looks like; empty for others.

    macOS 15 and later ask before a program may reach the local network. One that launchd started
    is not asked for: its connections fail as if the machine were not there.
    """
    if sys.platform != "darwin" or os.strerror(errno.EHOSTUNREACH) not in str(error):
        return ""
    return (
        " (if it can be reached from a terminal, macOS keeps this program, perhaps because launchd "
        "started it, from the local network: allow it under System Settings > Privacy & Security "
        "> Local Network)"
    )
