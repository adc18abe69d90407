"""One POST to a URL that somebody else named: only to an address that was looked at, no further.

The name is resolved once, and the connection goes to the address that was checked: a name that
resolves to something else a moment later gains nothing. Redirects are an answer like any other. Of
the answer only its status is read, within a limited time.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from socket import SOCK_STREAM
from urllib.parse import urlsplit

from mlx_rq.jobs.queue.webhooks import Network, is_allowed

TIMEOUT_SECONDS = 20.0
"""For all of it: the name, the connection, the request, the status."""

_LONGEST_HEAD = 64 * 1024


class PostFailed(Exception):
    """Nothing was delivered; says why."""


async def post(
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    networks: Sequence[Network] = (),
    timeout: float = TIMEOUT_SECONDS,
) -> int:
    """Sends a body and returns the status of the answer.

    `networks` may be sent to though they are not public. Raises PostFailed where the name leads to
    another address that is not, nobody answers in time, or the answer is no HTTP.
    """
    try:
        async with asyncio.timeout(timeout):
            return await _post(url, headers, body, networks)
    except TimeoutError:
        raise PostFailed(f"no answer within {timeout:.0f} s") from None
    except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
        raise PostFailed(f"{type(error).__name__}: {error}") from error


async def _post(
    url: str, headers: Mapping[str, str], body: bytes, networks: Sequence[Network]
) -> int:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    host, port = parts.hostname or "", parts.port or (443 if secure else 80)
    address = await _address(host, port, networks)
    reader, writer = await asyncio.open_connection(
        address,
        port,
        ssl=ssl.create_default_context() if secure else None,
        server_hostname=host if secure else None,
        limit=_LONGEST_HEAD,
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        fields = {"host": parts.netloc, **headers, "content-length": str(len(body))}
        lines = [f"POST {target} HTTP/1.1", *(f"{name}: {text}" for name, text in fields.items())]
        writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode("ascii") + body)
        await writer.drain()
        return await _status(reader)
    finally:
        writer.close()


async def _address(host: str, port: int, networks: Sequence[Network]) -> str:
    """Resolves a name; raises PostFailed where any of its addresses may not be sent to."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not is_allowed(address, networks):
            raise PostFailed(f"{ip_address(address)} is no public address, and not allowed")
    return addresses[0]


async def _status(reader: asyncio.StreamReader) -> int:
    """Reads the status of the answer, past those that only say that one will come (1xx)."""
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        version, _, rest = head.partition(b" ")
        status = int(rest[:3])
        if not version.startswith(b"HTTP/1.") or not 100 <= status <= 599:
            raise ValueError("the answer is no HTTP")
        if status >= 200:
            return status
