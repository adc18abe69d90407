"""Counting a prompt's tokens: through OpenAI's client, and as a dry run of any job."""

from typing import Any

import openai
import pytest
from fakes import FakeEngine, StartWorker
from servers import RunningServer, StartServer, answer_any

from mlx_rq.jobs.openai.token_count import TokenCountRequest

HI = [{"role": "user", "content": "Hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]},
    "completion": {"prompt": ["Once", "Twice"]},
    "responses": {"input": "Hello", "instructions": "Be brief."},
}


@pytest.fixture
def engine(start_worker: StartWorker) -> FakeEngine:
    engine = FakeEngine(answer_with=answer_any)
    start_worker(engine)
    return engine


def counted(engine: FakeEngine) -> Any:
    """What the engine was last asked to count the prompt of."""
    request = engine.added[-1].request
    assert isinstance(request, TokenCountRequest)
    return request.count_tokens


def test_openais_client_counts(server: RunningServer, engine: FakeEngine) -> None:
    count = server.client().responses.input_tokens.count
    found = count(
        model="fake",
        input="Hello",
        instructions="Be brief.",
        tools=[{"type": "function", "name": "f", "parameters": {}, "strict": None}],
        truncation="auto",
    )
    assert (found.object, found.input_tokens) == ("response.input_tokens", 3)
    request = counted(engine)
    assert (request.kind, request.input, request.truncates) == ("responses", "Hello", True)
    assert [tool.name for tool in request.tools] == ["f"]


def test_the_body_need_not_name_a_model(server: RunningServer, engine: FakeEngine) -> None:
    assert server.client().responses.input_tokens.count(input="Hello").input_tokens == 3


def test_the_model_that_counts_is_the_one_that_is_named(
    server: RunningServer, engine: FakeEngine
) -> None:
    with pytest.raises(openai.NotFoundError, match="other-model") as refused:
        server.client().responses.input_tokens.count(model="other-model", input="Hello")
    assert refused.value.code == "model_not_found"
    dry = server.http.post("/v1/jobs?dry_run", json={**BODIES["chat"], "model": "fake"})
    assert dry.json()["model"] == "fake"


def test_what_an_earlier_response_was_made_from_counts(
    server: RunningServer, engine: FakeEngine
) -> None:
    client = server.client()
    first = client.responses.create(model="fake", input="Hello")
    client.responses.input_tokens.count(
        model="fake", input="And now?", previous_response_id=first.id
    )
    said = [message.content for message in counted(engine).generated_from().messages]
    assert said == ["Hello", first.output_text, "And now?"]
    with pytest.raises(openai.BadRequestError, match="'resp_x' not found"):
        client.responses.input_tokens.count(input="Hi", previous_response_id="resp_x")


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": 5}, "invalid_type", "input"),
        ({"input": "Hi", "temperature": 9}, "decimal_above_max_value", "temperature"),
        ({"input": "Hi", "colour": "red"}, "unknown_parameter", "colour"),
        ({"input": "Hi", "stream": True}, "unsupported_parameter", "stream"),
        ({"input": "Hi", "model": 5}, "invalid_type", "model"),
    ],
)
def test_a_wrong_body_is_refused_in_its_own_names(
    server: RunningServer, body: dict[str, Any], code: str, param: str
) -> None:
    for path in ("/v1/responses/input_tokens", "/v1/jobs?dry_run=true"):
        if not body and "jobs" in path:
            continue  # it may be of any kind
        refused = server.http.post(path, json=body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["code"], error["param"]) == (code, param)


@pytest.mark.parametrize("kind", BODIES)
def test_a_dry_run_is_a_job_that_counts(
    server: RunningServer, engine: FakeEngine, kind: str
) -> None:
    accepted = server.http.post("/v1/jobs?dry_run=true&priority=high", json=BODIES[kind])
    assert accepted.status_code == 202
    assert accepted.json()["priority"] == "high"
    ended = server.http.get(f"{accepted.headers['location']}?wait=50").json()
    assert ended["status"] == "completed"
    assert ended["result"] == {"object": "response.input_tokens", "input_tokens": 3}
    assert counted(engine).kind == kind


def test_a_dry_run_of_a_count_is_the_count(server: RunningServer, engine: FakeEngine) -> None:
    for query in ("?dry_run=true", "?dry_run=false", ""):
        body = {"count_tokens": BODIES["chat"]}
        accepted = server.http.post(f"/v1/jobs{query}", json=body)
        server.http.get(f"{accepted.headers['location']}?wait=50")
        assert counted(engine).kind == "chat"


def test_no_dry_run_is_a_job_as_ever(server: RunningServer, engine: FakeEngine) -> None:
    accepted = server.http.post("/v1/jobs?dry_run=false", json=BODIES["completion"])
    ended = server.http.get(f"{accepted.headers['location']}?wait=50").json()
    assert ended["result"]["object"] == "text_completion"


def test_a_count_is_no_response(server: RunningServer, engine: FakeEngine) -> None:
    found = server.http.post("/v1/responses/input_tokens", json={"input": "Hello"})
    job_id = found.headers["x-job-id"]
    assert server.http.get(f"/v1/responses/resp_{job_id}").status_code == 404


def test_nobody_compacts_here(start_server: StartServer) -> None:
    refused = start_server().http.post("/v1/responses/compact", json={"model": "fake"})
    assert refused.status_code == 404
    assert "does not compact responses" in refused.json()["error"]["message"]
