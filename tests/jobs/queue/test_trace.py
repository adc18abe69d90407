"""What is remembered of a job's way."""

import json
import math
import shutil
import time
import webbrowser
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from fakes import PATIENCE, FakeEngine, StartWorker, failure
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import submit
from mlx_rq.engine.interface import Steps
from mlx_rq.jobs.client.job import as_completed
from mlx_rq.jobs.client.job_detail import job_detail
from mlx_rq.jobs.openai.errors import JobFailed
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.chrome_trace import chrome_trace
from mlx_rq.jobs.queue.trace import Measured, note_fetched, trace
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.leases import claim

HI = [{"role": "user", "content": "Say hi."}]


def test_an_answered_job_tells_each_step_with_its_time(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    engine.took = Steps(0.003, 0.002, 0.001, preempted=2, failed=1, first_with="0123456789abcdef")
    start_worker(engine, name="mac-1")
    job = submit(messages=HI)
    engine.wait_for_tasks(1)
    assert [event.name for event in trace(connection, job.id)] == ["queued", "claimed"]
    engine.release()
    job.result(PATIENCE)

    events = trace(connection, job.id)
    assert [(event.name, event.detail) for event in events] == [
        ("queued", ""),
        ("claimed", "by mac-1, attempt 1"),
        ("rendered", "3 tokens"),
        (
            "admitted",
            "0 tokens computed for others, put back 2 x to make room, "
            "put back 1 x by a fault of the device",
        ),
        ("first token", ""),
        ("ended", "2 tokens"),
        ("committed as finished", ""),
        ("fetched", ""),
    ]
    assert [event.first_for for event in events if event.first_for] == ["0123456789ab"]
    job.result()  # once more: the first time is what is told
    assert trace(connection, job.id) == events
    times = [event.at for event in events]
    assert times[5] - times[4] == pytest.approx(0.001, abs=2e-3)
    assert times[5] - times[2] == pytest.approx(0.003, abs=2e-3)
    assert times == pytest.approx(sorted(times), abs=2e-3)  # written in milliseconds

    shown = CliRunner().invoke(main, ["trace", job.id])
    assert shown.exit_code == 0
    assert [line.split()[3] for line in shown.stdout.splitlines()] == [
        event.name.split()[0] for event in events
    ]
    assert shown.stdout.splitlines()[3].endswith(" of the device; first for 0123456789ab")
    machine = json.loads(CliRunner().invoke(main, ["trace", job.id, "--json"]).stdout)
    assert machine[1]["detail"] == "by mac-1, attempt 1"
    assert machine[3]["first_for"] == "0123456789ab"


def test_a_job_that_failed_tells_why(connection: Redis, start_worker: StartWorker) -> None:
    start_worker(FakeEngine(refuse=lambda task: failure("too_much", "No.")))
    job = submit(messages=HI)
    with pytest.raises(JobFailed):
        job.result(PATIENCE)
    *_, committed, fetched = trace(connection, job.id)
    assert (committed.name, committed.detail) == ("committed as failed", "too_much")
    assert fetched.name == "fetched"


def test_looking_at_a_job_does_not_fetch_it_nor_does_fetching_make_a_job(
    connection: Redis, start_worker: StartWorker
) -> None:
    start_worker()
    job = submit(messages=HI)
    (done,) = as_completed([job], timeout=PATIENCE)
    detail = job_detail(job.id, None, content=True)
    assert detail["answer"] == f"chat for {job.id}"
    assert detail["life"][-1].name == "committed as finished"
    done.delete()
    note_fetched(connection, [job.id])
    assert not connection.exists(RQJob.key_for(job.id))


def test_a_while_is_drawn_for_trace_viewers(
    redis_url: str, tmp_path: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given jobs that were claimed ten seconds ago
    monkeypatch.setattr(claim, "now", lambda: datetime.now(UTC) - timedelta(seconds=10))
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() - 10, sleep=time.sleep)
    monkeypatch.setattr(claim, "time", clock)
    engine = FakeEngine(hold=True)
    engine.took = Steps(9.0, 8.0, 4.0, first_with="0123456789abcdef")
    start_worker(engine, name="mac-1")
    jobs = [submit(messages=HI) for _ in range(2)]
    engine.wait_for_tasks(2)
    engine.release()
    for job in jobs:
        job.result(PATIENCE)
    file = tmp_path / "trace.json"

    shown = CliRunner().invoke(main, ["trace", "--chrome", str(file)])

    assert (shown.exit_code, shown.stdout) == (
        0,
        f"{file}: 6 spans; open it at https://ui.perfetto.dev\n",
    )
    named, *spans = json.loads(file.read_text())["traceEvents"]
    assert (named["name"], named["args"]) == ("process_name", {"name": "mac-1"})
    assert {span["args"]["job"] for span in spans} == {job.id for job in jobs}
    for job in jobs:
        own = [span for span in spans if span["args"]["job"] == job.id]
        assert [span["name"] for span in own] == ["prefill", "decode", "commit"]
        told = own[0]["args"]["admitted"]
        assert told == "0 tokens computed for others; first for 0123456789ab"
        assert own[0]["dur"] == own[1]["dur"] == pytest.approx(4_000_000, abs=1)
        assert own[0]["ts"] + own[0]["dur"] == own[1]["ts"]
    places = {span["args"]["job"]: span["tid"] for span in spans}
    assert sorted(places.values()) == [1, 2], "both were in the batch at once"


def test_a_place_in_the_batch_is_free_before_anybody_fetches_the_answer(
    redis_url: str, connection: Redis, start_worker: StartWorker
) -> None:
    engine = FakeEngine()
    engine.took = Steps(0.0, 0.0, 0.0)
    start_worker(engine)
    jobs = [submit(messages=HI)]
    list(as_completed(jobs, timeout=PATIENCE))
    jobs.append(submit(messages=HI))
    list(as_completed(jobs, timeout=PATIENCE))
    note_fetched(connection, [job.id for job in jobs])

    _, *spans = chrome_trace(connection, math.inf)["traceEvents"]  # as of `--last inf`

    assert {span["args"]["job"]: span["tid"] for span in spans} == {job.id: 1 for job in jobs}


@pytest.mark.parametrize(
    ("environment", "opened"),
    [
        ({"DISPLAY": ":0"}, ["https://ui.perfetto.dev"]),
        ({"BROWSER": "code"}, ["https://ui.perfetto.dev"]),
        ({"SSH_CONNECTION": "yes"}, []),
    ],
)
def test_the_page_for_it_is_opened_where_there_is_a_browser(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], opened: list[str]
) -> None:
    pages: list[str] = []
    monkeypatch.setattr(webbrowser, "open", pages.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    shown = CliRunner(env=environment).invoke(main, ["trace", "--open"])
    file, _, said = shown.stdout.rstrip("\n").partition(": ")
    assert said == (
        "0 spans; at https://ui.perfetto.dev, drop it on the page, or take “Open trace file”"
    )
    assert json.loads(Path(file).read_text())["traceEvents"] == []
    assert pages == opened
    shutil.rmtree(Path(file).parent)


@pytest.mark.parametrize("arguments", [[], ["abc", "--chrome", "x.json"], ["abc", "--open"]])
def test_one_job_or_a_file_is_named(redis_url: str, arguments: list[str]) -> None:
    refused = CliRunner().invoke(main, ["trace", *arguments])
    assert refused.exit_code == 2
    assert "name a job, or a file for all of them with --chrome" in refused.stderr


def test_what_is_no_stream_is_drawn_as_nothing(redis_url: str, connection: Redis) -> None:
    connection.set(keys.COMPLETIONS, "odd")
    assert chrome_trace(connection, 60)["traceEvents"] == []


def test_it_is_short_whatever_happened() -> None:
    counts = [9_999_999, 9_999_999, 9_999_999, 100, 999, 99]
    longest = Measured(1_764_201_600.123456, *[123_456.78912] * 4, *counts, "f" * 12)
    assert len(longest.encode()) <= 200


@pytest.mark.parametrize(
    "spoilt",
    [
        *("", "no JSON", "[1]", '[1,null,null,null,null,1,1,1,1,1,1,""]'),
        *('["x",1,1,1,1,1,1,1,1,1,1,""]', "[1,1,1,1,1,1,1,1,1,1,1,1]"),
    ],
)
def test_a_spoilt_record_leaves_the_rest(redis_url: str, connection: Redis, spoilt: str) -> None:
    job = submit(messages=HI)
    connection.hset(RQJob.key_for(job.id), "trace", spoilt)
    assert [event.name for event in trace(connection, job.id)] == ["queued"]


def test_of_no_job_there_is_none(redis_url: str, connection: Redis) -> None:
    assert trace(connection, "none") == []
    assert CliRunner().invoke(main, ["trace", "none"]).exit_code == 1
