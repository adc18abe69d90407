"""Models whose workers are away are not models that never were."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fakes import FakeEngine, RunningWorker, StartWorker, eventually
from redis import Redis
from servers import RunningServer, StartServer, answer_any

from mlx_rq.jobs.queue import keys

HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def away(
    connection: Redis, running_worker: Callable[..., Any], server: RunningServer
) -> RunningServer:
    """A server whose only worker, which served `fake` and `org/name`, is stopped."""
    with running_worker(served_names=["org/name"]) as worker:
        assert isinstance(worker, RunningWorker)
        eventually(lambda: bool(connection.exists(keys.worker(worker.name))), "the worker")
    assert not connection.exists(keys.worker(worker.name))
    return server


def _post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return server.http.post(path, json=body)


def test_what_does_not_wait_is_taken(away: RunningServer, start_worker: StartWorker) -> None:
    job = _post(away, "/v1/jobs", model="org/name", messages=HELLO)
    assert (job.status_code, job.json()["status"]) == (202, "queued")
    assert job.json()["note"].startswith("no live worker serves the model 'org/name': start one")
    response = _post(away, "/v1/responses", model="fake", input="Hi", background=True)
    assert (response.status_code, response.json()["status"]) == (200, "queued")
    start_worker(FakeEngine(answer_with=answer_any), served_names=["org/name"])
    ended = away.http.get(f"/v1/jobs/{job.json()['id']}?wait=50").json()
    assert ended["status"] == "completed"


def test_what_waits_is_told_to_come_again(away: RunningServer) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/chat/completions", {"messages": HELLO, "stream": True}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/responses/input_tokens", {"input": "x"}),
    ):
        refused = _post(away, path, model="org/name", **body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5"), path
        error = refused.json()["error"]
        assert (error["code"], error["type"]) == ("model_unavailable", "server_error")
        assert "`mlx-rq worker --model NAME` starts one" in error["message"]
    with pytest.raises(openai.InternalServerError, match=r"503.*No worker is alive"):
        away.client().chat.completions.create(model="default", messages=HELLO)


def test_what_is_wrong_is_not_told_to_come_again(away: RunningServer) -> None:
    for path, body, param in (
        ("/v1/chat/completions", {"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
        ("/v1/completions", {"prompt": "x", "temperature": 9}, "temperature"),
        ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ):
        refused = _post(away, path, model="org/name", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_model_that_is_asked_for_while_none_is_alive(away: RunningServer) -> None:
    refused = away.http.get("/v1/models/other")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert refused.json()["error"]["message"].endswith(
        "No worker is alive; `mlx-rq worker --model NAME` starts one."
    )
    for model in ("org%2Fname", "default"):
        refused = away.http.get(f"/v1/models/{model}")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert refused.json()["error"]["code"] == "model_unavailable"


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/chat/completions"])
def test_what_never_was_is_not_found(away: RunningServer, path: str) -> None:
    refused = _post(away, path, model="other", messages=HELLO)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert refused.json()["error"]["message"].endswith(
        "No worker is alive; `mlx-rq worker --model NAME` starts one. "
        "Away at the moment: fake, org/name."
    )


def test_what_the_server_was_told_of_is_known(start_server: StartServer) -> None:
    server = start_server(models=("told",))
    assert _post(server, "/v1/jobs", model="told", messages=HELLO).status_code == 202
    assert _post(server, "/v1/jobs", messages=HELLO).status_code == 202  # any worker's
    assert _post(server, "/v1/completions", model="told", prompt="x").status_code == 503
    assert _post(server, "/v1/jobs", model="untold", messages=HELLO).status_code == 404


def test_a_batch_waits_and_says_for_what(away: RunningServer, start_worker: StartWorker) -> None:
    client = away.client()
    body = {"model": "fake", "messages": HELLO}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch_id = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ).id

    def batch() -> Any:
        return client.batches.retrieve(batch_id)

    eventually(lambda: getattr(batch(), "note", None) is not None, "the note")
    assert batch().status == "in_progress"
    assert batch().note.startswith("no live worker serves the model 'fake': start one")
    start_worker()
    eventually(lambda: batch().status == "completed", "the batch")
    assert (batch().note, batch().request_counts.completed) == (None, 1)


def test_the_models_that_are_remembered_are_bounded(
    connection: Redis, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "MODELS_KEPT", 3)
    connection.zadd(keys.MODELS, {"old": 1, "older": 0})
    start_worker()

    def names() -> Any:
        return sorted(connection.zrange(keys.MODELS, 0, -1))

    eventually(lambda: names() == [b"default", b"fake", b"old"], "the names")
