"""What every request meets: errors in one shape, ids, keys, limits, origins."""

import hashlib
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from fakes import FakeEngine, StartWorker
from servers import RunningServer, StartServer, run_server

from mlx_rq.api_stub.bodies import ESCAPED
from mlx_rq.api_stub.settings import ApiKeys, Settings, check_binding, read_keys
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.sizes import DEFAULT_MAX_BODY, MAX_BODY_VARIABLE
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.models.switch import EngineSwitch, ServedModel

JSON = {"content-type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


BAD_TOOL = "invalid_function_parameters"
BAD_SCHEMAS = {
    "a surrogate in a schema": b'{"enum": ["\\ud800"]}',
    "an endless number in a schema": b'{"multipleOf": 1%0400d}' % 0,
}


def _with_tool(schema: bytes) -> bytes:
    """A body as it is sent, with a tool of this schema."""
    tool = b'{"type": "function", "function": {"name": "f", "parameters": %s}}' % schema
    return b'{"messages": [{"role": "user", "content": "x"}], "tools": [%s]}' % tool


def _error(answer: httpx.Response) -> dict[str, Any]:
    """Takes the error object out of an answer, having seen that it has the one shape."""
    assert re.fullmatch(r"req_[0-9a-f]{32}", answer.headers["x-request-id"])
    body = answer.json()
    assert list(body) == ["error"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "code"),
    [
        ("GET", "/nothing", None, {}, 404, "unknown_url"),
        ("GET", "/v1/jobs/", None, {}, 404, "unknown_url"),
        ("PUT", "/v1/jobs", b"{}", JSON, 405, "method_not_allowed"),
        ("GET", "/v1/completions", None, {}, 405, "method_not_allowed"),
        ("POST", "/v1/jobs", b'{"messages":', JSON, 400, "invalid_json"),
        ("POST", "/v1/jobs", b"", JSON, 400, "invalid_json"),
        ("POST", "/v1/jobs", b"\xff\xfe{", JSON, 400, "invalid_json"),
        ("POST", "/v1/jobs", b'{"messages": NaN}', JSON, 400, "invalid_json"),
        ("POST", "/v1/jobs", b"[" * 100_000, JSON, 400, "invalid_json"),
        ("POST", "/v1/jobs", b'{"prompt": "\\ud800"}', JSON, 400, "invalid_value"),
        ("POST", "/v1/jobs", b'{"model": "\\ud800", "prompt": "x"}', JSON, 400, "invalid_value"),
        *(
            pytest.param("POST", "/v1/jobs", _with_tool(schema), JSON, 400, BAD_TOOL, id=name)
            for name, schema in BAD_SCHEMAS.items()
        ),
        ("POST", "/v1/jobs", b"[]", JSON, 400, "invalid_type"),
        ("POST", "/v1/jobs", b"{}", {}, 415, "unsupported_media_type"),
        ("POST", "/v1/jobs", b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ("POST", "/v1/jobs?priority=urgent", b"{}", JSON, 400, "invalid_value"),
        ("GET", "/v1/jobs/x?wait=soon", None, {}, 400, "invalid_value"),
        ("GET", "/v1/jobs/x?waiting=5", None, {}, 400, "unknown_parameter"),
        ("POST", "/v1/jobs?Priority=high", b"{}", JSON, 400, "unknown_parameter"),
        ("GET", "/v1/models/org%2Fname", None, {}, 404, "model_not_found"),
    ],
)
def test_error_shapes(
    start_server: StartServer,
    start_worker: StartWorker,
    method: str,
    path: str,
    content: bytes | None,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    start_worker()
    answer = start_server().http.request(method, path, content=content, headers=headers)
    assert (answer.status_code, _error(answer)["code"]) == (status, code)


@pytest.mark.parametrize(
    ("method", "path", "told"),
    [
        ("GET", "/", "base URL of OpenAI's clients is http://127.0.0.1:PORT/v1. http://127"),
        ("GET", "/v1", "base URL of OpenAI's clients is http://127.0.0.1:PORT/v1. http://127"),
        ("POST", "/v1/", "base URL of OpenAI's clients is http://127.0.0.1:PORT/v1. http://127"),
        ("GET", "/v1/files/", "Is /v1/files meant?"),
        ("POST", "/chat/completions", "Is /v1/chat/completions meant? The base URL of"),
        ("POST", "/v1/v1/chat/completions/", "Is /v1/chat/completions meant?"),
        ("GET", "/models", "Is /v1/models meant?"),
        ("GET", "/v1/models/", "Is /v1/models meant?"),
        ("GET", "/v1/jobs/", "docs lists the calls."),
        ("POST", "/v1/conversations", "'previous_response_id' goes on from a response."),
        ("GET", "/v1/conversations/conv_1", "'previous_response_id' goes on from a response."),
        ("POST", "/v1/embeddings", "http://127.0.0.1:PORT/docs lists the calls."),
    ],
)
def test_an_unknown_url_says_where_to_go(
    server: RunningServer, method: str, path: str, told: str
) -> None:
    answer = server.http.request(method, path)
    error = _error(answer)
    assert (answer.status_code, error["code"]) == (404, "unknown_url")
    assert error["message"].startswith(f"Unknown request URL: {method} {path}. ")
    assert told.replace("PORT", server.url.rpartition(":")[2]) in error["message"]


def test_json_with_parameters_in_its_content_type(
    server: RunningServer, start_worker: StartWorker
) -> None:
    start_worker()
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    answer = server.http.post("/v1/jobs", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 202


def test_fault_of_ours(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "the secret of the queue"

    def fail(*_: Any) -> None:
        raise ZeroDivisionError(secret)

    monkeypatch.setattr("mlx_rq.api_stub.routes.health.live_workers", fail)
    answer = server.http.get("/v1/models")
    error = _error(answer)
    assert (answer.status_code, error["type"]) == (500, "server_error")
    assert answer.headers["x-request-id"] in error["message"]
    assert secret not in answer.text


def test_no_redis(nobody_listens: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with run_server(Settings(data_dir=tmp_path, redis_url=nobody_listens)) as server:
        answer = server.http.post("/v1/jobs", json=CHAT)
        assert (answer.status_code, _error(answer)["code"]) == (503, "queue_unavailable")
        assert answer.headers["retry-after"] == "5"
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "no_redis")
    said = [record.getMessage() for record in caplog.records if record.name == "mlx_rq.api_stub"]
    assert said[0].startswith(f"No Redis at {nobody_listens}")
    assert said[0].endswith("Until then, requests are answered with 503.")


@pytest.mark.parametrize("announced", [True, False])
def test_body_limit(server: RunningServer, announced: bool) -> None:
    too_much = b" " * (ESCAPED * DEFAULT_MAX_BODY + 1)
    content: Any = too_much if announced else iter([too_much[:100], too_much[100:]])
    answer = server.http.post("/v1/jobs", content=content, headers=JSON)
    assert (answer.status_code, _error(answer)["code"]) == (413, "request_too_large")


def test_body_that_is_too_large_as_a_job(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    body = {"prompt": "x" * DEFAULT_MAX_BODY}
    answer = server.http.post("/v1/jobs", json=body)
    assert (answer.status_code, _error(answer)["code"]) == (413, "request_too_large")


def test_body_limit_that_is_set(
    monkeypatch: pytest.MonkeyPatch, server: RunningServer, start_worker: StartWorker
) -> None:
    start_worker()
    monkeypatch.setenv(MAX_BODY_VARIABLE, "1000")
    answer = server.http.post("/v1/jobs", json={"prompt": "x" * 1000})
    assert (answer.status_code, _error(answer)["message"]) == (
        413,
        "The body has 1,013 bytes; the limit is 1,000.",
    )
    answer = server.http.post("/v1/jobs", json={"prompt": "x" * 2000})
    assert (answer.status_code, _error(answer)["message"]) == (
        413,
        "The request has more than 2,000 bytes, which is the limit here.",
    )


def test_keys(start_server: StartServer, tmp_path: Path, start_worker: StartWorker) -> None:
    start_worker()
    file = tmp_path / "keys"
    hashed = hashlib.sha256(b"second").hexdigest()
    file.write_text(f"# the team\nfirst\n\nsha256:{hashed}\n")
    server = start_server(keys=read_keys(file))
    for key in ("first", "second"):
        assert server.client(api_key=key).models.list().data[0].id == "fake"
    for key in ("third", f"sha256:{hashed}", hashed):
        with pytest.raises(openai.AuthenticationError) as caught:
            server.client(api_key=key).models.list()
        assert caught.value.code == "invalid_api_key"
    for headers in ({}, {"authorization": "Basic first"}, {"authorization": "Bearer"}):
        answer = server.http.get("/v1/models", headers=headers)
        assert (answer.status_code, _error(answer)["code"]) == (401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/metrics").status_code == 401


@pytest.mark.parametrize("text", ["", "# only this\n", "sha256:abc\n"])
def test_key_file_without_a_key(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(RequestError) as caught:
        read_keys(tmp_path / "keys")
    assert caught.value.param == "api_key_file"


def test_without_keys_only_loopback_is_bound() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.1.2.3"):
        check_binding(host, ApiKeys())
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org", ""):
        with pytest.raises(RequestError, match="loopback only"):
            check_binding(host, ApiKeys())
        check_binding(host, ApiKeys(["key"]))


def test_command_refuses_to_start_open_to_strangers() -> None:
    ended = CliRunner().invoke(main, ["serve", "--host", "0.0.0.0"])
    assert ended.exit_code == 1
    assert "--api-key-file" in ended.output


def test_rate_limit_is_for_each_key(start_server: StartServer) -> None:
    server = start_server(keys=ApiKeys(["a", "b"]), requests_per_minute=3)
    a, b = ({"authorization": f"Bearer {key}"} for key in "ab")
    assert [server.http.get("/v1/models", headers=a).status_code for _ in range(4)] == [200] * 3 + [
        429
    ]
    refused = server.http.get("/v1/models", headers=a)
    assert _error(refused)["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 21
    assert server.http.get("/v1/models", headers=b).status_code == 200


def test_foreign_pages_have_no_use_of_an_open_server(
    server: RunningServer, start_server: StartServer
) -> None:
    evil = {"origin": "https://evil.example"}
    assert _error(server.http.get("/v1/models", headers=evil))["code"] == "origin_not_allowed"
    rebound = server.http.get("/v1/models", headers={"host": "evil.example"})
    assert (rebound.status_code, _error(rebound)["code"]) == (403, "host_not_allowed")
    assert "started with --api-key-file" in _error(rebound)["message"]
    for headers in ({"host": "["}, {"origin": "http://["}):
        assert server.http.get("/v1/models", headers=headers).status_code == 403, headers
    assert server.http.get("/v1/models", headers={"origin": server.url}).status_code == 200

    friend = {"origin": "https://app.example"}
    assert (
        "access-control-allow-origin" not in server.http.get("/v1/models", headers=friend).headers
    )
    asked = {**friend, "access-control-request-method": "POST"}
    allowing = start_server(allowed_origins=("https://app.example",))
    preflight = allowing.http.options("/v1/jobs", headers=asked)
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert allowing.http.get("/v1/models", headers=friend).status_code == 200
    assert allowing.http.get("/v1/models", headers=evil).status_code == 403


def test_models_say_whether_they_are_loaded(
    server: RunningServer, start_worker: StartWorker
) -> None:
    def engine() -> FakeEngine:
        return FakeEngine("a")

    models = [ServedModel(("a", "org/a"), engine), ServedModel(("b",), engine)]
    switch = EngineSwitch(models)
    switch.load("a")
    start_worker(switch=switch)
    listed = server.http.get("/v1/models").json()["data"]
    assert {model["id"]: model["state"] for model in listed} == {
        "a": "loaded",
        "org/a": "loaded",
        "b": "can_be_loaded",
    }
    assert 'model="a b"' in server.http.get("/metrics").text


def test_health_models_and_metrics(server: RunningServer, start_worker: StartWorker) -> None:
    assert server.http.get("/health").json() == {
        "status": "no_workers",
        "redis": True,
        "workers": 0,
        "queued": 0,
        "in_progress": 0,
    }
    start_worker(served_names=["org/name"])
    models = server.client().models.list().data
    assert [model.id for model in models] == ["fake", "org/name"]
    assert server.client().models.retrieve("org/name").owned_by == "local"
    states = [model.model_dump()["state"] for model in models]
    assert states == ["loaded", "loaded"]
    assert abs(models[0].created - 1e9) > 1e8  # a real time
    assert server.client().models.retrieve("default").id == "default"
    job_id = server.http.post("/v1/jobs", json=CHAT).json()["id"]
    server.http.get(f"/v1/jobs/{job_id}?wait=50")
    assert server.http.get("/health").json()["status"] == "ok"
    scraped = server.http.get("/metrics")
    assert scraped.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    text = scraped.text
    assert 'mlx_rq_http_requests_total{method="POST",path="/v1/jobs",status="202"} 1.0\n' in text
    jobs = 'mlx_rq_jobs{model="default",priority="default",status="completed"} 1.0\n'
    assert jobs in text
    assert "mlx_rq_workers 1.0\n" in text
