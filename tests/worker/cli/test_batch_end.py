"""Who is told how a batch ended: a notice on the desktop; a webhook that is queued."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from batch_helpers import batch_lines, echo, full_disk_at, write_jsonl
from click.testing import CliRunner, Result
from fakes import FakeEngine, StartWorker, failure
from redis import Redis

from mlx_rq.engine.interface import Task
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.webhook_events import read_event, tell
from mlx_rq.jobs.queue.webhooks import claim_due
from mlx_rq.worker.cli.desktop_notice import show_notice
from mlx_rq.worker.cli.main import main

HOSTILE = """a"; rm -rf ~ & $(x) <b>'\\ é.jsonl"""


class Notifier:
    """Stands for the program that shows notices, and keeps what it was called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._said = folder, folder / "said"
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def install(self, name: str, *, then: str = "exit 0") -> None:
        program = self._folder / name
        program.write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{self._said}'\n{then}\n")
        program.chmod(0o755)

    def arguments(self) -> list[str]:
        return self._said.read_bytes().decode().split("\0")[:-1]


@pytest.fixture
def notifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Notifier:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr("sys.platform", "linux")
    return Notifier(folder, monkeypatch)


@contextmanager
def _stopping_at_two(**_: Any) -> Iterator[Any]:
    """Stops a batch, as Ctrl-C does, when two of its lines are done."""
    yield lambda batch: batch.stop() if batch.tally.done == 2 else None


def run(source: Path, *options: str) -> Result:
    output = source.with_name("out.jsonl")
    return CliRunner().invoke(main, ["batch", str(source), "-o", str(output), *options])


def one_fails(task: Task) -> Any:
    said = echo(task)
    return failure("broken") if "Say 1." in json.dumps(said) else said


class TestTheNotice:
    def test_of_a_batch_that_is_done(
        self, tmp_path: Path, notifier: Notifier, start_worker: StartWorker
    ) -> None:
        notifier.install("notify-send")
        start_worker(FakeEngine(answer_with=one_fails))
        source = write_jsonl(tmp_path / HOSTILE.replace("/", ""), batch_lines(3))
        assert run(source, "--notify").exit_code == 1
        assert notifier.arguments() == [
            "--app-name=mlx-rq",
            f"mlx-rq: {source.name} is done",
            "2 of 3 answered, 1 error",
        ]

    def test_of_one_that_was_stopped(
        self,
        tmp_path: Path,
        notifier: Notifier,
        start_worker: StartWorker,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        notifier.install("notify-send")
        engine = FakeEngine(answer_with=echo, hold=True)
        start_worker(engine)
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(5))
        monkeypatch.setattr("mlx_rq.worker.cli.batch.watching", _stopping_at_two)
        two = Thread(target=lambda: engine.release(*engine.wait_for_tasks(2)[:2]), daemon=True)
        two.start()
        assert run(source, "--notify").exit_code == 2
        assert notifier.arguments()[1:] == [
            "mlx-rq: in.jsonl stopped",
            "2 of 5 answered, 3 still to do",
        ]

    def test_of_one_that_failed(
        self, tmp_path: Path, notifier: Notifier, start_worker: StartWorker
    ) -> None:
        notifier.install("notify-send")
        start_worker(FakeEngine(answer_with=echo))
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(1))
        with full_disk_at("r0"):
            assert run(source, "--notify").exit_code == 2
        title, words = notifier.arguments()[1:]
        assert title == "mlx-rq: in.jsonl failed"
        assert words.startswith("0 of 1 answered, 1 still to do. ")
        assert "out.jsonl: No space left on device: make room" in words

    def test_that_could_not_be_shown_is_said_and_costs_nothing(
        self, tmp_path: Path, notifier: Notifier, start_worker: StartWorker
    ) -> None:
        notifier.install("notify-send", then="echo 'Cannot autolaunch D-Bus' >&2; exit 1")
        start_worker(FakeEngine(answer_with=echo))
        result = run(write_jsonl(tmp_path / "in.jsonl", batch_lines(1)), "--notify", "--quiet")
        assert (result.exit_code, result.stderr) == (
            0,
            "The notice could not be shown: Cannot autolaunch D-Bus\n",
        )

    def test_is_refused_at_once_where_none_can_be_shown(
        self, tmp_path: Path, notifier: Notifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        result = run(write_jsonl(tmp_path / "in.jsonl", batch_lines(1)), "--notify")
        assert result.exit_code == 2
        assert "'--notify': notify-send is not on the PATH. Install it (Deb" in result.stderr
        assert not (tmp_path / "out.jsonl").exists()

    def test_on_macos_is_no_part_of_a_script(
        self, notifier: Notifier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        notifier.install("osascript")
        monkeypatch.setattr("sys.platform", "darwin")
        assert show_notice(f"mlx-rq: {HOSTILE}", HOSTILE) is None
        *script, title, text = notifier.arguments()
        assert (title, text) == (f"mlx-rq: {HOSTILE}", HOSTILE)
        assert script[0::2] == ["-e"] * 3
        assert script[1::2] == [
            "on run argv",
            "display notification (item 2 of argv) with title (item 1 of argv)",
            "end run",
        ]

    def test_on_linux_has_no_markup_of_others(self, notifier: Notifier) -> None:
        notifier.install("notify-send")
        assert show_notice("title", "<b>&") is None
        assert notifier.arguments()[-1] == "&lt;b&gt;&amp;"


class TestTheWebhook:
    def test_is_queued_with_what_became_of_the_lines(
        self, tmp_path: Path, start_worker: StartWorker, connection: Redis
    ) -> None:
        start_worker(FakeEngine(answer_with=one_fails))
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(3))
        ran = run(source, "--webhook", "https://example.org/hook")
        assert ran.exit_code == 1
        assert ran.stderr.splitlines()[0] == (
            "note: no HTTP server delivers webhooks now. It waits up to a week for one: "
            "mlx-rq serve --webhook-secret-file FILE"
        )
        ((name, tries),) = claim_due(connection, 5)
        told = json.loads(connection.get(keys.webhook_event(name)) or b"")
        run_name = json.loads((tmp_path / "out.jsonl.state").read_text())["run"]
        assert (told["url"], tries) == ("https://example.org/hook", 1)
        assert (told["event"]["id"], told["event"]["type"]) == (f"evt_{name}", "batch.completed")
        assert told["event"]["data"] == {
            "id": f"batch_{run_name}",
            "object": "batch",
            "status": "completed",
            "input": str(source),
            "output": str(tmp_path / "out.jsonl"),
            "request_counts": {"total": 3, "completed": 2, "failed": 1},
        }

    def test_tells_why_a_batch_failed(
        self, tmp_path: Path, start_worker: StartWorker, connection: Redis
    ) -> None:
        start_worker(FakeEngine(answer_with=echo))
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(1))
        with full_disk_at("r0"):
            assert run(source, "--webhook", "https://example.org/hook").exit_code == 2
        ((name, _),) = claim_due(connection, 5)
        event = json.loads(connection.get(keys.webhook_event(name)) or b"")["event"]
        assert event["type"] == "batch.failed"
        assert event["data"]["error"].endswith(
            "out.jsonl: No space left on device: make room, and run the same command again: "
            "it goes on where it was"
        )

    def test_that_goes_nowhere_is_refused_at_once(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(1))
        result = run(source, "--webhook", "example.org/hook")
        assert result.exit_code == 2
        assert result.stderr.splitlines()[-1] == (
            "Error: Invalid value for '--webhook': expected an http or https URL, as in "
            "https://example.org/hook, but got 'example.org/hook' instead."
        )

    def test_without_a_redis_is_said(self, tmp_path: Path) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(1))
        nobody = ("--redis-url", "redis://127.0.0.1:1/0")
        result = run(source, "--webhook", "https://example.org", *nobody)
        assert result.exit_code == 2
        assert "The webhook could not be queued: No Redis at redis://127.0.0.1:1" in result.stderr


def test_an_end_is_told_though_the_list_of_deliveries_is_something_else(
    connection: Redis,
) -> None:
    connection.set(keys.WEBHOOKS, "x")
    tell(connection, "https://example.org/hook", "batch", "completed", {})
    (delivery,) = claim_due(connection, 9)
    assert read_event(connection, delivery.name)[1]["type"] == "batch.completed"
