"""A short run of `bench/chaos.py`: everything is killed, and each job is reconciled by its id."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"


@pytest.mark.slow
def test_whatever_is_killed_every_job_has_one_end_and_its_own_answer() -> None:
    command = [sys.executable, str(CHAOS), "--jobs=150", "--seconds=12", "--seed=1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    figures = json.loads(done.stdout)
    assert figures["wrong"] == []
    assert figures["left_in_lists"] == 0
    ends = [figures.get(status, 0) for status in ("completed", "failed", "cancelled")]
    assert sum(ends) == figures["submitted"] == 150
    assert figures["workers_started"] > 5
    assert figures["of_which_never_begun"] == 0
    assert done.returncode == 0
