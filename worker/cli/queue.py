"""Commands for whoever runs the queue: limits, url. They need Redis, not MLX."""

from collections.abc import Iterator, Mapping
from typing import Any

import click

from mlx_rq.jobs.queue.connection import connect, reachable, resolve_url
from mlx_rq.jobs.queue.limits import MOST, limits_in_use, set_limits
from mlx_rq.worker.cli.common import json_option, print_json, redis_option
from mlx_rq.worker.cli.value_types import ByteCount, Number, NumberOrWord, WholeNumber

_NO_LIMIT = "none"


class _Limit(NumberOrWord):
    """What another type reads, or `none`."""

    def __init__(self, of: Number | WholeNumber) -> None:
        self._of = of
        self.name = f"{of.name} or {_NO_LIMIT}"

    def convert(self, value: Any, param: Any, context: Any) -> int | str:
        if value == _NO_LIMIT:
            return _NO_LIMIT
        number = self._of.convert(value, param, context)
        if number > MOST:
            self.fail(f"{value} is above {MOST}, the highest limit", param, context)
        return number


# Not from the environment: a limit that is set somewhere else would be set again by each look.
@click.command()
@click.option(
    "--jobs", type=_Limit(WholeNumber(1)), metavar="NUMBER|none", help="Jobs that may wait."
)
@click.option(
    "--bytes",
    type=_Limit(ByteCount()),
    metavar="BYTES|none",
    help="Memory that Redis may use, as in 2GB, before new jobs are refused.",
)
@json_option
@redis_option
def limits(as_json: bool, redis_url: str | None, **given: int | str | None) -> None:
    """Show how much may wait in the queue, for all producers together, or set it.

    \b
        mlx-rq limits --jobs 100000 --bytes 2GB
        mlx-rq limits --bytes none
    """
    connection = connect(redis_url)
    changes = {
        name: None if value == _NO_LIMIT else int(value)
        for name, value in given.items()
        if value is not None
    }
    with reachable(connection):
        set_limits(connection, changes)
        used = limits_in_use(connection)
    if as_json:
        print_json(used)
        return
    for line in limit_lines(used):
        click.echo(line)
    if all(of["limit"] is None for of in used.values()):
        click.echo("No limits: new jobs are taken for as long as Redis takes them.")


def limit_lines(used: Mapping[str, Mapping[str, int | None]]) -> Iterator[str]:
    """Says for each limit that is set how much of it is used."""
    if used["jobs"]["limit"] is not None:
        yield f"limit: {used['jobs']['waiting']:,} of {used['jobs']['limit']:,} jobs wait"
    if used["bytes"]["limit"] is not None:
        yield f"limit: Redis uses {used['bytes']['used']:,} of {used['bytes']['limit']:,} bytes"


@click.command()
@redis_option
def url(redis_url: str | None) -> None:
    """Print the URL of the queue, with its password: for rq, rq-dashboard and other programs.

    \b
        RQ_REDIS_URL=$(mlx-rq url) rq info
    """
    click.echo(resolve_url(redis_url))


COMMANDS = (limits, url)
