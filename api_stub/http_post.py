"""One POST to a URL that somebody else named: only to an address that was looked at, no further.

The name is resolved once, and the connection goes to the address that was checked: a name that
resolves to something else a moment later gains nothing. Redirects are an answer like any other, and
no proxy is asked, which would resolve the name again. Of the answer only its head is read, within a
limited time.
"""

import asyncio
import ssl
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from socket import SOCK_STREAM
from urllib.parse import urlsplit

import httpx2

from mlx_rq.jobs.queue.local_network import permission_hint
from mlx_rq.jobs.queue.webhooks import Network, is_allowed

TIMEOUT_SECONDS = 20.0
"""For all of it: the name, the connection, the request, the status."""


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
    except (OSError, ValueError, httpx2.HTTPError, httpx2.InvalidURL) as error:
        cause = _first_cause(error)
        raise PostFailed(f"{type(cause).__name__}: {cause}{permission_hint(cause)}") from error


async def _post(
    url: str, headers: Mapping[str, str], body: bytes, networks: Sequence[Network]
) -> int:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    address = await _address(host, port, networks)
    request = httpx2.Request(
        "POST",
        httpx2.URL(url).copy_with(host=address),
        headers={"host": parts.netloc, "connection": "close", **headers},
        content=body,
        extensions={"sni_hostname": host},  # the name that the certificate must be for
    )
    # Not a client: that would log the whole URL, which may hold a secret of the receiver's.
    context = ssl.create_default_context() if parts.scheme == "https" else False
    async with httpx2.AsyncHTTPTransport(verify=context, trust_env=False) as transport:
        answer = await transport.handle_async_request(request)
        await answer.aclose()
        return answer.status_code


async def _address(host: str, port: int, networks: Sequence[Network]) -> str:
    """Resolves a name; raises PostFailed where any of its addresses may not be sent to."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        if not is_allowed(address, networks):
            raise PostFailed(f"{ip_address(address)} is no public address, and not allowed")
    return addresses[0]


def _first_cause(error: BaseException) -> BaseException:
    """Finds what lies under the errors of the client's layers, which say less and less."""
    while (under := error.__cause__ or error.__context__) is not None:
        error = under
    return error
