"""Where the embedded server of this machine is, for producers and commands that got no URL.

`mlx-rq up` leaves its URL, password and all, in a file that only its user can read. The server
process holds a lock beside it for as long as it lives, so that the file of one that is gone (after
a power cut, say) is not gone by.
"""

import os
import sys
from pathlib import Path
from typing import IO

from mlx_rq.files import lock

FOLDER = "valkey"
"""The embedded server's own folder below the data folder."""

HTTP_FOLDER = "http"
"""The HTTP server's."""

URL_FILE = "url"
LOCK_FILE = "lock"


def default_data_dir() -> Path:
    """Where the queue's data lasts: MLX_RQ_DATA_DIR, else the system's place for user data."""
    if given := os.environ.get("MLX_RQ_DATA_DIR"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-rq"
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "mlx-rq"


def embedded_url(data_dir: Path | None = None) -> str | None:
    """Gives the URL of the embedded server of a data folder; None where none runs."""
    folder = (data_dir or default_data_dir()) / FOLDER
    if not is_running(folder):
        return None
    try:
        return (folder / URL_FILE).read_text().strip() or None
    except OSError:
        return None


def is_running(folder: Path) -> bool:
    """Tells whether a server runs on its folder, embedded or HTTP, or is being started."""
    try:
        file = (folder / LOCK_FILE).open("rb")
    except OSError:
        return False
    with file:
        return _is_held(file)


def _is_held(file: IO[bytes]) -> bool:
    if sys.platform == "win32":  # the embedded server does not run there
        return False
    try:
        return not lock(file, shared=True)  # closing the file lets go of it again
    except OSError:
        return True
