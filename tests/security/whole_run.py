"""One run of everything that touches Redis, each part under its own URL.

Submissions of every kind, waiting in every way, cancellation, failure, batches, streams, stored
answers, webhooks, the command line, recovery after a dead worker.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import httpx
from batch_helpers import batch_lines, write_jsonl
from click.testing import CliRunner
from fakes import PATIENCE, FakeEngine, RunningWorker, eventually, failure, worker_in_thread
from openai import OpenAI
from redis import Redis
from servers import RunningServer, answer_any, run_server

from mlx_rq import Job, as_completed, submit, submit_many
from mlx_rq import map as map_prompts
from mlx_rq.api_stub.sampler import Sampler
from mlx_rq.api_stub.settings import Settings
from mlx_rq.engine.interface import Partial, Task
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.leases.recovery import reap

HI = [{"role": "user", "content": "Say hi."}]
SECRET = b"a secret of more than 24 bytes"
FAILS = 13
"""The seed of jobs that fail."""

HELD = 14
"""The seed of jobs that run until they are released."""


@dataclass(frozen=True)
class Urls:
    """How each part logs in."""

    producer: str
    server: str
    worker: str


class Engine(FakeEngine):
    """Answers all but those that are to fail, or to be held."""

    def __init__(self) -> None:
        super().__init__(hold=True, answer_with=answer_any, refuse=self._refusal)

    @staticmethod
    def _refusal(task: Task) -> Any:
        return failure("no") if getattr(task.request, "seed", None) == FAILS else None

    def add(self, tasks: Any) -> Any:
        refused = super().add(tasks)
        for task in tasks:
            if getattr(task.request, "seed", None) != HELD:
                self.release(task.id)
        return refused


@contextmanager
def running(urls: Urls, folder: Path) -> Iterator[tuple[RunningWorker, RunningServer]]:
    """A worker and a server at work."""
    settings = Settings(
        data_dir=folder,
        redis_url=urls.server,
        jobs_per_key=1000,
        webhook_secrets=(SECRET,),
        webhook_networks=(ip_network("127.0.0.0/8"),),
    )
    with (
        worker_in_thread(urls.worker, Engine(), lease=2, name="worker") as worker,
        run_server(settings) as server,
    ):
        health = httpx.Client(base_url=server.url)
        eventually(lambda: health.get("/health").json()["status"] == "ok", "the worker")
        yield worker, server


def produce(url: str, worker: RunningWorker, folder: Path) -> None:
    """Does all that a producer does."""
    job = submit(messages=HI, redis_url=url)
    assert job.result(PATIENCE)["object"] == "chat.completion"
    assert (job.status(), job.info()["status"]) == ("completed", "completed")
    once = submit(messages=HI, idempotency_key="k", redis_url=url)
    assert submit(messages=HI, idempotency_key="k", redis_url=url) == once
    many = submit_many([{"prompt": f"Say {n}."} for n in range(5)], redis_url=url)
    assert set(as_completed(many, timeout=PATIENCE)) == set(many)
    assert asyncio.run(_awaited(submit(messages=HI, redis_url=url)))["object"]
    failed = submit(messages=HI, seed=FAILS, redis_url=url)
    eventually(lambda: failed.status() == "failed", "the failure")
    first = submit(input="Hi", redis_url=url)
    response = first.result(PATIENCE)["id"]
    submit(input="And?", previous_response_id=response, redis_url=url).result(PATIENCE)
    runs = submit(messages=HI, seed=HELD, redis_url=url)
    eventually(lambda: runs.status() == "in_progress", "the job")
    assert runs.cancel()
    waits = submit(messages=HI, model="nobody's", redis_url=url)
    assert waits.cancel()
    many[0].delete()
    texts = map_prompts([{"n": 1}, {"n": 2}], "Say {n}.", redis_url=url)
    assert len(list(texts)) == 2
    _command_line(url, folder)


async def _awaited(job: Job) -> dict[str, Any]:
    return await job


def _command_line(url: str, folder: Path) -> None:
    lines = write_jsonl(folder / "in.jsonl", batch_lines(5))
    hook = "http://127.0.0.1:9/hook"
    for arguments in (
        ("submit", "Hi", "--wait"),
        ("status",),
        ("status", "--json"),
        ("limits",),
        ("cancel", "--queued", "--yes"),
        ("batch", str(lines), "-o", str(folder / "out.jsonl"), "--quiet", "--webhook", hook),
    ):
        ran = CliRunner().invoke(main, arguments, env={"MLX_RQ_REDIS_URL": url})
        assert ran.exit_code == 0, (arguments, ran.output, ran.exception)


@contextmanager
def _receiver() -> Iterator[tuple[str, SimpleQueue[bytes]]]:
    """Takes webhooks; gives its URL and what came."""
    came: SimpleQueue[bytes] = SimpleQueue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.put(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/hook", came
        server.shutdown()


def knock(server: RunningServer, worker: RunningWorker, connection: Redis) -> None:
    """Does all that a client of the server does."""
    client: Any = server.client()
    chat = {"model": "default", "messages": HI}
    client.chat.completions.create(**chat)
    stored = client.chat.completions.create(**chat, store=True, metadata={"a": "b"})
    client.chat.completions.update(stored.id, metadata={"a": "c"})
    assert client.chat.completions.retrieve(stored.id).metadata == {"a": "c"}
    assert stored.id in [one.id for one in client.chat.completions.list()]
    client.chat.completions.delete(stored.id)
    _stream(client, worker, chat)
    _background(client)
    _batch(client)
    for path in ("/health", "/metrics", "/v1/models"):
        assert server.http.get(path).status_code == 200
    _page(server)
    with _receiver() as (good, came):
        taken, refused = (
            server.http.post("/v1/jobs", json=chat, params={"webhook": hook}).json()["id"]
            for hook in (good, f"{server.url}/health")  # that one takes no POST
        )
        for job in (taken, refused):
            assert server.http.get(f"/v1/jobs/{job}?wait=50").json()["status"] == "completed"
        assert came.get(timeout=PATIENCE)
        eventually(lambda: connection.zscore(keys.WEBHOOKS, taken) is None, "its end")
    for job in (taken, refused):
        assert server.http.delete(f"/v1/jobs/{job}").status_code == 200


def _page(server: RunningServer) -> None:
    http = server.http
    http.headers["x-mlx-rq-page"] = "1"
    job = http.post("/v1/jobs", json={"messages": HI, "seed": FAILS}).json()["id"]
    http.get(f"/v1/jobs/{job}?wait=50")
    again = http.post(f"/page/jobs/{job}/retry").json()["id"]
    assert again != job
    sampler = Sampler(server.server.config.app.state.service.redis_url)  # type: ignore[union-attr]
    for _ in range(2):
        sampler.look()
    params = {"search": "Hi", "job": job}
    with http.stream("GET", "/page/events", params=params) as events:
        told = next(line for line in events.iter_lines() if line.startswith("event: history"))
        assert told


def _stream(client: OpenAI, worker: RunningWorker, chat: Any) -> None:
    engine = worker.engine
    before = len(engine.added)
    stream: Any = client.chat.completions.create(**chat, stream=True, seed=HELD)
    engine.wait_for_tasks(before + 1)
    task = engine.added[-1].id
    engine.say(task, Partial(0, content="chat"))
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            engine.release(task)  # its beginning has come: what the worker published


def _background(client: OpenAI) -> None:
    created = client.responses.create(model="default", input="Hi", background=True)
    eventually(lambda: client.responses.retrieve(created.id).status == "completed", "the response")
    client.responses.input_items.list(created.id)
    client.responses.input_tokens.count(input="And now?", previous_response_id=created.id)
    client.responses.delete(created.id)


def _batch(client: OpenAI) -> None:
    body = {"model": "fake", "messages": HI}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed", "the batch")


def recover(urls: Urls) -> None:
    """What becomes of the jobs of a worker that dies, and of one that stops."""
    held = submit(messages=HI, seed=HELD, model="other", redis_url=urls.producer)
    engine = FakeEngine("other", hold=True)
    with worker_in_thread(urls.worker, engine, name="dies") as worker:
        engine.wait_for_tasks(1)
        worker.claim_no_more()
        assert reap(new_connection(urls.worker), "dies") == 1  # as its supervisor does
    assert held.cancel()


def run_all(urls: Urls, folder: Path) -> None:
    """The whole run."""
    with running(urls, folder) as (worker, server):
        produce(urls.producer, worker, folder)
        with new_connection(urls.server) as connection:
            knock(server, worker, connection)
    recover(urls)
