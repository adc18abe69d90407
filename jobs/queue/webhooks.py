"""Webhooks: who is to be told of a job's end, when, and how it is signed.

The URL is in the job's own record. `finish.lua` puts a job that has one into the list of deliveries
in the same step that ends it, so none is lost; there it stays until its receiver has taken it or it
is given up. An HTTP server takes what is due for a while (`claim_due`): if it dies, another one, or
its successor, delivers. So a receiver may be told twice, under the same `webhook-id`.

Source: Standard Webhooks 1.0 (headers, signature, secrets), which OpenAI's client verifies.
"""

import base64
import binascii
import hashlib
import hmac
import ipaddress
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from redis import Redis
from rq.job import Job as RQJob

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.payload import read_meta
from mlx_rq.jobs.queue.scripts import tolerant_script

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

CLAIM_SECONDS = 60
"""How long an HTTP server has for a delivery before another may take it."""

DELIVERS_SECONDS = 30
"""How long it is believed of an HTTP server that it delivers."""

_TRIES_KEPT = 48 * 3600
"""Seconds after which counts of tries that nobody adds to are forgotten."""

DELAYS = (5, 60, 300, 1800, 7200, 18_000, 36_000)
"""Seconds after each try that failed; after the last one the delivery is given up."""

_JITTER = 0.2
_LONGEST_URL = 2048
_SHORTEST_SECRET = 24
_URL_CHARACTERS = re.compile(r"[!-~]+")
_ENCODED = "whsec_"


class Delivery(NamedTuple):
    """What a receiver is to be told of now, and how often that has been tried, this time too."""

    name: str
    """The id of a job, or the name of an event (`webhook_events.py`)."""

    tries: int


def check_url(url: str) -> None:
    """Raises RequestError where a URL is none that a webhook can be sent to."""
    if len(url) > _LONGEST_URL or not _URL_CHARACTERS.fullmatch(url):
        raise _invalid(url, f"a URL of at most {_LONGEST_URL} printable ASCII characters")
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not close
        good = False
    if not good:
        raise _invalid(url, "an http or https URL, as in https://example.org/hook")
    if parts.username is not None or parts.fragment:
        raise _invalid(url, "a URL without a user name, a password or a fragment")


def _invalid(url: str, expected: str) -> RequestError:
    return RequestError(
        f"Invalid 'webhook': expected {expected}, but got {url[:80]!r} instead.",
        code="invalid_value",
        param="webhook",
    )


def is_allowed(address: str, networks: Sequence[Network] = ()) -> bool:
    """Tells whether a webhook may be sent to an IP address: a public one, or of these networks."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address):
        # Addresses that hold an IPv4 address lead to that one.
        inner = ip.ipv4_mapped or ip.sixtofour or _embedded(ip)
        if inner is not None:
            return is_allowed(str(inner), networks)
    if any(ip in network for network in networks):
        return True
    special = ip.is_multicast or ip.is_reserved or ip in _TRANSLATED_HERE
    return ip.is_global and not special and not getattr(ip, "is_site_local", False)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_COMPATIBLE = ipaddress.IPv6Network("::/96")
_TRANSLATED_HERE = ipaddress.IPv6Network("64:ff9b:1::/48")
"""NAT64 of a network's own (RFC 8215): where it leads, only that network knows."""


def _embedded(ip: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address in the last bits, where an address is of a kind that has one."""
    holds = ip in _NAT64 or (ip in _COMPATIBLE and int(ip) > 1)
    return ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF) if holds else None


def read_networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Reads networks as in 10.0.0.0/8; raises RequestError for one that is none."""
    try:
        return tuple(ipaddress.ip_network(text) for text in texts)
    except ValueError as error:
        raise RequestError(
            f"Invalid 'webhook_allow': {error}. Write a network as in 10.0.0.0/8 or fd00::/8.",
            code="invalid_value",
            param="webhook_allow",
        ) from None


def read_secrets(path: Path) -> tuple[bytes, ...]:
    """Reads one secret a line, the newest first: deliveries are signed with all of them.

    Raises RequestError where the file cannot be read, holds none, or one that is too short.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid_file(path, f"cannot be read: {error}") from None
    secrets = tuple(_secret(path, line) for line in lines if line and not line.startswith("#"))
    if not secrets:
        raise _invalid_file(path, "holds no secret. Put one on a line of its own")
    return secrets


def _secret(path: Path, line: str) -> bytes:
    try:
        encoded = line.startswith(_ENCODED)
        secret = (
            base64.b64decode(line.removeprefix(_ENCODED), validate=True)
            if encoded
            else line.encode()
        )
    except binascii.Error:
        raise _invalid_file(path, f"has a secret that is not base64 after {_ENCODED}") from None
    if len(secret) < _SHORTEST_SECRET:
        raise _invalid_file(path, f"has a secret of less than {_SHORTEST_SECRET} bytes")
    return secret


def _invalid_file(path: Path, fault: str) -> RequestError:
    return RequestError(
        f"The webhook secret file {str(path)!r} {fault}.",
        code="invalid_value",
        param="webhook_secret_file",
    )


def signed_headers(
    secrets: Sequence[bytes], message_id: str, timestamp: int, body: bytes
) -> dict[str, str]:
    """Gives the headers by which a receiver knows who sent a body, and when."""
    content = f"{message_id}.{timestamp}.".encode() + body
    signatures = [
        base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode()
        for secret in secrets
    ]
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def claim_due(connection: Redis, limit: int) -> list[Delivery]:
    """Takes up to `limit` deliveries that are due; each is due again after CLAIM_SECONDS."""
    script = connection.register_script(tolerant_script(__package__, "webhooks.lua"))
    taken = script(
        keys=[keys.WEBHOOKS, keys.WEBHOOK_TRIES], args=[limit, CLAIM_SECONDS, _TRIES_KEPT]
    )
    return [Delivery(name.decode(), tries) for name, tries in taken]


def say_delivers(connection: Redis) -> None:
    """Says that an HTTP server delivers, for DELIVERS_SECONDS."""
    connection.set(keys.WEBHOOK_SERVER, "1", ex=DELIVERS_SECONDS)


def anybody_delivers(connection: Redis) -> bool:
    """Tells whether an HTTP server delivers webhooks now."""
    return bool(connection.exists(keys.WEBHOOK_SERVER))


def url_of(connection: Redis, job_id: str) -> str | None:
    """Gives the URL that is to be told of a job's end; None where there is none (any more)."""
    meta = reading.ask(connection.hget, RQJob.key_for(job_id), "meta")
    url = read_meta(meta).get("webhook")
    try:
        check_url(url if isinstance(url, str) else "")
    except RequestError:
        return None
    return str(url)


def settle(connection: Redis, name: str) -> None:
    """Takes a delivery off the list: it has arrived, or nothing more is to be done."""
    with connection.pipeline() as pipe:
        pipe.zrem(keys.WEBHOOKS, name)
        pipe.hdel(keys.WEBHOOK_TRIES, name)
        pipe.delete(keys.webhook_event(name))
        reading.ask_all(pipe)


def postpone(connection: Redis, delivery: Delivery) -> float | None:
    """Has a delivery that failed tried again; returns in how many seconds, None if never."""
    if delivery.tries > len(DELAYS):
        settle(connection, delivery.name)
        return None
    delay = DELAYS[max(0, delivery.tries - 1)] * random.uniform(1, 1 + _JITTER)
    due = redis_time(connection) + delay
    reading.ask(connection.zadd, keys.WEBHOOKS, {delivery.name: due}, xx=True)
    return delay
