"""The services that `mlx-rq service install` made: whether they run, and can."""

import os
import shlex
from collections.abc import Iterator

import click

from mlx_rq.worker.cli.doctor.finding import Finding
from mlx_rq.worker.cli.service.manager import definitions, manager


def service_findings() -> Iterator[Finding]:
    """Looks at each service of this user."""
    system = manager()
    for name, path in definitions().items():
        program = system.program_in(path)
        if not os.access(program, os.X_OK):
            text = f"{name} starts {program or 'nothing'}, which is not there any more ({path})"
            again = f"Install it again: mlx-rq service install --name {shlex.quote(name)} …"
            yield Finding("service", "error", text, again)
            continue
        try:
            runs, line = system.status(name)
        except click.ClickException as error:
            yield Finding("service", "warning", f"{name}: {error.message}")
            continue
        advice = None if runs else f"mlx-rq service start {name}; mlx-rq service logs {name}"
        yield Finding("service", "ok" if runs else "warning", f"{name}: {line}", advice)
