"""Who listens on the ports that a queue and an HTTP server take by themselves."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from mlx_rq.jobs.queue.discovery import HTTP_FOLDER, embedded_url, is_running
from mlx_rq.worker.cli.doctor.finding import Finding
from mlx_rq.worker.cli.ports import DEFAULT_HTTP_PORT, is_answered
from mlx_rq.worker.cli.valkey import DEFAULT_PORT

_ANSWER_SECONDS = 2.0
_MOST_BYTES = 10_000


def port_findings(data: Path) -> Iterator[Finding]:
    """Says of each port whether it is free, or whose it is."""
    for port, option in ((DEFAULT_HTTP_PORT, "--port"), (DEFAULT_PORT, "--queue-port")):
        yield port_finding(port, option, data)


def port_finding(port: int, option: str, data: Path) -> Finding:
    """Says whether a port is free, or whose it is: of the user's own data folder, perhaps."""
    another = f"mlx-rq up {option} ANOTHER"
    if not is_answered(port):
        return Finding("port", "ok", f"{port} is free")
    if (embedded_url(data) or "").endswith(f":{port}/0"):
        return Finding("port", "ok", f"{port} is the embedded queue's")
    if not _is_http_server(port):
        return Finding("port", "ok", f"{port} is taken", f"Where it is not mlx-rq's: {another}")
    if is_running(data / HTTP_FOLDER):
        return Finding("port", "ok", f"{port} is your HTTP server's, which runs")
    text = f"{port} is the HTTP server's of another mlx-rq"
    return Finding("port", "ok", text, f"To start one beside it: {another}")


def _is_http_server(port: int) -> bool:
    """Tells whether an HTTP server of mlx-rq answers on a port of loopback."""
    straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = b""
    try:
        with straight.open(f"http://127.0.0.1:{port}/health", timeout=_ANSWER_SECONDS) as answer:
            body = answer.read(_MOST_BYTES)
    except urllib.error.HTTPError as refusal:  # it runs, and has no Redis
        with refusal, suppress(OSError, HTTPException):
            body = refusal.read(_MOST_BYTES)
    except (OSError, HTTPException):
        return False
    try:
        said = json.loads(body)
    except ValueError:
        return False
    return isinstance(said, dict) and {"status", "redis"} <= said.keys()
