"""Prints answers of jobs: whole, or their text as it comes."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.answers import said_in
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.stream import Delta, follow, is_published
from mlx_rq.worker.cli.common import print_json

FOLLOW_OR_JSON = "--follow prints text as it comes, --json one object at the end: take one of them"


def goes_on(job_id: str) -> str:
    """What is said where somebody no longer waits."""
    return f"Stopped waiting. The job goes on: `mlx-rq result {job_id}` has its answer."


def print_result(response: dict[str, Any], as_json: bool) -> None:
    """Prints what each choice says, or with `as_json` the whole object."""
    if as_json:
        print_json(response)
        return
    for answer in _answers(response):
        click.echo(answer)


def _answers(response: Mapping[str, Any]) -> Iterator[str]:
    """Gives the text of each choice, or the tool calls as JSON where it has no text."""
    for said in said_in(response):
        yield _text_or_calls(said.text, said.calls)


def _text_or_calls(text: str | None, calls: Any) -> str:
    return json.dumps(calls, ensure_ascii=False, indent=2) if calls and not text else text or ""


def follow_job(job: Job) -> None:
    """Prints the text of a job's first choice as it is generated, then what else there is.

    Raises as `Job.result`. Where an attempt starts over and says something else, that is printed
    again from its start.
    """
    shown = _Shown()
    with reachable(connect(job.redis_url)):
        if not is_published(connect(job.redis_url), job.id):
            click.echo("note: it was submitted without --follow: its text comes whole", err=True)
        asyncio.run(_follow(job, shown))
    first, *others = _answers(job.result(timeout=0))
    shown.end(first)
    for answer in others:
        click.echo(answer)


async def _follow(job: Job, shown: "_Shown") -> None:
    async for delta in follow(job.id, job.redis_url):
        if delta.choice == 0 and delta.kind == "content":
            shown.add(delta)


class _Shown:
    """The text that stands on the screen."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, delta: Delta) -> None:
        """Prints what some more text adds; a gap is left to the end."""
        known = self._text[delta.at : delta.at + len(delta.text)]
        if not delta.text.startswith(known):
            self._start_over(delta.text if delta.at == 0 else "")
        elif delta.at <= len(self._text):
            self._print(delta.text[len(known) :])

    def end(self, whole: str) -> None:
        """Prints what is missing, and ends the line."""
        if whole.startswith(self._text):
            click.echo(whole[len(self._text) :])
        else:
            self._start_over("")
            click.echo(whole)

    def _start_over(self, text: str) -> None:
        click.echo()
        click.echo("note: it was begun again, and says something else now", err=True)
        self._text = ""
        self._print(text)

    def _print(self, text: str) -> None:
        click.echo(text, nl=False)
        self._text += text
