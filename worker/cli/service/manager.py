"""Which program of the system keeps services running here, and which of ours it knows."""

import sys
from pathlib import Path

from mlx_rq.worker.cli.service.launchd import Launchd
from mlx_rq.worker.cli.service.systemd import Systemd


def manager() -> Launchd | Systemd:
    """Gives the service manager of this system."""
    return Launchd() if sys.platform == "darwin" else Systemd()


def definitions() -> list[Path]:
    """Lists the files of services that `service install` wrote."""
    pattern = manager().file("*")
    return sorted(pattern.parent.glob(pattern.name))
