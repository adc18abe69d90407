"""A port is free where nobody answers: to bind it may shadow who listens on all addresses."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.worker.cli import ports
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.ports import is_answered, is_free
from mlx_rq.worker.cli.valkey import embedded_valkey


@pytest.fixture
def containers_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """One that somebody listens on at all addresses, on a system that lets others bind it too."""
    monkeypatch.setattr(ports, "_can_bind", lambda port: True)
    with socket.create_server(("0.0.0.0", 0)) as container:
        yield container.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", ""])
def test_somebody_on_all_addresses_answers_on_each(containers_port: int, host: str) -> None:
    assert is_answered(containers_port, host)
    assert not is_free(containers_port)


def test_neither_valkey_nor_the_http_server_takes_it(containers_port: int, tmp_path: Path) -> None:
    valkey = embedded_valkey(tmp_path, port=containers_port)
    with pytest.raises(RedisUnavailable, match=f"Port {containers_port} is taken"), valkey:
        pass
    arguments = ["serve", "--port", str(containers_port), "--data-dir", str(tmp_path)]
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 1
    assert f"Error: --port {containers_port} is taken, perhaps by an HTTP" in refused.output


def test_a_port_that_nobody_has_is_free_also_just_after_its_last_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            taken, _ = server.accept()
            taken.close()  # the side that closes first keeps the port for a while
    assert not is_answered(port)
    assert is_free(port)


def test_a_port_that_is_bound_and_silent_is_not_free() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert not is_answered(port)
        assert not is_free(port)
