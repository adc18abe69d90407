"""The blocking endpoints, through OpenAI's clients."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, eventually, failure
from openai.types import Completion
from openai.types.chat import ChatCompletion
from servers import RunningServer, StartServer

from mlx_rq.api_stub import long_poll
from mlx_rq.jobs.client.job import Job, fetch

HELLO: Any = [{"role": "user", "content": "Hello"}]


def test_chat(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    answer = server.client().chat.completions.create(model="fake", messages=HELLO)
    assert isinstance(answer, ChatCompletion)
    job_id = answer.id.removeprefix("chatcmpl-")
    assert answer.choices[0].message.content == f"chat for {job_id}"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    assert fetch(job_id).status() == "completed"


def test_completion(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    answer = server.client().completions.create(model="fake", prompt="Once upon", max_tokens=2)
    assert isinstance(answer, Completion)
    assert answer.choices[0].text == f"text for {answer.id.removeprefix('cmpl-')}"


async def _many(server: RunningServer, count: int) -> list[ChatCompletion]:
    async with server.async_client() as client:
        return await asyncio.gather(
            *(client.chat.completions.create(model="fake", messages=HELLO) for _ in range(count))
        )


def test_many_at_once(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    answers = asyncio.run(_many(server, 40))
    assert len({answer.id for answer in answers}) == 40
    for answer in answers:
        assert answer.choices[0].message.content == f"chat for {answer.id[9:]}"


@pytest.mark.parametrize(
    ("kind", "body", "param", "code"),
    [
        ("chat", {"messages": HELLO, "temperature": 200}, "temperature", "decimal_above_max_value"),
        ("chat", {"messages": []}, "messages", "empty_array"),
        ("chat", {}, "messages", "missing_required_parameter"),
        ("chat", {"prompt": "x"}, "messages", "missing_required_parameter"),
        ("chat", {"messages": HELLO, "frobnicate": 1}, "frobnicate", "unknown_parameter"),
        ("chat", {"messages": HELLO, "model": 3}, "model", "invalid_type"),
        ("chat", {"messages": HELLO, "prompt": "x"}, "prompt", "unknown_parameter"),
        ("chat", {"messages": HELLO}, "model", "missing_required_parameter"),
        ("completion", {}, "prompt", "missing_required_parameter"),
        ("completion", {"messages": HELLO}, "prompt", "missing_required_parameter"),
    ],
)
def test_wrong_body(
    server: RunningServer, start_worker: StartWorker, kind: str, body: Any, param: str, code: str
) -> None:
    start_worker()
    path = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}[kind]
    answer = server.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["code"] == code


def test_model_that_nobody_serves(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().chat.completions.create(model="other", messages=HELLO)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "Served now: fake." in caught.value.message


def test_worker_that_came_a_moment_ago_is_seen(
    server: RunningServer, start_worker: StartWorker
) -> None:
    with pytest.raises(openai.NotFoundError, match="No worker is alive"):
        server.client().chat.completions.create(model="fake", messages=HELLO)
    start_worker()
    eventually(lambda: bool(server.client().models.list().data), "the worker's record")
    assert server.client().chat.completions.create(model="fake", messages=HELLO).id


def test_failed_job(server: RunningServer, start_worker: StartWorker) -> None:
    refusal = failure("context_length_exceeded", "Too long.")
    start_worker(FakeEngine(refuse=lambda task: refusal))
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().chat.completions.create(model="fake", messages=HELLO)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_answer_comes_before_the_clients_read_timeout(
    server: RunningServer, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    wait, patience = long_poll.wait, []

    async def and_no_longer(request: Any, service: Any, job: Job, seconds: float) -> Any:
        patience.append(seconds)
        await asyncio.to_thread(engine.wait_for_tasks, 1)
        return await wait(request, service, job, 0.01)

    monkeypatch.setattr(long_poll, "wait", and_no_longer)
    with pytest.raises(openai.APIStatusError) as caught:
        # With retries: the server says that there should be none.
        server.client(max_retries=2, timeout=30.0).chat.completions.create(
            model="fake", messages=HELLO
        )
    assert patience == [27.0]
    assert caught.value.status_code == 504
    job_id = caught.value.response.headers["x-job-id"]
    assert job_id in caught.value.message
    assert engine.wait_for_tasks(1) == [job_id]
    engine.release()
    assert Job(job_id).result(timeout=PATIENCE)["id"] == f"chatcmpl-{job_id}"


def test_client_that_hangs_up_cancels_its_job(
    server: RunningServer, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    (job_id,) = _hang_up(server, engine)
    engine.wait_until(lambda engine: engine.cancelled == [job_id])
    eventually(lambda: fetch(job_id).status() == "cancelled")


def test_job_of_client_that_hangs_up_can_be_kept(
    start_server: StartServer, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    server = start_server(keep_on_disconnect=True)
    (job_id,) = _hang_up(server, engine)
    eventually(lambda: server.server.config.app.state.service.requests.waiting == 0)
    engine.release()
    assert Job(job_id).result(timeout=PATIENCE)["id"] == f"chatcmpl-{job_id}"


def test_job_with_idempotency_key_outlives_its_client(
    server: RunningServer, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    (job_id,) = _hang_up(server, engine, {"idempotency-key": "k"})
    engine.release()
    again = server.client().chat.completions.create(
        model="fake", messages=HELLO, extra_headers={"idempotency-key": "k"}
    )
    assert again.id == f"chatcmpl-{job_id}"


def _hang_up(
    server: RunningServer, engine: FakeEngine, headers: dict[str, str] | None = None
) -> list[str]:
    """Starts a request, and breaks the connection once the engine has the job."""

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as client:
            await client.post(
                "/v1/chat/completions", json={"model": "fake", "messages": HELLO}, headers=headers
            )

    async def ask_and_go() -> list[str]:
        asking = asyncio.create_task(ask())
        job_ids = await asyncio.to_thread(engine.wait_for_tasks, 1)
        asking.cancel()
        return job_ids

    return asyncio.run(ask_and_go())


def test_idempotency_key(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    headers = {"idempotency-key": "once"}
    create = server.client(max_retries=2).chat.completions.create
    first = create(model="fake", messages=HELLO, extra_headers=headers)
    second = create(model="fake", messages=HELLO, extra_headers=headers)
    assert first.id == second.id
    with pytest.raises(openai.ConflictError) as caught:
        create(model="fake", messages=HELLO, seed=1, extra_headers=headers)
    assert caught.value.code == "idempotency_conflict"
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_closing_server_lets_waiting_clients_go(
    start_server: StartServer, start_worker: StartWorker
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    server = start_server()

    async def ask_and_close() -> openai.APIStatusError:
        async with server.async_client(max_retries=2) as client:
            asking = asyncio.ensure_future(
                client.chat.completions.create(model="fake", messages=HELLO)
            )
            await asyncio.to_thread(engine.wait_for_tasks, 1)
            server.server.handle_exit(15, None)
            with pytest.raises(openai.APIStatusError) as caught:
                await asking
            return caught.value

    error = asyncio.run(ask_and_close())
    assert error.status_code == 503
    assert error.code == "server_closing"
    assert fetch(error.response.headers["x-job-id"]).status() == "in_progress"
