"""`mlx-rq top` and the living line: what is shown, and what keys do."""

import io
import os
import sys
from contextlib import closing
from typing import Any

import pytest
from batch_helpers import says
from click.testing import CliRunner
from fakes import PATIENCE, FakeEngine, StartWorker, eventually
from redis import Redis
from rich.console import Console
from rich.text import Text

from mlx_rq import submit
from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.jobs.queue.status import status
from mlx_rq.jobs.queue.trace import Event
from mlx_rq.worker.cli import living_line
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.top import Look, keys_in
from mlx_rq.worker.cli.top_job import JobView, look_at
from mlx_rq.worker.cli.top_screen import Screen, sparkline


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
        "drafting": "",
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

    def test_many_workers_leave_room_for_the_queues(self) -> None:
        screen = Screen()
        (worker,) = state({"a": 1})["workers"]
        names = [f"mac-{number}" for number in range(5)]
        screen.take({**state({}), "workers": [{**worker, "name": name} for name in names]})
        lines = drawn(screen)
        assert [line for line in lines if line.startswith("worker ")] == [
            f"worker {name} · m" for name in names
        ]
        assert lines.count("  1 of 4 rows · 5 wait · 50 tokens/s") == 5
        assert any(line.startswith("another's ") for line in lines)

    def test_a_low_terminal_keeps_the_jobs_and_the_keys(self, screen: Screen) -> None:
        lines = drawn(screen, height=12)
        assert (len(lines), lines[4:6]) == (12, ["  on mac:7, M9", lines[5]])
        assert lines[6:8] == ["…", "running jobs, by tokens"]
        assert [line.split()[0] for line in lines[8:11]] == ["c", "b", "a"]
        assert lines[-1].startswith("q quit")

    def test_redis_that_is_away_is_told_below_what_was_last_seen(self, screen: Screen) -> None:
        screen.away("tries again: No Redis")
        assert drawn(screen)[-1] == "tries again: No Redis"
        assert any(line.startswith(f"  {'c':32} ") for line in drawn(screen))
        screen.take(state({"b": 20}))
        assert drawn(screen)[-1].startswith("q quit")


def detail(**changed: Any) -> dict[str, Any]:
    known = {"id": "b", "status": "in_progress", "model": "m", "priority": "default"}
    unknown = ("kind", "usage", "finish_reason", "metadata", "note", "error", "prompt", "answer")
    return {**dict.fromkeys(unknown), "life": [], **known, **changed}


