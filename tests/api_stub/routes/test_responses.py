"""Responses through OpenAI's client: now and in the background, cancelled, deleted, continued."""

from typing import Any

import openai
import pytest
from fakes import FakeEngine, StartWorker, eventually, failure
from servers import RunningServer, answer_any

from mlx_rq.jobs.openai.response_object import job_of


@pytest.fixture
def engine(start_worker: StartWorker) -> FakeEngine:
    engine = FakeEngine(answer_with=answer_any)
    start_worker(engine)
    return engine


def _ended(server: RunningServer, response: Any) -> Any:
    retrieve = server.client().responses.retrieve
    eventually(lambda: retrieve(response.id).status not in ("queued", "in_progress"))
    return retrieve(response.id)


def test_response_that_is_waited_for(server: RunningServer, engine: FakeEngine) -> None:
    response = server.client().responses.create(
        model="fake", input="Hello", instructions="Be brief."
    )
    assert response.status == "completed"
    assert response.output_text == f"response for {job_of(response.id)}"
    assert response.instructions == "Be brief."
    assert response.usage is not None
    assert response.usage.total_tokens == 5
    assert server.client().responses.retrieve(response.id) == response
    included: Any = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
    assert server.client().responses.retrieve(response.id, **included) == response
    assert len(server.client().responses.input_items.list(response.id, **included).data) == 1


def test_response_in_the_background(server: RunningServer, engine: FakeEngine) -> None:
    engine.hold()
    create = server.client().responses.create
    response = create(model="fake", input="Hello", background=True, metadata={"a": "b"})
    assert response.status in ("queued", "in_progress")
    assert response.background
    assert response.output == []
    assert response.metadata == {"a": "b"}
    engine.wait_for_tasks(1)
    eventually(lambda: server.client().responses.retrieve(response.id).status == "in_progress")
    engine.release()
    ended = _ended(server, response)
    assert ended.status == "completed"
    assert ended.output_text == f"response for {job_of(response.id)}"
    assert abs(ended.created_at - response.created_at) < 60


def test_cancel(server: RunningServer, engine: FakeEngine) -> None:
    engine.hold()
    client = server.client()
    response = client.responses.create(model="fake", input="Hello", background=True)
    engine.wait_for_tasks(1)
    for _ in range(2):
        cancelled = client.responses.cancel(response.id)
        assert (cancelled.status, cancelled.error) == ("cancelled", None)
    engine.wait_until(lambda engine: engine.cancelled == [job_of(response.id)])


def test_completed_response_cannot_be_cancelled(server: RunningServer, engine: FakeEngine) -> None:
    response = server.client().responses.create(model="fake", input="Hello")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a completed response"):
        server.client().responses.cancel(response.id)
    assert server.client().responses.retrieve(response.id).status == "completed"


def test_failed_response_in_the_background(server: RunningServer, engine: FakeEngine) -> None:
    engine.refuse = lambda task: failure("context_length_exceeded", "Too long.")
    response = server.client().responses.create(model="fake", input="Hello", background=True)
    failed = _ended(server, response)
    assert failed.status == "failed"
    assert failed.error.code == "invalid_prompt"
    assert failed.error.message == "Too long."


