"""A short run of `bench/chaos.py`: everything is broken, and each job is looked up by its id."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"
FAULTS = ("undone", "overwritten", "false dead letters", "wrong answers", "no end")


@pytest.mark.slow
def test_whatever_is_broken_every_job_has_one_end_and_its_own_answer(tmp_path: Path) -> None:
    command = [sys.executable, str(CHAOS), "--jobs=200", "--seconds=10", "--seed=1", "--json"]
    # Failovers take seconds in which nothing is computed; they have tests of their own.
    command += ["--parts", "killing", "eviction", f"--logs={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    told = json.loads(done.stdout)
    assert told["faults"] == []
    became = told["became"]
    assert [became[fault] for fault in (*FAULTS, "lost and not told")] == [0] * 6
    assert sum(became.values()) == told["jobs"] == 175
    assert became["lost and told"] > 0
    figures = told["figures"]
    assert (figures["left_in_lists"], figures["attempts_lost_unbegun"]) == (0, 0)
    assert figures["workers_started"] > 5
    assert done.returncode == 0, done.stderr