class TestAJob:
    @pytest.mark.parametrize("back", ["\x1b", "\x7f", "\n"])
    def test_is_opened_and_left_by_keys(self, screen: Screen, back: str) -> None:
        screen.press("j")
        assert (screen.press("\n"), screen.opened) == (None, "b")
        assert drawn(screen)[0] == "job b"
        screen.take_job(JobView("b", detail(kind="chat", life=[Event("queued", 0)])))
        lines = drawn(screen)
        assert lines[1] == "  in_progress · m · normal priority · chat"
        assert lines[2] == "  20 tokens so far"
        assert (lines[3], lines[4].split()[1:]) == ("life", ["+0.000", "s", "queued"])
        screen.press(back)
        assert screen.opened is None
        assert drawn(screen)[0].startswith("tokens/s out")

    def test_is_opened_by_how_its_id_begins(self, screen: Screen) -> None:
        for key in "/qzab1\x7f":
            assert screen.press(key) is None
        assert drawn(screen)[-1] == "the id of a job, or how it begins: ab▏"
        screen.press("\r")
        assert screen.opened == "ab"
        screen.take_job(JobView("ab", fault="'ab' is how 2 ids begin:\n  abc\n  abd"))
        assert drawn(screen)[:4] == ["job ab", "'ab' is how 2 ids begin:", "  abc", "  abd"]
        screen.press("\x1b")
        for key in "/\x1b":
            screen.press(key)
        assert (screen.opened, drawn(screen)[-1][:6]) == (None, "q quit")

    def test_that_comes_late_is_not_shown_for_another(self, screen: Screen) -> None:
        screen.press("\r")
        screen.take_job(JobView("b", detail()))
        assert drawn(screen)[:2] == ["job c", "q quit · esc back · ↑ ↓ scroll · c cancel"]

    def test_is_cancelled_once_it_was_asked_unless_it_has_ended(self, screen: Screen) -> None:
        screen.press("\r")
        screen.take_job(JobView("c", detail(id="cc")))
        screen.press("c")
        screen.take(state({}))
        assert drawn(screen)[-1] == "cancel cc? y"
        assert screen.press("y") == "cc"
        screen.take_job(JobView("c", detail(id="cc", status="cancelled")))
        screen.press("c")
        assert screen.press("y") is None

    def test_is_scrolled_and_stays_where_it_is_when_it_comes_again(self, screen: Screen) -> None:
        long = "\n".join(f"line {number}" for number in range(30))
        screen.press("\r")
        for _ in range(2):
            screen.take_job(JobView("c", detail(prompt=long)))
            assert len(drawn(screen, 10)) == 10
        screen.press(" ")
        drawn(screen, 10)
        screen.take_job(JobView("c", detail(prompt=long)))
        assert drawn(screen, 10)[0] == "line 3"
        for _ in range(9):
            screen.press("\x1b[6~")
            drawn(screen, 10)
        assert drawn(screen, 10)[-2] == screen_hint()
        screen.press("k")
        assert drawn(screen, 10)[-2] == "line 29"

    def test_its_texts_are_shown_where_that_was_asked_and_order_the_terminal_nothing(
        self, redis_url: str, connection: Redis, start_worker: StartWorker
    ) -> None:
        start_worker(FakeEngine(answer_with=lambda task: says("\x1b[2Jan answer", task)))
        job = submit(messages=[{"role": "user", "content": "a [b]prompt[/b]"}], metadata={"k": "v"})
        job.result(timeout=PATIENCE)
        for content, shown in ((True, True), (False, False)):
            screen = Screen(content=content)
            screen.take(status(connection))
            screen.opened = job.id[:8]
            screen.take_job(look_at(job.id[:8], None, content=content))
            lines = drawn(screen)
            assert lines[0] == f"job {job.id}"
            assert '  metadata {"k": "v"}' in lines
            assert any(line.endswith("committed as finished") for line in lines)
            texts = ("user: a [b]prompt[/b]" in lines, "\ufffd[2Jan answer" in lines)
            assert texts == (shown, shown)
            assert (screen_hint() in lines) is not shown

    def test_that_is_not_there(self, redis_url: str, connection: Redis) -> None:
        screen = Screen()
        screen.take(status(connection))
        screen.opened = "f" * 32
        screen.take_job(look_at(screen.opened, None, content=False))
        assert f"job '{'f' * 32}' not found" in drawn(screen)[1]


@pytest.mark.parametrize(
    ("server", "kinds"),
    [("redis_url", {dict, JobView}), ("nobody_listens", {RedisUnavailable})],
)
def test_redis_is_asked_beside_the_keys_and_its_absence_is_news(
    server: str,
    kinds: set[type],
    redis_url: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlx_rq.worker.cli.top._LOOK_SECONDS", 0.05)
    url = request.getfixturevalue(server)
    seen: set[type] = set()
    with closing(Look(new_connection(url), url, content=False)) as look:
        look.at(submit(prompt="Once").id)
        eventually(lambda: bool(seen.update(map(type, look.news())) or seen >= kinds), "news")
    assert seen == kinds


def screen_hint() -> str:
    return "its prompt and answer are shown by `mlx-rq top --show-content`"


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
    assert keys_in("\x1b[5~\x1b/\r") == ["\x1b[5~", "\x1b", "/", "\r"]


def test_top_needs_a_terminal(redis_url: str) -> None:
    result = CliRunner().invoke(main, ["top"])
    assert result.exit_code == 2
    assert "top needs a terminal" in result.stderr


class TestLivingLine:
    def test_it_says_what_runs_and_until_when(self) -> None:
        said = living_line.words(state({"a": 1, "b": 2}))
        assert said == "2 of 4 rows · 50 tokens/s · 1,239 waiting · 6 ended · 2 min left"
        assert living_line.words(state({}, name="x"), "y") == ""
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
