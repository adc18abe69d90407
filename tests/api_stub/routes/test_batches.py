"""Files and batches, from upload to output file, through OpenAI's unmodified client."""

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from batch_helpers import full_disk_at
from fakes import FakeEngine, StartWorker, eventually, failure
from openai.types import Batch, FileObject
from redis import Redis
from servers import RunningServer, StartServer, run_server

from mlx_rq import Job
from mlx_rq.api_stub import batch_run, batch_runner
from mlx_rq.api_stub.file_store import FileStore
from mlx_rq.api_stub.settings import Settings
from mlx_rq.jobs.queue.clock import redis_time

CASES = Path(__file__).parents[2] / "cases"
CHAT = "/v1/chat/completions"


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": custom_id}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(server: RunningServer, lines: Any, **options: Any) -> FileObject:
    if isinstance(lines, list):
        lines = "".join(json.dumps(item) + "\n" for item in lines).encode()
    file = ("in.jsonl", io.BytesIO(lines))
    return server.client().files.create(file=file, purpose="batch", **options)


def start(server: RunningServer, lines: Any, endpoint: Any = CHAT, **options: Any) -> Batch:
    return server.client().batches.create(
        input_file_id=upload(server, lines).id,
        endpoint=endpoint,
        completion_window="24h",
        **options,
    )


def ended(server: RunningServer, batch: Batch) -> Batch:
    """Waits for a batch to end."""
    done = ("completed", "failed", "expired", "cancelled")
    return until(server, batch, lambda batch: batch.status in done)


def until(server: RunningServer, batch: Batch, condition: Callable[[Batch], bool]) -> Batch:
    client = server.client()
    eventually(lambda: condition(client.batches.retrieve(batch.id)), "the batch")
    return client.batches.retrieve(batch.id)


def read(server: RunningServer, file_id: str | None) -> dict[str, Any]:
    """Reads an output or error file: its records by custom_id."""
    assert file_id is not None
    text = server.client().files.content(file_id).text
    records = [json.loads(raw) for raw in text.splitlines()]
    assert len({record["custom_id"] for record in records}) == len(records)
    return {record["custom_id"]: record for record in records}


