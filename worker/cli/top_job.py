"""A job as `mlx-rq top` shows it when it is opened: its state, its life, and what it says."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from mlx_rq.jobs.client.job import UNFINISHED
from mlx_rq.jobs.client.job_detail import job_detail
from mlx_rq.jobs.openai.errors import JobNotFound, RequestError
from mlx_rq.jobs.openai.words import counted
from mlx_rq.worker.cli.job_ids import find_job
from mlx_rq.worker.cli.status_view import life_lines, line

_HIDDEN = "its prompt and answer are shown by `mlx-rq top --show-content`"


class JobView:
    """What is known of the job that was `asked` for, by its id or how that begins.

    `first` is the line that stands at the top of the screen.
    """

    def __init__(
        self,
        asked: str,
        detail: Mapping[str, Any] | None = None,
        fault: str = "",
    ) -> None:
        self.asked = asked
        self.first = 0
        self._detail, self._fault = detail, fault
        self._room = 1

    @property
    def unfinished_id(self) -> str | None:
        """The id of the job, where it can still be cancelled."""
        if self._detail is None or self._detail["status"] not in UNFINISHED:
            return None
        return str(self._detail["id"])

    def scroll(self, key: str) -> None:
        """Goes a line or a screen further or back; `draw` sees to it that it stays in the text."""
        step = self._room - 1 if key.startswith("page") else 1
        self.first = max(0, self.first + (step if key.endswith("down") else -step))

    def draw(
        self, console: Console, room: int, tokens: Mapping[str, int], *, content: bool
    ) -> RenderableType:
        """Draws as many lines as there is room for; `tokens` are those of running jobs so far."""
        lines = [
            wrapped
            for text in self._lines(tokens, content=content)
            for wrapped in text.wrap(console, console.width, no_wrap=text.no_wrap)
        ]
        self._room = room
        self.first = max(0, min(self.first, len(lines) - room))
        return Group(*lines[self.first : self.first + room])

    def _lines(self, tokens: Mapping[str, int], *, content: bool) -> Iterator[Text]:
        if self._detail is None:
            yield line(f"job {self.asked}", "bold")
            for text in self._fault.splitlines():
                yield line(text, "yellow", cut=False)
            return
        yield line(f"job {self._detail['id']}", "bold")
        yield from _state(self._detail)
        if self.unfinished_id is not None and (so_far := tokens.get(self.unfinished_id)):
            yield line(f"  {counted(so_far, 'token')} so far")
        yield line("life", "bold")
        for text in life_lines(self._detail["life"]):
            yield line(f"  {text}")
        for name in ("prompt", "answer"):
            yield from _titled(name, self._detail[name])
        if not content:
            yield line(_HIDDEN, "dim")


def look_at(asked: str, redis_url: str | None, *, content: bool) -> JobView:
    """Asks for all that is shown of a job. Raises RedisUnavailable."""
    try:
        job_id = find_job(asked, redis_url).id
        return JobView(asked, job_detail(job_id, redis_url, content=content))
    except (JobNotFound, RequestError) as error:
        return JobView(asked, fault=str(error))


def _state(detail: Mapping[str, Any]) -> Iterator[Text]:
    priority = "normal" if detail["priority"] == "default" else detail["priority"]
    words = [detail["status"], detail["model"], f"{priority} priority", detail["kind"] or ""]
    yield line("  " + " · ".join(filter(None, words)))
    if detail["usage"] is not None:
        usage = detail["usage"]
        yield line(
            f"  {usage['prompt']:,} prompt tokens ({usage['cached']:,} computed for others) · "
            f"{usage['completion']:,} generated"
            + (f" · ended by {detail['finish_reason']}" if detail["finish_reason"] else "")
        )
    if detail["metadata"]:
        yield line(f"  metadata {json.dumps(detail['metadata'], ensure_ascii=False)}", cut=False)
    if detail["note"]:
        yield line(f"  {detail['note']}", "yellow", cut=False)
    if detail["error"] is not None:
        error = detail["error"]
        yield line(f"  {error['message']} [{error['code']}]", "red", cut=False)


def _titled(name: str, said: str | None) -> Iterator[Text]:
    if said is not None:
        yield line(name, "bold")
        for text in said.split("\n"):
            yield line(text, cut=False)
