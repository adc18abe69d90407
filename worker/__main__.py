"""The command `mlx-rq`, also as `python -m mlx_rq.worker`."""

import io
import os
import signal
import sys
from types import FrameType


def run() -> None:
    """Runs the command line. Ctrl-C ends it without a word until it has something to say."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # as for stderr: what a terminal lacks is no end
        sys.stdout.reconfigure(errors="backslashreplace")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from mlx_rq.worker.cli.main import main

    main(prog_name="mlx-rq")


def _end(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)  # as shells have it; whoever is imported could catch an exception


if __name__ == "__main__":
    run()
