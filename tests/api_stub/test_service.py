"""The way of a body through the server: it is validated once on the way in."""

from typing import Any

import pytest
from fakes import StartWorker
from servers import RunningServer, StartServer

from mlx_rq.jobs.openai import validation
from mlx_rq.jobs.queue import prepare
from mlx_rq.jobs.queue.options import JobOptions

BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "Hello"}]},
    "completion": {"prompt": "Once"},
    "responses": {"input": "Hello"},
}


@pytest.fixture
def server(start_server: StartServer) -> RunningServer:
    """A server that takes jobs which no worker serves yet."""
    return start_server(queue_unserved=True)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_job(server: RunningServer, monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    seen: list[Any] = []
    whole = validation.validate_as

    def counting(model: Any, body: Any) -> Any:
        seen.append(body)
        return whole(model, body)

    monkeypatch.setattr(validation, "validate_as", counting)
    assert server.http.post("/v1/jobs", json=body).status_code == 202
    assert seen == [body]


def test_a_response_that_its_endpoint_has_validated(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(kind: str, body: Any) -> Any:
        raise AssertionError("validated a second time")

    monkeypatch.setattr(prepare, "validate", again)
    body = {"input": "Hello", "model": "default", "background": True}
    accepted = server.http.post("/v1/responses", json=body)
    assert (accepted.status_code, accepted.json()["status"]) == (200, "queued")


def test_an_adapter_is_asked_for_by_a_name_that_is_served(
    start_server: StartServer, start_worker: StartWorker
) -> None:
    start_worker(served_names=("m", "m:sql", "m:loras/sql", "default:sql"))
    http = start_server().http
    listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
    assert listed == ["fake", "m", "m:loras/sql", "m:sql"]
    for asked in ({"model": "m:sql"}, {"model": "default", "adapters": "sql"},
                  {"model": "m", "adapters": "loras/sql"}):  # fmt: skip
        answered = http.post("/v1/completions", json={"prompt": "Once", **asked})
        assert answered.status_code == 200, answered.text
    refused = http.post(
        "/v1/completions", json={"prompt": "Once", "model": "m", "adapters": "/etc"}
    )
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == (
        "The model 'm:/etc' does not exist here: no live worker serves it. Served now: fake, m, "
        "m:loras/sql, m:sql."
    )
    empty = http.post("/v1/completions", json={"prompt": "Once", "model": "m", "adapters": ""})
    assert (empty.status_code, empty.json()["error"]["param"]) == (400, "adapters")


def test_the_options_of_a_job_are_parameters_with_their_limits(server: RunningServer) -> None:
    spec = server.http.get("/openapi.json").json()
    parameters = {
        parameter["name"]: parameter["schema"]
        for parameter in spec["paths"]["/v1/jobs"]["post"]["parameters"]
    }
    assert parameters.pop("dry_run")["type"] == "boolean"
    assert parameters.keys() == {"priority", "result_ttl", "timeout", "max_attempts", "webhook"}
    defaults = {name: schema.get("default") for name, schema in parameters.items()}
    assert defaults == {name: getattr(JobOptions(), name) for name in parameters}
    assert parameters["max_attempts"]["minimum"] == 1
    assert parameters["max_attempts"]["maximum"] == 100
    assert parameters["result_ttl"]["exclusiveMaximum"] == 2**31
    for query in ("max_attempts=0", "result_ttl=x", "timeout=0", "priority=urgent", "stream=true"):
        assert server.http.post(f"/v1/jobs?{query}", json=BODIES["chat"]).status_code == 400
