"""`mlx-rq top` and the living line: what is shown, and what keys do."""

import io
import os
import sys
from typing import Any

import pytest
from click.testing import CliRunner
from redis import Redis
from rich.console import Console
from rich.text import Text

from mlx_rq import submit
from mlx_rq.jobs.queue.status import status
from mlx_rq.worker.cli import living_line
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.top import Screen, keys_in, sparkline


def state(rows: dict[str, int], *, name: str = "w", paused: str | None = None) -> dict[str, Any]:
    """What `status` tells of one worker that has so many tokens of each job."""
    speed = {"prompt_tokens": 300.0, "generated_tokens": 50.0, "jobs": 0.5}
    worker = {
        "name": name,
        "model": "m",
        "models": [],
        "serves": ["m", "default"],
        "host": "mac",
        "pid": 7,
        "chip": "M9",
        "capacity": 4,
        "running": len(rows),
        "waiting": 5,
        "ended": 6,
        "paused": paused,
        "prefix_sharing": "",
        "totals": {"prefix_bytes": 0},
        "memory": {"active": None, "cache": None, "ceiling": None},
        "rates": {"now": speed, "recent": speed, "jobs_at_work": 0.5},
        "rows": [{"id": job_id, "tokens": tokens} for job_id, tokens in rows.items()],
    }
    counts = dict.fromkeys(("in_progress", "completed", "failed", "cancelled"), 0)
    times = {"oldest_seconds": 3.0, "eta_seconds": 120.0}
    queue = {"model": "m", "priority": "default", "queued": 1234, **counts, **times}
    return {
        "queues": [queue, {**queue, "model": "another's", "queued": 9}],
        "workers": [worker],
        "sharing": {"ratio": None},
        "failures": [],
        "limits": {"jobs": {"limit": None}, "bytes": {"limit": None}},
        "notes": [],
    }


def drawn(screen: Screen, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=80, height=height)
    with console.capture() as capture:
        console.print(screen.draw(console))
    return [line.rstrip() for line in capture.get().splitlines()]


@pytest.fixture
def screen() -> Screen:
    screen = Screen()
    screen.take(state({"b": 20, "a": 10, "c": 30}))
    return screen


class TestScreen:
    def test_keys_sort_the_rows(self, screen: Screen) -> None:
        orders = []
        for _ in Screen.SORTS:
            orders.append("".join(row[0] for row in screen.rows()))
            assert screen.press("s") is None
        assert orders == ["cba", "abc", "abc"]

    def test_a_job_is_cancelled_once_it_was_asked(self, screen: Screen) -> None:
        for key in ("\x1b[B", "c"):
            assert screen.press(key) is None
        assert drawn(screen)[-1] == "cancel b? y"
        assert screen.press("y") == "b"
        assert screen.press("y") is None
        screen.press("c")
        assert screen.press("n") is None
        assert screen.press("y") is None

    def test_no_other_job_is_cancelled_where_the_chosen_one_ended_meanwhile(
        self, screen: Screen
    ) -> None:
        screen.press("c")
        screen.take(state({"a": 11}))
        assert screen.press("y") is None

    def test_the_choice_stays_with_its_job_and_within_the_rows(self, screen: Screen) -> None:
        for _ in range(5):
            screen.press("j")
        screen.press("k")
        screen.take(state({"b": 50, "a": 51, "c": 52}))
        screen.press("c")
        assert screen.press("y") == "b"

    @pytest.mark.parametrize("key", ["q", "\x03"])
    def test_it_ends(self, screen: Screen, key: str) -> None:
        assert screen.press(key) == "quit"

    def test_the_rows_get_what_the_terminal_leaves(self, screen: Screen) -> None:
        screen.take(state({f"job{number:02}": number for number in range(30)}))
        lines = drawn(screen, height=24)
        assert len(lines) <= 24
        assert "tokens/s out       50 ██" in lines
        assert f"  {'job29':32} {29:>7} tokens  w" in lines

    def test_without_anything(self, redis_url: str, connection: Redis) -> None:
        screen = Screen()
        submit(prompt="Once")
        screen.take(status(connection))
        assert screen.press("c") is None
        assert screen.press("y") is None
        assert "No live worker: start one with `mlx-rq worker`." in drawn(screen)


def test_names_of_any_length_leave_the_numbers_whole_and_order_the_terminal_nothing() -> None:
    seen = state({})
    seen["workers"][0]["model"] = "m\x1b[2J" + "o" * 100
    seen["workers"][0]["paused"] = "\x1b[31mnow"
    large = {"queued": 123_456, "in_progress": 12_345, "completed": 7_654_321, "failed": 1_234}
    seen["queues"][0] |= {"model": "n\x1b[2J" + "e" * 60, "eta_seconds": 360_000.0, **large}
    screen = Screen()
    screen.take(seen)
    lines = drawn(screen)
    assert max(map(len, lines)) <= 80
    assert not any("\x1b" in line for line in lines)
    (row,) = (line for line in lines if " normal 123k " in line)
    assert " ".join(row.split()[1:]) == "normal 123k 12.3k 7.65M 1,234 0 3 s 100 h 00 min"
    assert "worker w · m\ufffd[2Jooo" in "\n".join(lines)


def test_sparklines_are_as_high_as_what_they_show() -> None:
    assert sparkline([0, 5, 10]) == "▁▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""


def test_keys_that_come_at_once_are_parted() -> None:
    assert keys_in("\x1b[Bsc\x1b[A") == ["\x1b[B", "s", "c", "\x1b[A"]


def test_top_needs_a_terminal(redis_url: str) -> None:
    result = CliRunner().invoke(main, ["top"])
    assert result.exit_code == 2
    assert "top needs a terminal" in result.stderr


class TestLivingLine:
    def test_it_says_what_runs_and_until_when(self) -> None:
        said = living_line.words(state({"a": 1, "b": 2}))
        assert said == "2 of 4 rows · 50 tokens/s · 1,239 waiting · 6 ended · 2 min left"
        assert living_line.words(state({}, name="x"), "y") == "the worker is loading its model"
        assert living_line.words(state({}, paused="on battery")).endswith("paused: on battery")

    def test_what_is_written_to_standard_error_stands_above_it(
        self, capfd: pytest.CaptureFixture[str]
    ) -> None:
        console = Console(file=io.StringIO(), width=80)
        with living_line._log_above(console):
            os.write(2, b"[bold]one[/bold]\ntwo")
        os.write(2, b"after\n")
        assert console.file.getvalue() == "[bold]one[/bold]\ntwo\n"  # type: ignore[attr-defined]
        assert capfd.readouterr().err == "after\n"

    def test_a_terminal_that_was_closed_holds_up_nobody_who_writes(self) -> None:
        asked = []

        def show(text: Text) -> None:
            asked.append(text.plain)
            raise OSError("the terminal is gone")

        reading_end, writing_end = os.pipe()
        os.write(writing_end, b"one\ntwo\n")
        os.close(writing_end)
        living_line._pass_on(reading_end, show)
        assert asked == ["one", "two"]

    def test_elsewhere_than_on_a_terminal_there_is_none(
        self,
        nobody_listens: str,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(living_line, "Live", None)
        with living_line.living_line(nobody_listens):
            print("plain", file=sys.stderr)
        assert capfd.readouterr().err == "plain\n"
