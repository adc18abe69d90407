"""Which ports of this machine are free to listen on, and the option that names one."""

import socket
from collections.abc import Callable
from contextlib import suppress

from mlx_rq.worker.cli.common import Command, option
from mlx_rq.worker.cli.value_types import WholeNumber

DEFAULT_HTTP_PORT = 8000

OLD_NAMES = {"token_normalize_func": lambda name: {"http-port": "port"}.get(name, name)}
"""Settings of a command that takes the HTTP port under its old name, too, which no help shows."""

_ANSWER_SECONDS = 1.0

_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}
"""Addresses to listen on that nobody can connect to, and one of those that they stand for."""


def is_free(port: int) -> bool:
    """Tells whether a port of loopback can be listened on, and nobody listens there already."""
    return not is_answered(port) and _can_bind(port)


def is_answered(port: int, host: str = "127.0.0.1") -> bool:
    """Tells whether somebody listens on a port.

    It may be free to bind all the same: macOS lets 127.0.0.1 be listened on beside a container's
    0.0.0.0, for example, whose clients would then come to us.
    """
    address = (_EVERYWHERE.get(host, host), port)
    with suppress(OSError), socket.create_connection(address, _ANSWER_SECONDS) as connection:
        # A port that the system gave to this very connection answers itself.
        return bool(connection.getsockname() != connection.getpeername())
    return False


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def http_port_option(least: int) -> Callable[[Command], Command]:
    """Declares `--port`, of the HTTP server."""
    return option(
        "--port",
        type=WholeNumber(least, 65535),
        default=DEFAULT_HTTP_PORT,
        envvar=["MLX_RQ_PORT", "MLX_RQ_HTTP_PORT"],
        help="The port of the HTTP server.",
    )
