"""What a service runs, where, and with which environment."""

import os
import re
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mlx_rq.jobs.queue.connection import without_password

STOP_SECONDS = 90
"""Longer than a worker's --grace, after which it hands back what is left."""

_INTERNAL = frozenset({"MLX_RQ_PARENT_PIPE", "MLX_RQ_SUPERVISOR_PIPE", "MLX_RQ_NAME_HOLDER"})
_TAKEN = re.compile(
    r"MLX_\w+|HF_\w+|XDG_(CONFIG|DATA|CACHE)_HOME|PATH|LANG|LC_ALL|TZ|LD_PRELOAD|NO_COLOR"
    r"|SSL_CERT_(FILE|DIR)|(?i:https?|no|all)_(?i:proxy)"
)
_SECRET = re.compile(r"\w*(TOKEN|PASSWORD|SECRET|KEY|PROXY|WEBHOOK)", re.IGNORECASE)


class Service(NamedTuple):
    """A program that the system keeps running under a name."""

    name: str
    program: Sequence[str]
    environment: Mapping[str, str]
    folder: Path

    def without_secrets(self) -> "Service":
        """Gives what can be shown."""
        return self._replace(
            program=[without_password(word) for word in self.program],
            environment={name: _shown(name, value) for name, value in self.environment.items()},
        )


def _shown(name: str, value: str) -> str:
    return "***" if _SECRET.fullmatch(name) else without_password(value)


def needed(environment: Mapping[str, str], without: Collection[str] = ()) -> dict[str, str]:
    """Picks what a service needs of a shell's environment, which it will not have."""
    unwanted = _INTERNAL.union(without)
    return {
        name: value
        for name, value in sorted(environment.items())
        if _TAKEN.fullmatch(name) and name not in unwanted
    }


_FOR_ONCE = re.compile(r"/uv/(archive|environments)-v\d+/|/pipx/\.?cache/")
"""In the paths of what `uvx` and `pipx run` install: they may remove it at any time."""


def why_it_may_go(program: Sequence[str]) -> str | None:
    """Says why a program may be gone at the service's next start; None where it lasts."""
    if _FOR_ONCE.search(program[0]) is None:
        return None
    return (
        f"{program[0]} was installed for this once, and may be removed: install mlx-rq to stay "
        "(uv tool install 'mlx-rq[all]'), and the service with that"
    )


def our_program() -> list[str]:
    """Gives the beginning of our command line, by a path that an upgrade does not change."""
    script = shutil.which(sys.argv[0])
    if script is not None and Path(script).name == "mlx-rq":
        # Not where a link leads: that may be a folder of one version (Homebrew's Cellar).
        return [os.path.abspath(script)]
    return [sys.executable, "-P", "-m", "mlx_rq.worker"]
