"""What the person who starts the server decides about it."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue.webhooks import Network

_HASHED = "sha256:"


class ApiKeys:
    """The API keys that the server takes, held as SHA-256 only. Without any it asks for none."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, key: str) -> str | None:
        """Names the owner of a key, in a way that does not tell the key; None for a wrong one."""
        presented = hashlib.sha256(key.encode()).digest()
        # All are compared, so that the time says nothing about which one came near.
        matches = [hmac.compare_digest(presented, digest) for digest in self._digests]
        return presented.hex()[:12] if any(matches) else None


def _digest(key: str) -> bytes:
    if not key.startswith(_HASHED):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise RequestError(
            f"A key that starts with {_HASHED} must go on with 64 hexadecimal digits.",
            code="invalid_value",
            param="api_key_file",
        )
    return digest


def read_keys(path: Path) -> ApiKeys:
    """Reads one key a line (or `sha256:` and its hash); blank lines and # comments do not count.

    Raises RequestError where the file cannot be read or holds no key.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"The API key file {str(path)!r} cannot be read: {error}.",
            code="invalid_value",
            param="api_key_file",
        ) from None
    keys = ApiKeys(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise RequestError(
            f"The API key file {str(path)!r} holds no key. Put one on a line of its own.",
            code="invalid_value",
            param="api_key_file",
        )
    return keys


@dataclass(frozen=True, slots=True)
class Settings:
    """How the server behaves.

    `requests_per_minute` is for each key, and so is `jobs_per_key`, the jobs that have not ended;
    `max_queued` jobs may wait for one model. With `queue_unserved`, the endpoints that do not wait
    take jobs for models that no live worker serves yet. `keep_on_disconnect` lets a job go on when
    the client that waits for it is gone. Webhooks are signed with all `webhook_secrets`, sent only
    where there are any, and only to public addresses and those of `webhook_networks`.
    """

    data_dir: Path
    redis_url: str | None = None
    keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_origins: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    jobs_per_key: int | None = None
    max_queued: int = 20_000
    queue_unserved: bool = False
    keep_on_disconnect: bool = False
    webhook_secrets: tuple[bytes, ...] = ()
    webhook_networks: tuple[Network, ...] = ()


def is_loopback(host: str) -> bool:
    """Tells whether only this machine can reach an address or name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_binding(host: str, keys: ApiKeys) -> None:
    """Raises RequestError where strangers could reach a server that asks for no key."""
    if not keys and not is_loopback(host):
        raise RequestError(
            f"Without API keys the server listens on loopback only, not on {host!r}. Give a file "
            "of keys with --api-key-file, or leave out --host.",
            code="invalid_value",
            param="host",
        )
