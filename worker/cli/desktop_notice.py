"""Desktop notices: osascript's on macOS, notify-send's elsewhere.

What a notice says may hold anything, as names of files do: it is an argument of the program, never
part of a script, and on Linux its text is escaped, which may hold markup there.
"""

import html
import shutil
import subprocess
import sys

_SCRIPT = (
    "on run argv",
    "display notification (item 2 of argv) with title (item 1 of argv)",
    "end run",
)
_SECONDS = 10.0
"""For the program, which only hands the notice on."""


def why_no_notices() -> str | None:
    """Says why this machine shows no notices, and what would help; None where it does."""
    program = _command("", "")[0]
    if shutil.which(program) is not None:
        return None
    if sys.platform == "darwin":
        return f"{program}, which is part of macOS, is not on the PATH"
    return (
        f"{program} is not on the PATH. Install it (Debian and Ubuntu: libnotify-bin, Fedora and "
        "Arch: libnotify)"
    )


def show_notice(title: str, text: str) -> str | None:
    """Shows a notice; says why it could not be shown, None where it was.

    The title must not begin with a dash.
    """
    command = _command(title, text)
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {_SECONDS:.0f} s"
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    if ran.returncode == 0:
        return None
    said = ran.stderr.decode(errors="replace").strip()
    return said or f"{command[0]} ended with {ran.returncode}"


def _command(title: str, text: str) -> list[str]:
    if sys.platform == "darwin":
        lines = [word for line in _SCRIPT for word in ("-e", line)]
        return ["osascript", *lines, title, text]
    return ["notify-send", "--app-name=mlx-rq", title, html.escape(text, quote=False)]
