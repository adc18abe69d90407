"""The commands `backup` and `restore`: the embedded queue in one file, a snapshot of Valkey's."""

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import click
from redis import Redis

from mlx_rq.files import put_in_place, replacing, sync_path
from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue.backlog import our_queues, waiting_in
from mlx_rq.jobs.queue.connection import reachable
from mlx_rq.jobs.queue.discovery import FOLDER, embedded_url
from mlx_rq.worker.cli.common import data_folder, option
from mlx_rq.worker.cli.valkey import embedded_valkey, nobody_else
from mlx_rq.worker.cli.worker_options import data_dir_option

_SNAPSHOT = "dump.rdb"
_LOG = "appendonlydir"
_BASE, _INCREMENT = "appendonly.aof.1.base.rdb", "appendonly.aof.1.incr.aof"
_MANIFEST = f"file {_BASE} seq 1 type b\nfile {_INCREMENT} seq 1 type i\n"

_SNAPSHOT_STARTS = (b"VALKEY", b"REDIS")

_LOOK_SECONDS = 0.05


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@data_dir_option("Where the queue's data lasts.")
def backup(file: Path, data_dir: Path | None) -> None:
    """Write the embedded queue into FILE, while it runs.

    That is all that it holds at this moment; it need not run. Only you can read FILE: prompts and
    answers are in it. Files and batches of the HTTP server lie beside the queue, in the data
    folder, and are not.
    """
    if not file.parent.is_dir():
        raise click.UsageError(f"there is no folder {file.parent}")
    if file.exists() and file.stat().st_size and not _is_snapshot(file):
        raise click.UsageError(f"{file} is there already, and is no backup: choose another name")
    folder = data_folder(data_dir) / FOLDER
    with _running(folder) as url, Redis.from_url(url) as connection, reachable(connection):
        _snapshot(connection)
        waiting = _waiting(connection)
        snapshot = folder / _SNAPSHOT
        try:
            with snapshot.open("rb") as source, replacing(file, mode=0o600) as target:
                shutil.copyfileobj(source, target)
        finally:
            snapshot.unlink(missing_ok=True)
    click.echo(f"{file}: {file.stat().st_size:,} bytes; {waiting}")


@contextmanager
def _running(folder: Path) -> Iterator[str]:
    """Gives the URL of the queue, which is started for the block where it does not run."""
    if (url := embedded_url(folder.parent)) is not None:
        yield url
        return
    if not (folder / _LOG).is_dir():
        raise RedisUnavailable(
            f"There is no embedded queue in {folder.parent}: give the --data-dir of `mlx-rq up`. "
            "A Redis of your own is saved by its own means (redis-cli --rdb FILE)."
        )
    with embedded_valkey(folder, port=None) as url:
        yield url


def _snapshot(connection: Redis) -> None:
    """Has the server write its snapshot; raises RedisUnavailable where it cannot."""
    before = connection.info("persistence")["rdb_saves"]
    connection.bgsave()
    while (told := connection.info("persistence"))["rdb_bgsave_in_progress"]:
        time.sleep(_LOOK_SECONDS)
    if told["rdb_saves"] == before or told["rdb_last_bgsave_status"] != "ok":
        raise RedisUnavailable("The queue could not be saved: the disk may be full.")


def _waiting(connection: Redis) -> str:
    waiting = sum(waiting_in(connection, our_queues(connection)))
    return counted(waiting, "job waits", "jobs wait")


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@data_dir_option("Where the queue's data lasts.")
@option("--yes", envvar=None, is_flag=True, help="Do not ask.")
def restore(file: Path, data_dir: Path | None, yes: bool) -> None:
    """Bring back what `backup` wrote.

    It takes the place of the embedded queue, which must not run. What the queue held is kept
    beside it. Jobs that ran at the time of the backup wait again once a worker lives.
    """
    folder = data_folder(data_dir) / FOLDER
    if embedded_url(folder.parent) is not None:
        raise click.ClickException(f"The queue runs on {folder}: end `mlx-rq up` first.")
    if not _is_snapshot(file):  # Valkey would take an empty one for a queue without jobs
        raise click.ClickException(f"{file} is no backup that Valkey can read.")
    folder.mkdir(mode=0o700, exist_ok=True)
    with nobody_else(folder), tempfile.TemporaryDirectory(prefix="restore-", dir=folder) as made:
        waiting = _build(Path(made), file)
        present = folder / _LOG
        if present.exists():
            kept = folder / f"{_LOG}.{datetime.now():%Y-%m-%d-%H%M%S}"
            if not yes:
                question = f"Replace what is in {present}? It is kept as {kept.name}."
                if not click.confirm(question, err=True):
                    click.echo("Nothing was changed.", err=True)
                    sys.exit(1)
            put_in_place(present, kept)
        put_in_place(Path(made) / _LOG, present)
    click.echo(f"{file} is restored: {waiting}. `mlx-rq up` goes on.")


def _is_snapshot(file: Path) -> bool:
    """Tells whether a file begins as a snapshot of Valkey or Redis does."""
    with file.open("rb") as opened:
        return opened.read(len(max(_SNAPSHOT_STARTS, key=len))).startswith(_SNAPSHOT_STARTS)


def _build(folder: Path, file: Path) -> str:
    """Makes an append-only file of a snapshot, has a server read it, and says what waits."""
    log = folder / _LOG
    log.mkdir(mode=0o700)
    shutil.copyfile(file, log / _BASE)
    (log / _INCREMENT).touch()
    (log / "appendonly.aof.manifest").write_text(_MANIFEST)
    try:
        with embedded_valkey(folder, port=None) as url, Redis.from_url(url) as connection:
            waiting = _waiting(connection)
    except RedisUnavailable as error:
        raise click.ClickException(f"{file} is no backup that Valkey can read: {error}") from None
    for path in log.iterdir():
        sync_path(path)
    return waiting


COMMANDS = (backup, restore)
