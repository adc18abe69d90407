"""Webhooks: signed, sent again until they are taken, to no private address, over restarts."""

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import openai
import pytest
from batch_helpers import batch_lines, write_jsonl
from click.testing import CliRunner
from fakes import PATIENCE, FakeEngine, StartWorker, eventually, failure, free_port
from redis import Redis
from servers import RunningServer, StartServer, run_server

from mlx_rq import Job, submit
from mlx_rq.api_stub.http_post import PostFailed, post
from mlx_rq.api_stub.settings import Settings
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.webhooks import (
    CLAIM_SECONDS,
    DELAYS,
    anybody_delivers,
    check_url,
    claim_due,
    is_allowed,
    read_networks,
    read_secrets,
)
from mlx_rq.worker.cli.main import main

CHAT: Any = {"messages": [{"role": "user", "content": "Hello"}]}
SECRET = b"a secret of more than 24 bytes"
ENCODED = "whsec_" + base64.b64encode(SECRET).decode()
LOOPBACK = (ip_network("127.0.0.0/8"),)


class Receiver:
    """Takes what is posted to it, and answers with the statuses that it is given (then 204)."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.came = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): text for name, text in self.headers.items()}
                with receiver.came:
                    status = receiver.statuses.pop(0) if receiver.statuses else 204
                    receiver.requests.append((self.path, headers, body))
                    receiver.came.notify_all()
                self.send_response(status)
                if status == 302:
                    self.send_header("location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook?a=b"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def wait_for(self, count: int) -> list[tuple[str, dict[str, str], bytes]]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.requests) >= count, PATIENCE)
            return list(self.requests)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_rq.api_stub.webhooks.LOOK_SECONDS", 0.02)


@pytest.fixture
def sending(start_server: StartServer) -> RunningServer:
    """A server that sends webhooks, also to this machine."""
    return start_server(webhook_secrets=(SECRET,), webhook_networks=LOOPBACK)


def ask(server: RunningServer, url: str) -> Any:
    return server.http.post("/v1/jobs", json=CHAT, params={"webhook": url})


def nothing_left(connection: Redis) -> None:
    eventually(lambda: not connection.exists(keys.WEBHOOKS, keys.WEBHOOK_TRIES), "the end of it")


def test_a_receiver_is_told_how_its_job_ended(
    sending: RunningServer, receiver: Receiver, start_worker: StartWorker, connection: Redis
) -> None:
    start_worker()
    job_id = ask(sending, receiver.url).json()["id"]
    ((path, headers, body),) = receiver.wait_for(1)
    assert path == "/hook?a=b"
    assert headers["content-type"] == "application/json"
    client = openai.OpenAI(api_key="none", webhook_secret=ENCODED)
    event: Any = client.webhooks.unwrap(body, headers)
    assert (event.id, event.type) == (f"evt_{job_id}", "job.completed")
    assert headers["webhook-id"] == event.id
    assert json.loads(body)["data"] == sending.http.get(f"/v1/jobs/{job_id}").json()
    assert json.loads(body)["data"]["result"]["choices"][0]["message"]["content"] == (
        f"chat for {job_id}"
    )
    assert abs(event.created_at - time.time()) < 60
    for tampered in (body + b" ", body.replace(b"completed", b"cancelled")):
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.unwrap(tampered, headers)
    nothing_left(connection)


@pytest.mark.parametrize("end", ["failed", "cancelled"])
def test_other_ends_are_told_too(
    sending: RunningServer, receiver: Receiver, start_worker: StartWorker, end: str
) -> None:
    engine = FakeEngine(hold=True, answer_with=lambda task: failure("broken"))
    start_worker(engine)
    job_id = ask(sending, receiver.url).json()["id"]
    engine.wait_for_tasks(1)
    if end == "failed":
        engine.release()
    else:
        sending.http.delete(f"/v1/jobs/{job_id}")
    ((_, _, body),) = receiver.wait_for(1)
    event = json.loads(body)
    code = {"failed": "broken", "cancelled": "cancelled"}[end]
    assert (event["type"], event["data"]["error"]["code"]) == (f"job.{end}", code)


def test_jobs_without_a_webhook_are_not_listed(
    sending: RunningServer, start_worker: StartWorker, connection: Redis
) -> None:
    start_worker()
    job = submit(CHAT)
    job.result(timeout=PATIENCE)
    assert connection.exists(keys.WEBHOOKS) == 0


def test_a_producer_in_python_may_name_one(
    sending: RunningServer, receiver: Receiver, start_worker: StartWorker
) -> None:
    start_worker()
    job = submit(CHAT, webhook=receiver.url)
    ((_, headers, _),) = receiver.wait_for(1)
    assert headers["webhook-id"] == f"evt_{job.id}"
    with pytest.raises(RequestError, match="an http or https URL"):
        submit(CHAT, webhook="ftp://example.org")


def test_the_end_of_a_batch_of_the_command_line_is_told(
    sending: RunningServer,
    receiver: Receiver,
    start_worker: StartWorker,
    connection: Redis,
    tmp_path: Path,
) -> None:
    receiver.statuses = [410]
    start_worker()
    lines = write_jsonl(tmp_path / "in.jsonl", batch_lines(2))
    for output in ("nobody-wants.jsonl", "out.jsonl"):
        arguments = ["batch", str(lines), "-o", str(tmp_path / output), "--webhook", receiver.url]
        eventually(lambda: anybody_delivers(connection), "a server that says that it delivers")
        ran = CliRunner().invoke(main, arguments)
        assert ran.exit_code == 0
        assert "no HTTP server delivers" not in ran.stderr
    _, (_, headers, body) = receiver.wait_for(2)
    client = openai.OpenAI(api_key="none", webhook_secret=ENCODED)
    event: Any = client.webhooks.unwrap(body, headers)
    assert (event.id, event.type) == (headers["webhook-id"], "batch.completed")
    assert event.data.id.startswith("batch_")
    assert json.loads(body)["data"]["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
    nothing_left(connection)
    assert list(connection.scan_iter("mlx-rq:webhook-event:*")) == []


@pytest.mark.parametrize("told", [None, b"{", b'{"url": "https://x.org"}', b'{"event": {}}'])
def test_an_event_that_cannot_be_read_is_given_up(
    sending: RunningServer, connection: Redis, told: bytes | None
) -> None:
    if told is not None:
        connection.set(keys.webhook_event("batch_1"), told)
    connection.zadd(keys.WEBHOOKS, {"batch_1": 0})
    nothing_left(connection)


def test_what_was_not_taken_is_sent_again(
    sending: RunningServer,
    receiver: Receiver,
    start_worker: StartWorker,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_rq.jobs.queue.webhooks.DELAYS", (0.01, 0.02, 0.03))
    receiver.statuses = [500, 302, 404]
    start_worker()
    ask(sending, receiver.url)
    requests = receiver.wait_for(4)
    nothing_left(connection)
    assert len({headers["webhook-id"] for _, headers, _ in requests}) == 1
    assert len({body for _, _, body in requests}) == 1
    assert len(receiver.requests) == 4


def test_it_is_given_up_in_the_end(
    sending: RunningServer,
    receiver: Receiver,
    start_worker: StartWorker,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_rq.jobs.queue.webhooks.DELAYS", (0.01, 0.01))
    receiver.statuses = [500] * 10
    start_worker()
    ask(sending, receiver.url)
    receiver.wait_for(3)
    nothing_left(connection)
    assert len(receiver.requests) == 3


def test_the_next_try_comes_later_and_later(
    sending: RunningServer,
    receiver: Receiver,
    start_worker: StartWorker,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert tuple(sorted(DELAYS)) == DELAYS
    assert sum(DELAYS) > 12 * 3600
    monkeypatch.setattr("mlx_rq.jobs.queue.webhooks.DELAYS", (1000, 2000))
    receiver.statuses = [500]
    start_worker()
    began = redis_time(connection)
    job_id = ask(sending, receiver.url).json()["id"]
    receiver.wait_for(1)
    due: Any = lambda: connection.zscore(keys.WEBHOOKS, job_id)  # noqa: E731
    eventually(lambda: due() >= began + 1000, "the next try")
    assert due() <= redis_time(connection) + 1200


def test_a_receiver_that_wants_no_more_gets_no_more(
    sending: RunningServer, receiver: Receiver, start_worker: StartWorker, connection: Redis
) -> None:
    receiver.statuses = [410]
    start_worker()
    ask(sending, receiver.url)
    receiver.wait_for(1)
    nothing_left(connection)
    assert len(receiver.requests) == 1


def test_a_job_that_ends_while_no_server_is_open_is_told_later(
    start_server: StartServer,
    receiver: Receiver,
    start_worker: StartWorker,
    redis_url: str,
    tmp_path: Path,
) -> None:
    engine = FakeEngine(hold=True)
    start_worker(engine)
    options: Any = {"webhook_secrets": (SECRET,), "webhook_networks": LOOPBACK}
    with run_server(Settings(data_dir=tmp_path, redis_url=redis_url, **options)) as first:
        job_id = ask(first, receiver.url).json()["id"]
    engine.release()
    Job(job_id).result(timeout=PATIENCE)
    assert receiver.requests == []
    start_server(**options)
    ((_, headers, _),) = receiver.wait_for(1)
    assert headers["webhook-id"] == f"evt_{job_id}"


def test_what_a_server_had_taken_when_it_died_is_taken_again(
    start_server: StartServer,
    receiver: Receiver,
    start_worker: StartWorker,
    connection: Redis,
    redis_url: str,
) -> None:
    start_worker()
    job = submit(CHAT, webhook=receiver.url)
    job.result(timeout=PATIENCE)
    assert [one.name for one in claim_due(connection, 5)] == [job.id]
    assert claim_due(connection, 5) == []
    due_again = connection.zscore(keys.WEBHOOKS, job.id)
    assert due_again == pytest.approx(redis_time(connection) + CLAIM_SECONDS, abs=5)
    connection.zadd(keys.WEBHOOKS, {job.id: due_again - CLAIM_SECONDS})  # a minute later
    start_server(webhook_secrets=(SECRET,), webhook_networks=LOOPBACK)
    receiver.wait_for(1)
    nothing_left(connection)


def test_a_job_that_is_forgotten_meanwhile(
    sending: RunningServer, start_worker: StartWorker, connection: Redis
) -> None:
    connection.zadd(keys.WEBHOOKS, {"0" * 32: 0})
    nothing_left(connection)


def test_off_unless_it_is_enabled(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    refused = ask(server, "https://example.org")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "webhook")
    assert "--webhook-secret-file" in error["message"]


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:8000/", "http://localhost/", "http://[::1]/", "http://10.1.2.3/"),
        *("http://169.254.169.254/latest/meta-data", "http://[::ffff:127.0.0.1]/"),
        *("https://user:pass@example.org/", "https://example.org/#part", "example.org", "https://"),
        *("file:///etc/passwd", "https://example.org/\r\nx: y", "https://example.org:port/"),
        "https://example.org/" + "x" * 2048,
    ],
)
def test_urls_that_are_refused(
    start_server: StartServer, start_worker: StartWorker, url: str
) -> None:
    start_worker()
    refused = ask(start_server(webhook_secrets=(SECRET,)), url)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "webhook"), error


@pytest.mark.parametrize("url", ["https://example.org", "http://a.b:81/c?d=%20", "https://8.8.8.8"])
def test_urls_that_are_good(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        *(("8.8.8.8", True), ("2606:4700::1111", True), ("127.0.0.1", False), ("::1", False)),
        *(("10.0.0.1", False), ("172.16.0.1", False), ("192.168.1.1", False), ("0.0.0.0", False)),
        *(("169.254.169.254", False), ("fe80::1", False), ("fd00::1", False), ("::", False)),
        *(("100.64.0.1", False), ("224.0.0.1", False), ("ff02::1", False), ("240.0.0.1", False)),
        *(("::ffff:10.0.0.1", False), ("2002:7f00:1::", False), ("64:ff9b::a00:1", False)),
        *(("fec0::1", False), ("64:ff9b:1::1", False), ("::10.0.0.1", False)),
        *(("::ffff:8.8.8.8", True), ("64:ff9b::808:808", True), ("10.0.0.255", False)),
    ],
)
def test_only_public_addresses_are_allowed(address: str, allowed: bool) -> None:
    assert is_allowed(address) is allowed
    assert is_allowed(address, [ip_network("0.0.0.0/0"), ip_network("::/0")])


def test_a_network_can_be_allowed() -> None:
    networks = read_networks(["10.0.0.0/24", "fd00::/8"])
    assert [is_allowed(one, networks) for one in ("10.0.0.9", "10.0.1.9", "fd12::1")] == [
        True,
        False,
        True,
    ]
    with pytest.raises(RequestError, match=r"10\.0\.0\.1/8"):
        read_networks(["10.0.0.1/8"])


def _post(url: str, **options: Any) -> int:
    return asyncio.run(post(url, {}, b"{}", **options))


def test_the_address_that_was_looked_at_is_the_one_connected_to(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that leads elsewhere the second time it is asked gains nothing."""
    asked: list[str] = []

    async def resolve(self: Any, host: str, port: int, **options: Any) -> Any:
        asked.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", resolve)
    url = receiver.url.replace("127.0.0.1", "hook.example")
    assert _post(url, networks=LOOPBACK) == 204
    ((_, headers, _),) = receiver.requests
    assert headers["host"] == url.split("/")[2]
    assert asked[0] == "hook.example"
    assert "hook.example" not in asked[1:]  # the connection was made to the address
    with pytest.raises(PostFailed, match=r"127\.0\.0\.1 is no public address"):
        _post(url)
    assert len(receiver.requests) == 1