def counts(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts is not None
    found = batch.request_counts
    return found.total, found.completed, found.failed


def test_from_upload_to_output_file(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    batch = start(server, [line(f"r{i}") for i in range(30)], metadata={"for": "the test"})
    assert batch.status == "validating"
    assert counts(batch) == (30, 0, 0)
    assert batch.metadata == {"for": "the test"}
    batch = ended(server, batch)
    assert batch.status == "completed"
    assert counts(batch) == (30, 30, 0)
    assert batch.error_file_id is None
    assert batch.in_progress_at is not None
    assert batch.completed_at is not None
    output = read(server, batch.output_file_id)
    assert set(output) == {f"r{i}" for i in range(30)}
    record = output["r7"]
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    assert record["response"]["body"]["choices"][0]["message"]["content"].startswith("chat for ")
    assert batch.usage is not None
    assert (batch.usage.input_tokens, batch.usage.output_tokens) == (90, 60)
    file = server.client().files.retrieve(batch.output_file_id or "")
    assert file.purpose == "batch_output"
    assert file.bytes == len(server.client().files.content(file.id).content)
    assert [found.id for found in server.client().batches.list()] == [batch.id]


def test_errors_have_a_file_of_their_own(server: RunningServer, start_worker: StartWorker) -> None:
    def refuse(task: Any) -> Any:
        long = "long" in task.request.messages[0].content
        return failure("context_length_exceeded") if long else None

    start_worker(FakeEngine(refuse=refuse))
    batch = ended(server, start(server, [line("a"), line("long"), line("hot", temperature=9)]))
    assert (batch.status, counts(batch)) == ("completed", (3, 1, 2))
    assert set(read(server, batch.output_file_id)) == {"a"}
    errors = read(server, batch.error_file_id)
    assert errors["long"]["response"]["status_code"] == 400
    assert errors["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"
    assert errors["hot"]["error"] is None


def test_line_with_a_schema_that_cannot_be_measured_fails_alone(
    server: RunningServer, start_worker: StartWorker
) -> None:
    start_worker()
    odd = [
        line("half", guided_json={"enum": ["\ud800"]}),
        line("endless", guided_json={"multipleOf": 10**400}),
        line("empty", adapters=""),
    ]
    batch = ended(server, start(server, [line("a"), *odd, line("b")]))
    assert (batch.status, counts(batch)) == ("completed", (5, 2, 3))
    errors = read(server, batch.error_file_id)
    params = {name: err["response"]["body"]["error"]["param"] for name, err in errors.items()}
    assert params == {"half": "guided_json", "endless": "guided_json", "empty": "adapters"}


def test_all_lines_failing_is_still_completed(
    server: RunningServer, start_worker: StartWorker
) -> None:
    start_worker(served_names=["smollm2"])
    lines = (CASES / "bad_parameters.jsonl").read_bytes().splitlines(keepends=True)
    lines = [raw for raw in lines if b'"stream"' not in raw]  # which fails the whole file
    batch = ended(server, start(server, b"".join(lines)))
    assert (batch.status, counts(batch)) == ("completed", (9, 0, 9))
    assert batch.output_file_id is None
    assert batch.usage is None
    errors = read(server, batch.error_file_id)
    assert {record["response"]["status_code"] for record in errors.values()} == {400}
    codes = {name: record["response"]["body"]["error"]["code"] for name, record in errors.items()}
    assert codes["temp"] == "decimal_above_max_value"
    assert codes["unknown"] == "unknown_parameter"


@pytest.mark.parametrize(
    ("lines", "endpoint", "code", "number", "param"),
    [
        ((CASES / "one_bad_line.jsonl").read_bytes(), CHAT, "invalid_json_line", 2, None),
        (
            (CASES / "duplicate_custom_id.jsonl").read_bytes(),
            CHAT,
            "duplicate_custom_id",
            3,
            "custom_id",
        ),
        ([line("a")], "/v1/completions", "invalid_url", 1, "url"),
        ([line("a", url="/v1/embeddings")], CHAT, "invalid_url", 1, "url"),
        ([line("a", model="other")], CHAT, "model_not_found", 1, "body.model"),
        ([line("a"), line("b", model="default")], CHAT, "mismatched_model", 2, "body.model"),
        ([line("a"), line("b", stream=True)], CHAT, "streaming_unsupported", 2, "body.stream"),
        ([{"method": "POST"}], CHAT, "missing_required_parameter", 1, "custom_id"),
        (
            [{"custom_id": "a", "method": "POST", "url": CHAT}],
            CHAT,
            "missing_required_parameter",
            1,
            "body",
        ),
    ],
)
def test_faults_of_the_file_fail_the_batch_before_anything_runs(
    server: RunningServer,
    start_worker: StartWorker,
    lines: Any,
    endpoint: str,
    code: str,
    number: int,
    param: str | None,
) -> None:
    engine = FakeEngine()
    start_worker(engine, served_names=["smollm2"])
    batch = ended(server, start(server, lines, endpoint))
    assert batch.status == "failed"
    assert batch.failed_at is not None
    assert batch.errors is not None
    assert batch.errors.data is not None
    first = batch.errors.data[0]
    assert (first.code, first.line, first.param) == (code, number, param)
    assert engine.added == []


def test_lines_without_a_model_are_for_any_worker(
    server: RunningServer, start_worker: StartWorker
) -> None:
    start_worker()
    batch = start(server, [line("a", model=None), line("b"), line("c", model=None, stream=False)])
    batch = ended(server, batch)
    assert (batch.status, counts(batch)) == ("completed", (3, 3, 0))


def test_missing_input_file_fails_later_not_at_once(server: RunningServer) -> None:
    batch = server.client().batches.create(
        input_file_id="file-nothing", endpoint=CHAT, completion_window="24h"
    )
    batch = ended(server, batch)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].param == "file_id"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"no json\n", "JSON lines"),
        (b"\xff\xfe{}", "UTF-8"),
        (b"\n \n", "no lines"),
    ],
)
def test_upload_that_is_no_file_of_requests(
    server: RunningServer, tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        upload(server, content)
    assert caught.value.param == "file"
    assert server.client().files.list().data == []
    assert list(tmp_path.rglob("*.data")) == []


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint", "invalid_value"),
        ({"completion_window": "1h"}, "completion_window", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
        ({"metadata": "a"}, "metadata", "invalid_type"),
        ({"input_file_id": None}, "input_file_id", "invalid_type"),
        ({"extra": 1}, "extra", "unknown_parameter"),
    ],
)
def test_wrong_batch(server: RunningServer, change: Any, param: str, code: str) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **change}
    answer = server.http.post("/v1/batches", json=body)
    assert answer.status_code == 400
    assert (answer.json()["error"]["param"], answer.json()["error"]["code"]) == (param, code)


