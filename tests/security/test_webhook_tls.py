"""Webhooks through TLS: the connection goes to an address, the certificate must be for the name."""

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE

from mlx_rq.api_stub.http_post import PostFailed, post
from mlx_rq.jobs.queue.webhooks import read_networks

NAME = "hook.example"
LOOPBACK = read_networks(["127.0.0.0/8"])


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for `NAME` that signs itself, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "ca.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN={NAME}"),
            *("-addext", f"subjectAltName=DNS:{NAME}"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


async def _resolve_here(self: Any, host: str, port: int, **options: Any) -> Any:
    """Every name leads to this machine."""
    return [(2, 1, 6, "", ("127.0.0.1", port))]


async def _post_to_tls_server(host: str, certificate: tuple[Path, Path]) -> tuple[int, list[str]]:
    """Posts to a TLS server on this machine; returns its status, and the names it was asked for."""
    asked: list[str] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.sni_callback = lambda _, name, __: asked.append(str(name))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"https://{host}:{port}/"
        status = await post(url, {}, b"{}", networks=LOOPBACK, timeout=PATIENCE)
    return status, asked


@pytest.fixture
def trusted(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The certificate, which this machine trusts; names lead to this machine."""
    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", _resolve_here)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    return certificate


def test_the_receiver_is_asked_for_by_its_name(trusted: tuple[Path, Path]) -> None:
    assert asyncio.run(_post_to_tls_server(NAME, trusted)) == (204, [NAME])


def test_no_proxy_of_the_environment_is_asked(
    trusted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert asyncio.run(_post_to_tls_server(NAME, trusted))[0] == 204


def test_a_certificate_for_another_name_is_refused(trusted: tuple[Path, Path]) -> None:
    with pytest.raises(PostFailed, match=r"not valid for 'other\.example'"):
        asyncio.run(_post_to_tls_server("other.example", trusted))


def test_a_certificate_that_nobody_vouches_for_is_refused(
    trusted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(PostFailed, match="certificate verify failed"):
        asyncio.run(_post_to_tls_server(NAME, trusted))