def test_one_address_of_a_name_that_is_not_allowed_is_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def resolve(self: Any, host: str, port: int, **options: Any) -> Any:
        return [(2, 1, 6, "", ("8.8.8.8", port)), (2, 1, 6, "", ("10.0.0.1", port))]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", resolve)
    with pytest.raises(PostFailed, match=r"10\.0\.0\.1"):
        _post("http://hook.example/")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"HTTP/1.1 103 Early\r\na: b\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", None),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "RemoteProtocolError: illegal status line"),
        (b"", "RemoteProtocolError: Server disconnected"),
        (b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, "RemoteProtocolError: .*too long"),
        (None, "no answer within"),
    ],
)
def test_answers_that_are_none(answer: bytes | None, fault: str | None) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if answer is None:
            await reader.read()
        else:
            writer.write(answer)
        writer.close()

    async def ask() -> int:
        port = free_port()
        async with await asyncio.start_server(serve, "127.0.0.1", port):
            url = f"http://127.0.0.1:{port}/"
            timeout = 0.5 if answer is None else PATIENCE
            return await post(url, {}, b"{}", networks=LOOPBACK, timeout=timeout)

    if fault is None:
        assert asyncio.run(ask()) == 200
        return
    with pytest.raises(PostFailed, match=fault):
        asyncio.run(ask())


