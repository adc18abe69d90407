"""What a worker measures of a job's way."""

import json
import time
from datetime import UTC, datetime

import pytest

from mlx_rq.engine.interface import Outcome, Steps
from mlx_rq.jobs.queue.finish import Lease
from mlx_rq.worker.leases.claim import ClaimedJob
from mlx_rq.worker.results.commit import measured


@pytest.mark.parametrize("step", [0, 3600, -3600])
def test_a_step_of_the_wall_clock_changes_no_duration(
    monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    claimed = datetime(2026, 1, 1, tzinfo=UTC)
    lease = Lease("execution", "worker", claimed)
    job = ClaimedJob("a", "mlx-rq:m:default", 1, None, 60, None, 1, 3, lease, claimed_at=100.0)
    monkeypatch.setattr(time, "time", lambda: claimed.timestamp() + 10 + step)
    monkeypatch.setattr(time, "monotonic", lambda: 110.0)

    text = measured(job, Outcome("a", {}, Steps(9.5, 8.0, 6.0)))

    assert text is not None
    assert json.loads(text)[:5] == [claimed.timestamp(), 0.5, 2.0, 4.0, 10.0]
