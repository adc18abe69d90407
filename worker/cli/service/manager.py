"""Which program of the system keeps services running here, and which of ours it knows."""

import sys
from pathlib import Path

from mlx_rq.worker.cli.service.launchd import Launchd
from mlx_rq.worker.cli.service.systemd import Systemd


def manager() -> Launchd | Systemd:
    """Gives the service manager of this system."""
    return Launchd() if sys.platform == "darwin" else Systemd()


def definitions() -> dict[str, Path]:
    """Gives the files that `service install` wrote, by the names of the services."""
    pattern = manager().file("*")
    before, after = pattern.name.split("*")
    return {
        path.name.removeprefix(before).removesuffix(after): path
        for path in sorted(pattern.parent.glob(pattern.name))
    }
