"""What the page shows one client: the queue, which is the same for all, and what is its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from redis import Redis

from mlx_rq.api_stub.service import Service
from mlx_rq.jobs.client.job import STATUSES, Status
from mlx_rq.jobs.client.job_detail import job_detail
from mlx_rq.jobs.openai.errors import JobNotFound
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.owners import may_see
from mlx_rq.jobs.queue.recent import Seen, metadata_of, recent_jobs, seen_jobs
from mlx_rq.jobs.queue.results import read_errors
from mlx_rq.jobs.queue.status import status

Event = tuple[str, Any]

SHOWN = 100
"""Rows of each list."""

LOOKED_THROUGH = 500
"""Of each state in each queue, the last jobs among which those of a client or a text are sought."""

_LISTS: Mapping[str, tuple[str, ...]] = {
    "queued": ("queue",),
    "in_progress": ("started",),
    "completed": ("finished",),
    "failed": ("failed",),
    "cancelled": ("canceled",),
    "": ("queue", "started", "finished", "failed", "canceled"),
}


@dataclass(frozen=True)
class Wanted:
    """What a client looks at: jobs of a status and with a text, and one job in detail."""

    status: Status | Literal[""] = ""
    search: str = ""
    job: str = ""


class View:
    """One client's view, which is asked again and again what there is."""

    def __init__(self, service: Service, client: str | None, wanted: Wanted) -> None:
        self._service = service
        self._client = client
        self._wanted = wanted
        self._sees_all = may_see(client, None)
        self._metadata: dict[str, str] = {}
        self._tokens: dict[str, int] = {}  # that jobs have generated so far

    def look(self) -> Iterator[Event]:
        """Gives all events that make up the page; raises RedisUnavailable."""
        connection = connect(self._service.redis_url)
        with reachable(connection):
            yield "state", self._state(connection)
            yield "jobs", self._jobs(connection)
            yield "batches", self._batches()
            if self._wanted.job:
                yield "job", self._job(connection)

    def _state(self, connection: Redis) -> dict[str, Any]:
        seen = status(connection)
        workers = [{name: worker[name] for name in _OF_WORKERS} for worker in seen["workers"]]
        self._tokens = {row["id"]: row["tokens"] for one in seen["workers"] for row in one["rows"]}
        return {
            "client": self._client,
            "shows_content": self._service.settings.show_content,
            "workers": workers,
            "queues": seen["queues"],
            "failures": seen["failures"] if self._sees_all else [],
            "notes": seen["notes"],
        }

    def _jobs(self, connection: Redis) -> list[dict[str, Any]]:
        search = self._wanted.search.strip()
        whole = self._sees_all and not search
        lists = _LISTS[self._wanted.status]
        found = recent_jobs(connection, lists, SHOWN if whole else LOOKED_THROUGH)
        if search:
            found = [*seen_jobs(connection, [search]), *found]  # by its id, however old
        wanted = self._wanted.status
        found = [
            job
            for job in dict.fromkeys(found)
            if may_see(self._client, job.owner) and wanted in ("", _status(job))
        ]
        if search:
            found = self._matching(connection, found, search)
        return self._rows(connection, found[:SHOWN])

    def _matching(self, connection: Redis, jobs: Sequence[Seen], text: str) -> list[Seen]:
        """Picks jobs by what their id begins with, or what stands in their other fields."""
        known = {job.id: self._metadata[job.id] for job in jobs if job.id in self._metadata}
        unread = [job.id for job in jobs if job.id not in known]
        self._metadata = {**known, **metadata_of(connection, unread)}
        text = text.lower()
        return [
            job
            for job in jobs
            if job.id.startswith(text)
            or text in f"{job.model} {job.batch or ''} {self._metadata[job.id]}".lower()
        ]

    def _rows(self, connection: Redis, jobs: Sequence[Seen]) -> list[dict[str, Any]]:
        failed = [job.id for job in jobs if _status(job) == "failed"]
        errors = read_errors(connection, failed)
        return [
            {
                "id": job.id,
                "status": _status(job),
                "model": job.model,
                "priority": job.priority,
                "created_at": job.created_at or None,
                "started_at": job.started_at or None,
                "ended_at": job.ended_at or None,
                "batch": job.batch,
                "metadata": self._metadata.get(job.id) or None,
                "error": errors.get(job.id),
                "tokens": self._tokens.get(job.id),
            }
            for job in jobs
        ]

    def _batches(self) -> list[Any]:
        """Lists the last batches, and of those that are sought the ones that match."""
        text = self._wanted.search.strip().lower()
        newest_first = self._service.batches.records.all_seen_by(self._client)[::-1]
        found = (
            batch
            for batch in newest_first
            if batch["id"].startswith(text) or text in str(batch.get("metadata") or "").lower()
        )
        return list(islice(found, SHOWN))

    def _job(self, connection: Redis) -> dict[str, Any]:
        job_id = self._wanted.job
        seen = seen_jobs(connection, [job_id])
        if not seen or not may_see(self._client, seen[0].owner):
            return {"id": job_id, "missing": True}
        content = self._service.settings.show_content
        try:
            detail = job_detail(job_id, self._service.redis_url, content=content)
            hidden = () if self._sees_all else ("first_for",)
            life = [
                {name: told for name, told in event._asdict().items() if name not in hidden}
                for event in detail["life"]
            ]
            return {**detail, "life": life}
        except JobNotFound:  # it went meanwhile
            return {"id": job_id, "missing": True}


_OF_WORKERS = (
    *("name", "host", "machine", "model", "serves", "prefix_sharing", "capacity"),
    *("running", "waiting", "ended", "paused", "rates", "totals", "memory", "chip"),
)


def _status(job: Seen) -> Status:
    return STATUSES.get(job.status, "queued")
