"""What `mlx-rq top` shows, and what keys do to it. Knows neither a terminal nor Redis."""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from mlx_rq.worker.cli.status_view import count, line, view
from mlx_rq.worker.cli.top_job import JobView

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 48
_LEAST_ROWS = 3
_IN_FULL = 2
"""More workers than that have two lines each: else the queues would have no room below them."""

_NAMED = {
    "up": ("\x1b[A", "k"),
    "down": ("\x1b[B", "j"),
    "page up": ("\x1b[5~",),
    "page down": ("\x1b[6~", " "),
    "enter": ("\r", "\n", "o"),
    "back": ("\x1b", "\x7f", "\b"),
    "q": ("\x03",),
}
_KEYS = {key: name for name, keys in _NAMED.items() for key in keys}
_HELP = "q quit · s sort · ↑ ↓ choose · ↵ open · / open by id · c cancel"
_JOB_HELP = "q quit · esc back · ↑ ↓ scroll · c cancel"
_OF_AN_ID = re.compile(r"[0-9a-f]")


class Screen:
    """What is shown. `said` stands at the foot; `opened` is the job that is looked at closely."""

    SORTS = ("tokens", "id", "worker")

    def __init__(self, *, content: bool = False) -> None:
        self.said = ""
        self.opened: str | None = None
        self._content = content
        self._job: JobView | None = None
        self._fault = ""
        self._state: Mapping[str, Any] = {}
        self._sort = 0
        self._chosen: str | None = None
        self._asking: str | None = None  # which job is to be cancelled, if y is pressed
        self._typed: str | None = None  # the beginning of an id
        self._speeds: dict[str, deque[float]] = {
            name: deque(maxlen=_HISTORY) for name in ("tokens/s out", "tokens/s in", "waiting")
        }

    def take(self, state: Mapping[str, Any]) -> None:
        """Takes in what is so now."""
        self._state, self._fault = state, ""
        now = [worker["rates"]["now"] for worker in state["workers"]]
        figures = (
            sum(rates["generated_tokens"] for rates in now),
            sum(rates["prompt_tokens"] for rates in now),
            sum(queue["queued"] for queue in state["queues"]),
        )
        for values, figure in zip(self._speeds.values(), figures, strict=True):
            values.append(figure)
        ids = [row[0] for row in self.rows()]
        if self._chosen not in ids:
            self._chosen = ids[0] if ids else None
            if self.opened is None:
                self._asking = None

    def take_job(self, job: JobView) -> None:
        """Takes in what is known of the job that is open; of another, it is left out."""
        if self.opened is not None and job.asked == self.opened:
            place = self._job.first if self._job is not None and self._job.asked == job.asked else 0
            self._job = job
            job.first = place

    def away(self, fault: str) -> None:
        """Keeps what was shown, and says why nothing new comes."""
        self._fault = fault

    def rows(self) -> list[tuple[str, int, str]]:
        """Gives id, tokens and worker of what runs, in the order that is wanted."""
        rows = [
            (row["id"], row["tokens"], worker["name"])
            for worker in self._state["workers"]
            for row in worker["rows"]
        ]
        by = (lambda row: (-row[1], row[0]), lambda row: row[0], lambda row: (row[2], row[0]))
        return sorted(rows, key=by[self._sort])

    def press(self, key: str) -> str | None:
        """Does what a key means; returns "quit", or the id of a job that is to be cancelled."""
        if self._typed is not None:
            self._type(key)
            return None
        key = _KEYS.get(key, key)
        if self._asking is not None:
            asked, self._asking = self._asking, None
            return asked if key == "y" else "quit" if key == "q" else None
        self.said = ""
        if key == "q":
            return "quit"
        if self.opened is not None:
            self._press_in_job(key)
        else:
            self._press_in_list(key)
        return None

    def _press_in_list(self, key: str) -> None:
        match key:
            case "s":
                self._sort = (self._sort + 1) % len(self.SORTS)
            case "up" | "down":
                self._move(1 if key == "down" else -1)
            case "c":
                self._asking = self._chosen
            case "enter":
                self.opened = self._chosen
            case "/":
                self._typed = ""

    def _press_in_job(self, key: str) -> None:
        match key:
            case "back" | "enter":
                self.opened = self._job = None
            case "up" | "down" | "page up" | "page down" if self._job is not None:
                self._job.scroll(key)
            case "c" if self._job is not None:
                self._asking = self._job.unfinished_id

    def _type(self, key: str) -> None:
        """Takes a key for the id that is typed."""
        assert self._typed is not None
        match _KEYS.get(key, key):
            case "enter" if key != "o":
                self.opened, self._typed = self._typed or None, None
            case "back" if key == "\x1b" or not self._typed:
                self._typed = None
            case "back":
                self._typed = self._typed[:-1]
            case _ if _OF_AN_ID.fullmatch(key) and len(self._typed) < 32:
                self._typed += key
            case "q" if key == "\x03":
                self._typed = None

    def _move(self, step: int) -> None:
        ids = [row[0] for row in self.rows()]
        if self._chosen in ids:
            place = ids.index(self._chosen) + step
            self._chosen = ids[max(0, min(len(ids) - 1, place))]

    def draw(self, console: Console) -> RenderableType:
        """Draws it as high as the terminal is: the running jobs get what the rest leaves."""
        if self.opened is not None:
            if self._job is None:
                return Group(line(f"job {self.opened}", "bold"), self._foot(_JOB_HELP))
            tokens = {job_id: count for job_id, count, _ in self.rows()}
            shown = self._job.draw(console, console.height - 1, tokens, content=self._content)
            return Group(shown, self._foot(_JOB_HELP))
        rows = min(_LEAST_ROWS, len(self.rows()))
        brief = len(self._state.get("workers", ())) > _IN_FULL
        rest = Group(*self._sparklines(), view(self._state, brief=brief))
        used, rest_drawn = _at_most(console, rest, console.height - rows - 2)
        room = max(_LEAST_ROWS, console.height - used - 3)
        return Group(rest_drawn, *self._running(room), self._foot(_HELP))

    def _sparklines(self) -> Iterator[Text]:
        for (name, values), style in zip(
            self._speeds.items(), ("green", "cyan", "yellow"), strict=True
        ):
            text = Text(f"{name:13}{count(values[-1]):>8} ", no_wrap=True)
            yield text.append(sparkline(values), style)

    def _running(self, room: int) -> Iterator[Text]:
        rows = self.rows()
        if not rows:
            return
        yield line(f"running jobs, by {self.SORTS[self._sort]}", "bold")
        ids = [row[0] for row in rows]
        place = ids.index(self._chosen) if self._chosen in ids else 0
        first = max(0, min(place - room // 2, len(rows) - room))
        for job_id, tokens, worker in rows[first : first + room]:
            text = f"  {job_id:32} {tokens:>7,} tokens  {worker[:12]}"
            yield line(text, "reverse" if job_id == self._chosen else "")

    def _foot(self, usual: str) -> Text:
        if self._typed is not None:
            return line(f"the id of a job, or how it begins: {self._typed}▏", "bold")
        if self._asking is not None:
            return line(f"cancel {self._asking}? y", "bold red")
        if self._fault:
            return line(self._fault, "bold yellow")
        return line(self.said or usual, "dim")


def _at_most(console: Console, what: RenderableType, height: int) -> tuple[int, RenderableType]:
    """Gives the first lines of what is drawn, and how many they are."""
    lines = console.render_lines(what, console.options.update(height=None), pad=False)
    if len(lines) <= height:
        return len(lines), what
    kept = [segment for one in lines[: height - 1] for segment in (*one, Segment.line())]
    return height, Group(Segments(kept), line("…", "dim"))


def sparkline(values: Sequence[float] | deque[float]) -> str:
    """Draws numbers as bars, the largest as the highest."""
    most = max(values, default=0) or 1
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in values)
