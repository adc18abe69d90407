"""Runs a command with its output in a file that is rotated, where the system does not do that."""

import logging
import signal
import subprocess
from collections.abc import Sequence
from contextlib import closing
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import FrameType

from mlx_rq.signals import handling

_MOST_BYTES = 10_000_000
_KEPT = 5


def run_logged(program: Sequence[str], log: Path, most_bytes: int = _MOST_BYTES) -> int:
    """Runs a program until it ends; returns its exit code. SIGTERM and SIGINT are handed on."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = RotatingFileHandler(
        log, maxBytes=most_bytes, backupCount=_KEPT, encoding="utf-8", errors="replace"
    )
    process: subprocess.Popen[bytes] | None = None
    told = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        if process is not None:
            process.terminate()

    # Before the program starts: a signal that came in between would end this process alone.
    with closing(handler), handling(hand_on, signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if told:
            process.terminate()
        assert process.stdout is not None
        for line in process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            handler.emit(logging.makeLogRecord({"msg": text}))
        return process.wait()
