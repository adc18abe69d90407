"""Passwords on command lines, and ids that nobody guesses."""

import re
import subprocess
from functools import reduce
from operator import and_, or_
from pathlib import Path

from fakes import free_port
from redis import Redis

from mlx_rq import submit_many
from mlx_rq.worker.cli import main as cli
from mlx_rq.worker.cli.processes import child_process

PASSWORD = "s3cret-w0rd"


def test_children_get_the_url_where_nobody_else_sees_it(tmp_path: Path) -> None:
    url = f"redis://:{PASSWORD}@127.0.0.1:{free_port()}/0"
    options = {"port": free_port(), "data_dir": tmp_path}
    assert "serve" in cli.main.commands
    with child_process("serve", url, options, log_level="error") as child:
        line = subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", str(child.pid)], capture_output=True, text=True
        ).stdout
    assert " serve " in line
    assert PASSWORD not in line


def test_ids_are_128_random_bits(redis_url: str, connection: Redis) -> None:
    ids = [job.id for job in submit_many([{"prompt": "x"}] * 300)]
    assert all(re.fullmatch("[0-9a-f]{32}", job_id) for job_id in ids)
    assert len(set(ids)) == 300
    # Every bit is 0 in some and 1 in others; of 300, a random one is so all but 2 in 10^90 times.
    numbers = [int(job_id, 16) for job_id in ids]
    assert reduce(or_, numbers) == 2**128 - 1
    assert reduce(and_, numbers) == 0
