"""What workers did over a while, in the format that trace viewers read (Perfetto's, Chrome's).

The format is Chrome's "Trace Event Format": https://www.chromium.org/developers/how-tos/trace-event-profiling-tool/
A worker is a process there, a place in its batch a thread.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from redis import Redis

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.trace import Event, traces, worker_in

MOST_JOBS = 10_000
"""Jobs that are told of, the last that ended: viewers take no more."""

_AT_ONCE = 500
"""Jobs that are asked for in one round trip."""

_SPANS = {"admitted": "prefill", "first token": "decode", "ended": "commit"}
"""What goes on from each event on, for as long as a job has a place in the batch."""

_BEFORE = ("queued", "claimed", "rendered")


def chrome_trace(connection: Redis, seconds: float) -> dict[str, Any]:
    """Gives the trace of the jobs that ended in the last so many seconds."""
    since = redis_time(connection) - seconds
    job_ids = _ended_since(connection, since)
    jobs: list[tuple[str, list[Event]]] = []
    for start in range(0, len(job_ids), _AT_ONCE):
        some = job_ids[start : start + _AT_ONCE]
        jobs += zip(some, traces(connection, some), strict=True)
    return {"traceEvents": list(_drawn(jobs)), "displayTimeUnit": "ms"}


def _ended_since(connection: Redis, since: float) -> list[str]:
    """Finds the jobs that ended, the first of them first."""
    oldest = int(max(0.0, since) * 1000)
    found = reading.ask(connection.xrevrange, keys.COMPLETIONS, "+", str(oldest), count=MOST_JOBS)
    streams = [] if found is reading.WRONG_TYPE or not found else [(keys.COMPLETIONS, found)]
    _, job_ids = reading.entries(streams, "job")
    return list(dict.fromkeys(reversed(job_ids)))


def _drawn(jobs: Iterable[tuple[str, Sequence[Event]]]) -> Iterator[dict[str, Any]]:
    processes: dict[str, int] = {}
    free_from: dict[int, list[float]] = {}  # by process, when each place in its batch is free
    in_batch = ((job_id, events, _times(events)) for job_id, events in jobs)
    for job_id, events, times in sorted(
        (one for one in in_batch if "admitted" in one[2]), key=lambda one: one[2]["admitted"]
    ):
        worker = worker_in(events)
        if worker not in processes:
            processes[worker] = pid = len(processes) + 1
            yield _named("process_name", pid, worker)
        pid = processes[worker]
        free = max(event.at for event in events if event.name != "fetched")
        place = _place(free_from.setdefault(pid, []), times["admitted"], free)
        told: dict[str, Any] = {"job": job_id, **{e.name: e.text for e in events if e.text}}
        told |= {f"{name} at": times[name] - events[0].at for name in _BEFORE if name in times}
        for begin, end in pairwise(events):
            if begin.name in _SPANS:
                yield {
                    "ph": "X",
                    "name": _SPANS[begin.name],
                    "cat": "job",
                    "pid": pid,
                    "tid": place,
                    "ts": round(begin.at * 1e6),
                    "dur": max(0, round((end.at - begin.at) * 1e6)),
                    "args": told,
                }


def _times(events: Iterable[Event]) -> dict[str, float]:
    return {event.name: event.at for event in events}


def _named(kind: str, pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": {"name": name}}


def _place(free_from: list[float], begin: float, end: float) -> int:
    """Gives the first place of a batch that is free at a time, and takes it."""
    for place, free in enumerate(free_from):
        if free <= begin:
            free_from[place] = end
            return place + 1
    free_from.append(end)
    return len(free_from)