def test_counts_move_and_cancel_keeps_what_is_done(
    server: RunningServer, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True, capacity=2)
    start_worker(engine, window=3)
    batch = start(server, [line(f"r{i}") for i in range(8)])
    first, *_ = engine.wait_for_tasks(3)
    engine.release(first)
    until(server, batch, lambda batch: counts(batch) == (8, 1, 0))
    client = server.client()
    assert client.batches.cancel(batch.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status == "cancelling"
    # What still waits is taken out of the queue; what runs is let finish.
    until(server, batch, lambda batch: counts(batch)[2] > 0)
    assert client.batches.retrieve(batch.id).status == "cancelling"
    engine.release()
    batch = ended(server, batch)
    assert batch.status == "cancelled"
    assert batch.cancelled_at is not None
    total, completed, failed = counts(batch)
    assert total == completed + failed == 8
    assert 3 <= completed < 8
    assert len(read(server, batch.output_file_id)) == completed
    errors = read(server, batch.error_file_id)
    assert {record["error"]["code"] for record in errors.values()} == {"batch_cancelled"}
    assert all(record["response"] is None for record in errors.values())
    assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_batch_that_is_cancelled_as_it_ends_is_a_cancelled_one(
    server: RunningServer, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_worker()
    finish = batch_run.BatchRun._finish

    def cancelled_before(run: batch_run.BatchRun) -> None:
        assert server.client().batches.cancel(run._id).status == "cancelling"
        finish(run)

    monkeypatch.setattr(batch_run.BatchRun, "_finish", cancelled_before)
    batch = ended(server, start(server, [line("a")]))
    assert (batch.status, counts(batch), batch.finalizing_at) == ("cancelled", (1, 1, 0), None)
    assert len(read(server, batch.output_file_id)) == 1


def test_completed_batch_cannot_be_cancelled(
    server: RunningServer, start_worker: StartWorker
) -> None:
    start_worker()
    batch = ended(server, start(server, [line("a")]))
    with pytest.raises(openai.ConflictError) as caught:
        server.client(max_retries=2).batches.cancel(batch.id)
    assert "Cannot cancel a batch with status 'completed'." in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_window_that_closes(
    server: RunningServer, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = 0
    monkeypatch.setattr(batch_run, "redis_time", lambda redis: redis_time(redis) + late)
    engine = FakeEngine(hold=True, capacity=1)
    start_worker(engine, window=1)
    batch = start(server, [line(f"r{i}") for i in range(3)])
    engine.wait_for_tasks(1)
    late = 24 * 3600
    until(server, batch, lambda batch: counts(batch)[2] > 0)
    engine.release()
    batch = ended(server, batch)
    assert (batch.status, counts(batch)) == ("expired", (3, 1, 2))
    assert batch.expired_at is not None
    errors = read(server, batch.error_file_id)
    assert {record["error"]["code"] for record in errors.values()} == {"batch_expired"}


def test_a_window_goes_by_the_clock_of_redis(
    server: RunningServer,
    start_worker: StartWorker,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    day, step, looks = 24 * 3600, 0.0, 0
    wrong = SimpleNamespace(time=lambda: time.time() + step)
    for module in (batch_runner, batch_run):
        monkeypatch.setattr(module, "time", wrong)

    def redis_time_seen(connection: Redis) -> float:
        nonlocal looks
        looks += 1
        return redis_time(connection)

    monkeypatch.setattr(batch_run, "redis_time", redis_time_seen)
    engine = FakeEngine(hold=True)
    start_worker(engine)
    # given a server whose clock is late, and is set while a batch runs
    step = -2 * day
    batch = start(server, [line("a")])
    assert day - 60 < (batch.expires_at or 0) - redis_time(connection) <= day
    engine.wait_for_tasks(1)
    step, before = 2 * day, looks
    eventually(lambda: looks > before + 1, "a look at the clock")

    engine.release()

    assert ended(server, batch).status == "completed"


def test_server_that_restarts_goes_on_and_runs_nothing_twice(
    redis_url: str, tmp_path: Path, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True, capacity=4)
    start_worker(engine)
    settings = Settings(data_dir=tmp_path, redis_url=redis_url)
    with run_server(settings) as server:
        batch = start(server, [line(f"r{i}") for i in range(10)])
        some = engine.wait_for_tasks(10)[:3]
        engine.release(*some)
        until(server, batch, lambda batch: counts(batch) == (10, 3, 0))
    engine.release()
    with run_server(settings) as server:
        batch = ended(server, batch)
        assert (batch.status, counts(batch)) == ("completed", (10, 10, 0))
        assert len(read(server, batch.output_file_id)) == 10
    assert len(engine.added) == 10


def change_record(data_dir: Path, batch: Batch, **fields: Any) -> None:
    """Changes the record of a batch on the disk, while its server is closed."""
    path = data_dir / "http" / "batches" / f"{batch.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


CANCELLING = {"status": "cancelling", "cancelling_at": 1}
OVERDUE = {"expires_at": 1}


@pytest.mark.parametrize(
    ("fields", "status"), [(CANCELLING, "cancelled"), (OVERDUE, "expired")], ids=["cancel", "late"]
)
def test_server_that_restarts_to_stop_a_batch_takes_what_was_answered_meanwhile(
    redis_url: str,
    connection: Redis,
    tmp_path: Path,
    start_worker: StartWorker,
    fields: dict[str, Any],
    status: str,
) -> None:
    engine = FakeEngine(hold=True, capacity=2)
    start_worker(engine, window=3)
    settings = Settings(data_dir=tmp_path, redis_url=redis_url)
    with run_server(settings) as server:
        batch = start(server, [line(f"r{i}") for i in range(8)])
        first, *_ = engine.wait_for_tasks(3)
    engine.release(first)
    engine.wait_for_tasks(4)  # its answer is in Redis, three others are being generated
    eventually(lambda: Job(first, redis_url).status() == "completed")
    change_record(tmp_path, batch, **fields)

    with run_server(settings) as server:
        eventually(lambda: connection.llen("rq:queue:mlx-rq:fake:low") == 0, "taking them back")
        engine.release()
        batch = ended(server, batch)
        assert (batch.status, counts(batch)) == (status, (8, 4, 4))
        assert len(read(server, batch.output_file_id)) == 4
        errors = read(server, batch.error_file_id)
    assert {record["error"]["code"] for record in errors.values()} == {f"batch_{status}"}
    assert len(engine.added) == 4


def test_batch_that_was_answered_before_a_late_server_looked_is_completed(
    redis_url: str, tmp_path: Path, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    settings = Settings(data_dir=tmp_path, redis_url=redis_url)
    with run_server(settings) as server:
        batch = start(server, [line("a"), line("b")])
        jobs = engine.wait_for_tasks(2)
    engine.release()
    eventually(lambda: {Job(job, redis_url).status() for job in jobs} == {"completed"})
    change_record(tmp_path, batch, **OVERDUE)
    with run_server(settings) as server:
        batch = ended(server, batch)
        assert (batch.status, counts(batch)) == ("completed", (2, 2, 0))


def test_upload_to_a_full_disk_is_said_and_leaves_nothing(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlx_rq.api_stub.file_store.sync", full)
    with pytest.raises(openai.InternalServerError, match="The disk of the server is full") as told:
        upload(server, [line("a")])
    assert (told.value.status_code, told.value.code) == (507, "disk_full")
    folder = server.server.config.app.state.service.settings.data_dir / "http"
    assert list(folder.rglob("*.data")) == []


def test_batch_that_fails_on_its_way_keeps_what_was_answered(
    server: RunningServer, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    with full_disk_at("c"):
        batch = start(server, [line("a"), line("b"), line("c"), line("hot", temperature=9)])
        a, b, _ = engine.wait_for_tasks(3)
        engine.release(a, b)
        until(server, batch, lambda batch: counts(batch) == (4, 2, 1))
        engine.release()

        batch = ended(server, batch)

    assert (batch.status, counts(batch)) == ("failed", (4, 2, 1))
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[0].code == "server_error"
    assert set(read(server, batch.output_file_id)) == {"a", "b"}
    assert set(read(server, batch.error_file_id)) == {"hot"}
    folder = server.server.config.app.state.service.settings.data_dir / "http" / "batches"
    eventually(lambda: not (folder / batch.id).exists(), "the end of the folder")


def test_cleaning_up_that_fails_is_not_the_end_of_batches(
    start_server: StartServer, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def fail(_: FileStore) -> None:
        tried.append(1)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(FileStore, "sweep", fail)
    monkeypatch.setattr("mlx_rq.api_stub.service._SWEEP_SECONDS", 0.01)
    start_worker()
    server = start_server()
    eventually(lambda: len(tried) >= 3, "trying again")
    assert ended(server, start(server, [line("a")])).status == "completed"


def test_batch_survives_the_deletion_of_its_input(
    server: RunningServer, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    batch = start(server, [line("a")])
    engine.wait_for_tasks(1)
    server.client().files.delete(batch.input_file_id)
    engine.release()
    assert ended(server, batch).status == "completed"


def test_files(server: RunningServer) -> None:
    client = server.client()
    ids = [upload(server, [line(f"r{i}")]).id for i in range(5)]
    assert [file.id for file in client.files.list()] == ids[::-1]
    assert [file.id for file in client.files.list(order="asc", limit=2)] == ids
    assert client.files.list(limit=2).has_more
    assert not client.files.list(after=ids[2], limit=2).has_more
    assert client.files.list(purpose="batch_output").data == []
    file = client.files.retrieve(ids[0])
    assert (file.purpose, file.filename, file.status) == ("batch", "in.jsonl", "processed")
    assert json.loads(client.files.content(ids[0]).text) == line("r0")
    assert client.files.delete(ids[0]).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            call(ids[0])
        assert caught.value.message.endswith(f"No such File object: {ids[0]}")
        assert (caught.value.param, caught.value.code) == ("id", None)
    with pytest.raises(openai.NotFoundError, match="No batch found"):
        client.batches.retrieve("batch_nothing")


def test_file_that_expires(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    expires: Any = {"anchor": "created_at", "seconds": 3600}
    file = upload(server, [line("a")], expires_after=expires)
    assert file.expires_at == file.created_at + 3600
    monkeypatch.setattr("mlx_rq.api_stub.file_store.time.time", lambda: file.created_at + 3601)
    with pytest.raises(openai.NotFoundError):
        server.client().files.retrieve(file.id)
    monkeypatch.undo()
    with pytest.raises(openai.BadRequestError) as caught:
        upload(server, [line("a")], expires_after={**expires, "seconds": 60})
    assert caught.value.param == "expires_after.seconds"


def test_two_servers_do_not_share_a_data_folder(
    server: RunningServer, start_server: StartServer
) -> None:
    used = server.server.config.app.state.service.settings.data_dir
    with pytest.raises(ValueError, match="Another server uses"):
        start_server(data_dir=used)
