"""What a person is shown of a job; its prompt and answer only where that was asked for."""

import json
from contextlib import suppress
from typing import Any

from mlx_rq.jobs.client.job import UNFINISHED, Job
from mlx_rq.jobs.openai.answers import finish_reason_of, text_of, usage_of
from mlx_rq.jobs.openai.errors import RequestError, error_in
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.trace import trace

_PROMPTS = ("instructions", "messages", "prompt", "input")
"""Under these names bodies say what is to be answered."""

_LONGEST = 50_000
"""Characters of a prompt or an answer that are shown."""


def job_detail(job_id: str, redis_url: str | None, *, content: bool) -> dict[str, Any]:
    """Tells what is known of a job. Raises JobNotFound."""
    job = Job(job_id, redis_url)
    detail: dict[str, Any] = {**job.info(), "kind": None, "metadata": None, "prompt": None}
    with suppress(RequestError):  # it cannot be read: its error says so
        kind, body = job.payload()
        detail |= {"kind": kind, "metadata": body.get("metadata") or None}
        if content:
            detail["prompt"] = _cut(_prompt(body))
    with reachable(connection := connect(redis_url)):
        detail["life"] = trace(connection, job_id)
    return {**detail, **_outcome(job, detail["status"], content=content)}


def _outcome(job: Job, status: str, *, content: bool) -> dict[str, Any]:
    outcome: dict[str, Any] = {"error": None, "usage": None, "finish_reason": None, "answer": None}
    if status in UNFINISHED:
        return outcome
    with reachable(connect(job.redis_url)):
        result = job.outcome() or {}
    if (error := error_in(result)) is not None:
        return {**outcome, "error": error}
    outcome["usage"] = usage_of(result)._asdict()
    if "choices" in result or "output" in result:  # a count of tokens says nothing
        outcome["finish_reason"] = finish_reason_of(result)
        if content:
            outcome["answer"] = _cut(text_of(result) or json.dumps(result, indent=1))
    return outcome


def _prompt(body: dict[str, Any]) -> str:
    """Writes down what a body asks: texts as they are, messages one after the other."""
    said = [body[name] for name in _PROMPTS if body.get(name)]
    return "\n\n".join(map(_written, said))


def _written(said: Any) -> str:
    match said:
        case str():
            return said
        case [*items]:
            return "\n\n".join(map(_written, items))
        case {"role": str(role), "content": str(content)}:
            return f"{role}: {content}"
    return json.dumps(said, indent=1, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
