"""What a key made belongs to its client: each endpoint and verb of the description is tried."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes import FakeEngine, StartWorker, eventually
from redis import Redis
from servers import RunningServer, StartServer, answer_any, as_client, run_server

from mlx_rq import submit
from mlx_rq.api_stub.settings import ApiKeys, Settings
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.response_object import job_of

KEYS = ("ann: a", "bob: b", "operator: o")
SHARED = {"/health", "/metrics", "/v1/models", "/v1/models/{model}"}
"""What is nobody's: these tell of queues, workers and models, not of what anybody sent."""

CHAT: Any = {"model": "default", "messages": [{"role": "user", "content": "Hello"}]}
LINES = json.dumps(
    {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"model": "default", "input": "Hello"},
    }
)


@pytest.fixture
def server(start_server: StartServer, start_worker: StartWorker) -> RunningServer:
    start_worker(FakeEngine(answer_with=answer_any))
    return start_server(keys=ApiKeys(KEYS))


def _file(http: httpx.Client, content: str = LINES) -> str:
    made = http.post("/v1/files", files={"file": ("f", content)}, data={"purpose": "batch"})
    return str(made.json()["id"])


def _batch(http: httpx.Client, file_id: str | None = None) -> str:
    body = {"endpoint": "/v1/responses", "completion_window": "24h"}
    body["input_file_id"] = file_id or _file(http)
    return str(http.post("/v1/batches", json=body).json()["id"])


def _ended(http: httpx.Client, batch_id: str) -> dict[str, Any]:
    def batch() -> dict[str, Any]:
        return dict(http.get(f"/v1/batches/{batch_id}").json())

    ended = ("completed", "failed")
    eventually(lambda: batch()["status"] in ended, "the batch")
    return batch()


