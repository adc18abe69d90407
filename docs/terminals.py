"""Takes the pictures of terminals that the pages show: `make pictures`.

Runs `mlx-rq up` with the demo's model in a folder of its own, gives it a batch, and writes what the
commands print on a terminal of 80 columns to docs/images/*.svg.
"""

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from redis import Redis
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType
from rich.text import Text

from mlx_rq.jobs.queue.connection import connect
from mlx_rq.jobs.queue.discovery import embedded_url
from mlx_rq.jobs.queue.status import status
from mlx_rq.worker.cli.top_screen import Screen

IMAGES = Path(__file__).parent / "images"
COMMAND = [sys.executable, "-P", "-m", "mlx_rq.worker"]
COLUMNS = 80
MODEL = "smollm2"
# rich has readers fetch its letters from the internet; their own will do.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)

DOCUMENTS = {
    "tea": "Green tea is dried soon after it is picked; black tea is left to wither first. ",
    "bees": "Bees dance to tell the others how far away flowers are, and in which direction. ",
    "tides": "The moon pulls at the sea, so that the water rises and falls twice a day. ",
}
QUESTIONS = ("What is it about?", "Say it in three words.", "Is that so?", "Why?", "Since when?")
MANNERS = (
    "",
    " Answer for a child.",
    " Answer in one sentence, without numbers.",
    " Make it rhyme.",
)


def batch_lines() -> list[dict[str, Any]]:
    bodies = [
        {
            "model": MODEL,
            "messages": [
                {"role": "system", "content": f"Answer about {name}. {text * 4}"},
                {"role": "user", "content": question + manner},
            ],
            "max_completion_tokens": 200,
        }
        for name, text in DOCUMENTS.items()
        for question in QUESTIONS
        for manner in MANNERS
    ]
    # One that is refused, for the list of failures.
    bodies.append({**bodies[0], "messages": [{"role": "user", "content": "word " * 9000}]})
    return [
        {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n, body in enumerate(bodies)
    ]


def picture(name: str, title: str, content: RenderableType, height: int | None = None) -> None:
    """Draws what a terminal shows."""
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=COLUMNS, height=height, record=True, file=nowhere)
        console.print(content)
    svg = console.export_svg(title=title, code_format=FORMAT, unique_id=name)
    (IMAGES / f"{name}.svg").write_text(svg)


def shot(name: str, folder: Path, *arguments: str) -> None:
    """Runs a command in a terminal, and draws what it prints."""
    ours, its = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=environment, stdout=its, stderr=its, stdin=its
    ):
        os.close(its)
        said = b""
        while piece := _read(ours):
            said += piece
    os.close(ours)
    text = Text.from_ansi(said.decode().replace("\r\n", "\n").rstrip())
    picture(name, " ".join(("mlx-rq", *arguments)), text)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # its other side is closed
        return b""


def until(connection: Redis, happened: Callable[[Any], Any]) -> Any:
    """Waits until something can be seen in the status; gives it."""
    deadline = time.monotonic() + 600
    while not (found := happened(status(connection))):
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.5)
    return found


def running_jobs(state: Any) -> list[str]:
    return [row["id"] for worker in state["workers"] for row in worker["rows"]]


def take_all(folder: Path, connection: Redis) -> None:
    """Gives work and draws what each command tells of it."""
    requests = folder / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in batch_lines()))
    command = [*COMMAND, "batch", requests.name, "-o", "answers.jsonl"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL) as batch:
        until(connection, lambda state: sum(q["completed"] for q in state["queues"]) >= 8)
        shot("terminal-dry-run", folder, "batch", requests.name, "-o", "more.jsonl", "--dry-run")
        screen = Screen()
        for _ in range(24):  # so many seconds of its charts
            screen.take(status(connection))
            time.sleep(1)
        with Path(os.devnull).open("w") as nowhere:
            console = Console(width=COLUMNS, height=24, file=nowhere, force_terminal=True)
            picture("terminal-top", "mlx-rq top", screen.draw(console), height=24)
        shot("terminal-status", folder, "status")
        (job, *_) = until(connection, running_jobs)
        until(connection, lambda state: job not in running_jobs(state))
        shot("terminal-trace", folder, "trace", job)
        batch.terminate()


def main() -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"MLX_RQ_DATA_DIR": name, "MLX_RQ_CONFIG": "", "PYTHONUNBUFFERED": "1"}
        os.environ.pop("MLX_RQ_REDIS_URL", None)
        up = [*COMMAND, "up", "--model", MODEL, "--batch", "8", "--no-http", "--grace", "0"]
        with subprocess.Popen(up, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if "serves" in line:
                    break
            try:
                with connect(embedded_url(folder)) as connection:
                    take_all(folder, connection)
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