def test_what_a_url_holds_is_not_logged(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    url = receiver.url.replace("/hook?a=b", "/token-in-path?and=token-in-query")
    assert _post(url, networks=LOOPBACK) == 204
    assert receiver.requests[0][0] == "/token-in-path?and=token-in-query"
    assert caplog.text
    assert "token-in" not in caplog.text


def test_nobody_there_is_said_as_the_system_says_it() -> None:
    with pytest.raises(PostFailed, match=r"ConnectionRefusedError: .*127\.0\.0\.1"):
        _post(f"http://127.0.0.1:{free_port()}/", networks=LOOPBACK)


def test_secrets_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_text(f"# new, then old\n{ENCODED}\n\nanother secret, in plain text\n")
    assert read_secrets(file) == (SECRET, b"another secret, in plain text")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "holds no secret"),
        ("short", "less than 24 bytes"),
        ("whsec_c2hvcnQ=", "less than 24 bytes"),
        ("whsec_*", "not base64"),
    ],
)
def test_files_without_a_secret(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "secrets"
    file.write_text(text)
    with pytest.raises(RequestError, match=fault):
        read_secrets(file)


def test_both_secrets_of_a_change_are_good(
    start_server: StartServer, receiver: Receiver, start_worker: StartWorker
) -> None:
    start_worker()
    old = b"the secret of before, long as well"
    ask(start_server(webhook_secrets=(SECRET, old), webhook_networks=LOOPBACK), receiver.url)
    ((_, headers, body),) = receiver.wait_for(1)
    for secret in (ENCODED, old.decode()):
        client = openai.OpenAI(api_key="none", webhook_secret=secret)
        client.webhooks.verify_signature(body, headers)


def test_command_refuses_a_wrong_network() -> None:
    ended = CliRunner().invoke(main, ["serve", "--webhook-allow", "10.0.0.1/8"])
    assert ended.exit_code == 1
    assert "webhook_allow" in ended.output
