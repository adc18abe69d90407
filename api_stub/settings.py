"""What the person who starts the server decides about it."""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue.owners import is_name
from mlx_rq.jobs.queue.webhooks import Network

_HASHED = "sha256:"

ANYONE = "anyone"
"""Who is limited where no keys are asked for."""


class ApiKeys:
    """The API keys that the server takes, held as SHA-256 only. Without any it asks for none."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self._clients: dict[bytes, str] = {}
        for line in lines:
            client, digest = _read_line(line)
            if self._clients.setdefault(digest, client) != client:
                raise _invalid_line(f"The key of {client!r} is another client's already.")

    def __bool__(self) -> bool:
        return bool(self._clients)

    def client(self, key: str) -> str | None:
        """Names the client that a key lets in, which does not tell the key; None for a wrong one.

        A client without a name of its own goes by the first digits of its key's hash.
        """
        presented = hashlib.sha256(key.encode()).digest()
        # All are compared, so that the time says nothing about which one came near.
        matches = [
            client
            for digest, client in self._clients.items()
            if hmac.compare_digest(presented, digest)
        ]
        return matches[0] if matches else None


def _read_line(line: str) -> tuple[str, bytes]:
    """Reads `KEY` or `NAME: KEY`; returns the client's name and the key's hash."""
    name, named, key = line.partition(": ")
    if not named:
        digest = _digest(line)
        return digest.hex()[:12], digest
    if not is_name(name) or name == ANYONE or not key.strip():
        raise _invalid_line(
            "A line with a colon and a space is NAME: KEY. A name has at most 64 letters, digits, "
            f"'.', '_' and '-', and is not {ANYONE!r}."
        )
    return name, _digest(key.strip())


def _invalid_line(why: str) -> RequestError:
    return RequestError(why, code="invalid_value", param="api_key_file")


def _digest(key: str) -> bytes:
    if not key.startswith(_HASHED):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise _invalid_line(
            f"A key that starts with {_HASHED} must go on with 64 hexadecimal digits."
        )
    return digest


def read_keys(path: Path) -> ApiKeys:
    """Reads one key a line (or `sha256:` and its hash), with its client's name before it or not.

    Blank lines and # comments do not count; keys of one name let in one client (`owners.py`).
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
    `max_queued` jobs may wait for one model. The endpoints that do not wait take jobs for models
    that workers have served before, for `models`, and with `queue_unserved` for any.
    `keep_on_disconnect` lets a job go on when the client that waits for it is gone. `show_content`
    has the page show prompts and answers. Webhooks are signed with all `webhook_secrets`, sent only
    where there are any, and only to public addresses and those of `webhook_networks`.
    """

    data_dir: Path
    redis_url: str | None = None
    keys: ApiKeys = field(default_factory=ApiKeys)
    allowed_origins: tuple[str, ...] = ()
    requests_per_minute: int | None = None
    jobs_per_key: int | None = None
    max_queued: int = 20_000
    models: tuple[str, ...] = ()
    queue_unserved: bool = False
    keep_on_disconnect: bool = False
    show_content: bool = False
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
