"""The same prompts by mlx-lm's own ways: `batch_generate`, and its server with all at once."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from mlx_rq.engine.models.load import LoadedModel, ModelError

BATCH_GENERATE = "mlx_lm.batch_generate"
SERVER = "mlx_lm.server, all at once"

_PREFILL_BATCH = 8
"""As `batch_generate` has it."""

_POLL_SECONDS = 0.5
_LONGEST_SECONDS = 3600


class Prompt(NamedTuple):
    """Token ids, or a text, and the most tokens that it is answered with."""

    prompt: list[int] | str
    max_tokens: int


def run_batch_generate(
    model: LoadedModel, prompts: Sequence[Prompt], *, rows: int
) -> tuple[float, list[str]]:
    """Generates with `mlx_lm.batch_generate`, so many at once; gives the seconds and the texts."""
    from mlx_lm import batch_generate

    tokens = [
        list(model.tokenizer.encode(one.prompt)) if isinstance(one.prompt, str) else one.prompt
        for one in prompts
    ]
    started = time.perf_counter()
    response = batch_generate(
        model.model,
        model.tokenizer,
        tokens,
        max_tokens=[one.max_tokens for one in prompts],
        completion_batch_size=rows,
        prefill_batch_size=_PREFILL_BATCH,
    )
    return time.perf_counter() - started, list(response.texts)


def run_server(folder: Path, prompts: Sequence[Prompt], *, rows: int) -> float:
    """Asks `mlx_lm.server` for all prompts, which are texts, at once; gives the seconds.

    Raises ModelError where it ends instead.
    """
    with _server(folder, rows) as url:
        started = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda one: _ask(url, one), prompts))
        return time.perf_counter() - started


@contextmanager
def _server(folder: Path, rows: int) -> Iterator[str]:
    """Starts the server, and gives the URL of its completions once it has the model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options: dict[str, Any] = {
        "--model": folder,
        "--port": port,
        "--log-level": "ERROR",
        "--decode-concurrency": rows,
    }
    command = [sys.executable, "-m", "mlx_lm", "server"]
    command += [str(word) for pair in options.items() for word in pair]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}/v1/completions"
    try:
        while True:
            try:
                _ask(url, Prompt("Hi", 1))  # loads the model
                break
            except (urllib.error.URLError, ConnectionError):
                if server.poll() is not None:
                    raise ModelError(f"mlx_lm.server ended with {server.returncode}") from None
                time.sleep(_POLL_SECONDS)
        yield url
    finally:
        server.kill()
        server.wait()


def _ask(url: str, prompt: Prompt) -> None:
    body = {"prompt": prompt.prompt, "max_tokens": prompt.max_tokens, "temperature": 0}
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    while True:
        try:
            urllib.request.urlopen(request, timeout=_LONGEST_SECONDS).read()
            return
        except ConnectionResetError:
            time.sleep(_POLL_SECONDS / 5)  # its backlog is short: it resets part of a burst