def _response(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post("/v1/responses", json={"model": "default", "input": "Hello", **fields})


MAKERS: Mapping[str, Callable[[httpx.Client], str]] = {
    "{job_id}": lambda http: str(http.post("/v1/jobs", json=CHAT).json()["id"]),
    "{response}": lambda http: str(_response(http, background=True).json()["id"]),
    "{completion}": lambda http: str(
        http.post("/v1/chat/completions", json={**CHAT, "store": True}).json()["id"]
    ),
    "{file_id}": _file,
    "{batch_id}": _batch,
}
"""Makes the object that a parameter of a path names; one that is not here has no rule."""


Clients = Mapping[str, httpx.Client]


def walk(server: RunningServer, under: str = "/") -> dict[str, str]:
    """Tries every verb of every path below one; tells what is wrong with whose it is."""
    paths = server.http.get("/openapi.json").json()["paths"]
    clients = {name: as_client(server, name[0]) for name in ("ann", "bob", "operator")}
    found = {
        f"{verb} {path}": None if path in SHARED else _fault(clients, paths, path, verb)
        for path, operations in paths.items()
        if path.startswith(under)
        for verb in operations
    }
    assert found
    return {name: fault for name, fault in found.items() if fault is not None}


def _fault(clients: Clients, paths: Any, path: str, verb: str) -> str | None:
    parameters = re.findall(r"\{\w+\}", path)
    lists = [parameter for parameter in MAKERS if f"{path}/{parameter}" in paths]
    if len(parameters) == 1 and parameters[0] in MAKERS:
        return _fault_of_one(clients, paths[path][verb], path, verb, parameters[0])
    if verb == "get" and lists:
        return _fault_of_list(clients, path, lists[0])
    if verb == "post" and not parameters:
        return _fault_of_making(clients, paths[path][verb], path)
    return "it has no rule of ownership"


def _fault_of_one(
    clients: Clients, operation: Any, path: str, verb: str, parameter: str
) -> str | None:
    """To both who may it is there, also after it was not there to the other."""
    examples = _examples(operation)
    sent = {"json": examples[0]} if examples else {}
    for name in ("ann", "operator"):
        url = path.replace(parameter, MAKERS[parameter](clients["ann"]))
        other = clients["bob"].request(verb, url, **sent).status_code
        own = clients[name].request(verb, url, **sent).status_code
        if other != 404 or own not in (200, 400, 409):
            return f"{name}: {own}, bob: {other}"
    return None


def _fault_of_list(clients: Clients, path: str, parameter: str) -> str | None:
    made = MAKERS[parameter](clients["ann"])
    lists = {name: http.get(path).json()["data"] for name, http in clients.items()}
    seen = {name: made in [one["id"] for one in data] for name, data in lists.items()}
    return None if seen == {"ann": True, "bob": False, "operator": True} else str(seen)


def _fault_of_making(clients: Clients, operation: Any, path: str) -> str | None:
    """The same body under the same idempotency key makes an object for each client."""
    examples = _examples(operation)
    if examples:
        url, of_bob = (_made_url(clients[name], path, examples[0]) for name in ("ann", "bob"))
    else:  # an upload
        url, of_bob = (f"{path}/{_file(clients[name])}" for name in ("ann", "bob"))
    if url == of_bob:
        return "two clients with one idempotency key have one object"
    statuses = [clients[name].get(url).status_code for name in ("bob", "ann", "operator")]
    return None if statuses == [404, 200, 200] else f"{url}: {statuses}"


def _examples(operation: Any) -> list[Any]:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return [example["value"] for example in content.get("examples", {}).values()]


def _made_url(http: httpx.Client, path: str, body: Any) -> str:
    """Sends a body; says where what it made can be read."""
    if "input_file_id" in body:
        body = {**body, "input_file_id": _file(http)}
    made = http.post(path, json=body, headers={"idempotency-key": path})
    assert made.is_success, (path, made.text)
    if "location" in made.headers:
        return str(made.headers["location"])
    if "x-job-id" in made.headers:
        return f"/v1/jobs/{made.headers['x-job-id']}"
    return f"{path}/{made.json()['id']}"


def test_every_endpoint_and_verb(server: RunningServer) -> None:
    assert walk(server) == {}


def test_an_endpoint_without_ownership_is_found(server: RunningServer) -> None:
    app: Any = server.server.config.app
    for path in ("/more/{job_id}", "/more/{thing}", "/more"):
        app.add_api_route(path, lambda: {"data": []}, methods=["GET"])
    assert walk(server, "/more") == {
        "get /more/{job_id}": "ann: 200, bob: 200",
        "get /more/{thing}": "it has no rule of ownership",
        "get /more": "{'ann': False, 'bob': False, 'operator': False}",
    }


def test_what_a_body_names_is_ones_own(server: RunningServer) -> None:
    ann, bob, operator = (as_client(server, key) for key in "abo")
    response_id = _response(ann).json()["id"]
    for path, more in (
        ("/v1/responses", {"model": "default"}),
        ("/v1/responses/input_tokens", {}),
        ("/v1/jobs", {}),
    ):
        body = {"input": "And?", "previous_response_id": response_id, **more}
        refused = bob.post(path, json=body)
        assert refused.status_code == 400, path
        assert refused.json()["error"]["code"] == "previous_response_not_found"
        assert ann.post(path, json=body).is_success, path
        assert operator.post(path, json=body).is_success, path
        item_id = f"msg_{job_of(response_id)}"
        body = {"input": [{"type": "item_reference", "id": item_id}], **more}
        refused = bob.post(path, json=body)
        assert refused.status_code == 400, path
        assert refused.json()["error"]["param"] == "input[0].id"
        assert ann.post(path, json=body).is_success, path
    of_anns = _ended(bob, _batch(bob, _file(ann)))
    assert of_anns["status"] == "failed"
    assert "does not exist" in of_anns["errors"]["data"][0]["message"]


def test_the_files_and_jobs_of_a_batch_are_its_clients(server: RunningServer) -> None:
    ann, bob = (as_client(server, key) for key in "ab")
    earlier = _response(ann).json()["id"]
    line = json.loads(LINES)
    line["body"] |= {"previous_response_id": earlier, "store": True}
    batch = _ended(ann, _batch(ann, _file(ann, json.dumps(line))))
    content = f"/v1/files/{batch['output_file_id']}/content"
    answer = json.loads(ann.get(content).text)["response"]["body"]
    assert ann.get(f"/v1/responses/{answer['id']}").json()["id"] == answer["id"]
    assert bob.get(content).status_code == bob.get(f"/v1/responses/{answer['id']}").status_code
    assert bob.get(content).status_code == 404
    refused = _ended(bob, _batch(bob, _file(bob, json.dumps(line))))
    errors = bob.get(f"/v1/files/{refused['error_file_id']}/content").text
    assert json.loads(errors)["response"]["body"]["error"]["code"] == "previous_response_not_found"


def test_it_outlives_the_server_and_the_key(
    redis_url: str, tmp_path: Path, start_worker: StartWorker
) -> None:
    start_worker(FakeEngine(answer_with=answer_any))

    def with_keys(*lines: str) -> Settings:
        return Settings(data_dir=tmp_path, redis_url=redis_url, keys=ApiKeys(lines))

    with run_server(with_keys("ann: a", "nameless")) as server:
        ann, nameless = (as_client(server, key) for key in ("a", "nameless"))
        paths = [f"/v1/files/{_file(ann)}", f"/v1/batches/{_batch(ann)}"]
        _ended(ann, paths[1].rpartition("/")[2])
        paths += [f"/v1/responses/{MAKERS['{response}'](ann)}"]
        paths += [f"/v1/chat/completions/{MAKERS['{completion}'](ann)}"]
        unnamed = f"/v1/files/{_file(nameless)}"
    name = ApiKeys(["nameless"]).client("nameless")
    with run_server(with_keys("ann: new", "ann: newer", "bob: a", f"{name}: other")) as server:
        for path in paths:
            seen = [as_client(server, key).get(path).status_code for key in ("new", "newer", "a")]
            assert seen == [200, 200, 404], path
            assert "owner" not in as_client(server, "new").get(path).json()
        assert as_client(server, "other").get(unnamed).status_code == 200
        assert as_client(server, "new").get(unnamed).status_code == 404
    with run_server(with_keys()) as server:  # no keys: all is there for all
        assert {server.http.get(path).status_code for path in [*paths, unnamed]} == {200}
        mine = f"/v1/files/{_file(server.http)}"
    with run_server(with_keys("ann: a", "operator: o")) as server:
        seen = [as_client(server, key).get(mine).status_code for key in "ao"]
        assert seen == [404, 200]


def test_jobs_of_programs_are_the_operators_unless_they_say_whose(server: RunningServer) -> None:
    nobodys, anns = submit(prompt="x").id, submit(prompt="x", owner="ann").id
    seen = {
        key: [as_client(server, key).get(f"/v1/jobs/{one}").status_code for one in (nobodys, anns)]
        for key in "abo"
    }
    assert seen == {"a": [404, 200], "b": [404, 404], "o": [200, 200]}
    with pytest.raises(RequestError, match="Invalid 'owner'"):
        submit(prompt="x", owner="two words")


def test_idempotency_keys_of_a_client_are_its_own(server: RunningServer, connection: Redis) -> None:
    def made(key: str, body: Any) -> httpx.Response:
        headers = {"idempotency-key": "k"}
        return as_client(server, key).post("/v1/jobs", json=body, headers=headers)

    of_a_program = submit(prompt="x", idempotency_key="k").id
    ids = {made(key, {"prompt": f"of {key}"}).json()["id"] for key in "abo"}
    assert len(ids | {of_a_program}) == 4
    assert made("a", {"prompt": "of a"}).json()["id"] in ids
    assert made("a", {"prompt": "of b"}).status_code == 409
    assert submit(prompt="of a", idempotency_key="k", owner="ann").id in ids
    assert len(connection.keys("mlx-rq:idempotency:*")) == 4


@pytest.mark.parametrize(
    "lines",
    [["ann: x", "bob: x"], ["two words: x"], ["anyone: x"], ["ann:  "], ["ann: sha256:abc"]],
)
def test_names_that_cannot_be(lines: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        ApiKeys(lines)
    assert caught.value.param == "api_key_file"