def test_delete(server: RunningServer, engine: FakeEngine) -> None:
    client = server.client()
    response = client.responses.create(model="fake", input="Hello")
    client.responses.delete(response.id)
    for call in (
        client.responses.retrieve,
        client.responses.cancel,
        client.responses.delete,
        client.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call(response.id)
        assert f"Response with id '{response.id}' not found." in caught.value.message
    raw = server.http.delete(f"/v1/responses/{client.responses.create(model='fake', input='x').id}")
    assert raw.json()["deleted"] is True
    assert raw.json()["object"] == "response"


def test_delete_of_a_running_response_cancels_it(server: RunningServer, engine: FakeEngine) -> None:
    engine.hold()
    response = server.client().responses.create(model="fake", input="Hello", background=True)
    engine.wait_for_tasks(1)
    server.client().responses.delete(response.id)
    engine.wait_until(lambda engine: engine.cancelled == [job_of(response.id)])


def test_items_of_earlier_answers_are_named_by_their_ids(
    server: RunningServer, engine: FakeEngine
) -> None:
    """As the Vercel AI SDK sends them."""
    create = server.client().responses.create
    hello: Any = {"role": "user", "content": "Hello"}
    hosted: Any = {"type": "mcp_approval_request", "id": "mcpr_1"}
    first = create(model="fake", input=[hosted, hello])
    (item,) = first.output
    for reference in ({"type": "item_reference", "id": item.id}, {"id": item.id}):
        second = create(model="fake", input=[hello, reference, hello])  # type: ignore[list-item]
        given = server.client().responses.input_items.list(second.id, order="asc").data
        assert given[1] == item
    told: Any = engine.added[-1].request
    assert [(m.role, m.content) for m in told.generated_from().messages] == [
        ("user", "Hello"),
        ("assistant", f"response for {job_of(first.id)}"),
        ("user", "Hello"),
    ]
    raw = server.http.get(f"/v1/responses/{first.id}/input_items?order=asc").json()
    assert [one["type"] for one in raw["data"]] == ["mcp_approval_request", "message"]
    unknown: Any = [hello, {"type": "item_reference", "id": "fc_x"}]
    with pytest.raises(openai.BadRequestError, match="Item with id 'fc_x' not found") as refused:
        create(model="fake", input=unknown)
    assert refused.value.param == "input[1].id"


def test_going_on_from_an_earlier_response(server: RunningServer, engine: FakeEngine) -> None:
    create = server.client().responses.create
    first = create(model="fake", input="One", instructions="Be brief.")
    second = create(model="fake", input="Two", previous_response_id=first.id)
    third = create(
        model="fake",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "Three"}]}],
        previous_response_id=second.id,
    )
    assert third.previous_response_id == second.id
    assert third.instructions is None
    items = server.client().responses.input_items.list(third.id, order="asc", limit=2)
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == [
        "One",
        first.output_text,
        "Two",
        second.output_text,
        "Three",
    ]
    newest = server.client().responses.input_items.list(third.id, limit=1).data[0]
    assert newest.content[0].text == "Three"  # type: ignore[union-attr]


def test_earlier_response_that_is_not_there(server: RunningServer, engine: FakeEngine) -> None:
    create = server.client().responses.create
    for previous in ("resp_nothing", "chatcmpl-x"):
        with pytest.raises(openai.BadRequestError) as caught:
            create(model="fake", input="Two", previous_response_id=previous)
        assert caught.value.code == "previous_response_not_found"
    engine.hold()
    running = create(model="fake", input="One", background=True)
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="fake", input="Two", previous_response_id=running.id)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "previous_response_id")


def test_response_that_is_not_stored(server: RunningServer, engine: FakeEngine) -> None:
    create = server.client().responses.create
    response = create(model="fake", input="Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        server.client().responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="fake", input="Hello", store=False, background=True)
    assert caught.value.param == "store"


def test_other_jobs_are_no_responses(server: RunningServer, engine: FakeEngine) -> None:
    job_id = server.http.post("/v1/jobs", json={"prompt": "x"}).json()["id"]
    with pytest.raises(openai.NotFoundError):
        server.client().responses.retrieve(f"resp_{job_id}")


def test_window_sets_the_priority(server: RunningServer, engine: FakeEngine) -> None:
    for window, priority in (("soonest", "high"), ("2h", "default"), ("8h", "low")):
        body = {
            "model": "fake",
            "input": "x",
            "background": True,
            "background_options": {"completion_window": window},
        }
        job_id = job_of(server.http.post("/v1/responses", json=body).json()["id"])
        assert server.http.get(f"/v1/jobs/{job_id}").json()["priority"] == priority


def test_wrong_body(server: RunningServer, engine: FakeEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().responses.create(model="fake", input="x", max_output_tokens=3)
    assert caught.value.code == "integer_below_min_value"
    assert server.http.post("/v1/responses", json={}).json()["error"]["param"] == "input"
