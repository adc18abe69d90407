"""Keeps finished answers on disk while Redis does not take them, so that none is generated twice.

A file for each answer. It is taken away once Redis has the answer; what a worker had to leave, the
next one on this machine sends.
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redis import Redis

from mlx_rq.engine.interface import Outcome
from mlx_rq.files import replacing
from mlx_rq.jobs.queue.connection import address
from mlx_rq.jobs.queue.finish import Lease
from mlx_rq.worker.leases.claim import ClaimedJob
from mlx_rq.worker.results.commit import Finished

logger = logging.getLogger("mlx_rq.worker")

UNPLACED = "unplaced"
"""The folder of answers to jobs that Redis knows no more."""


def spool_folder(data_dir: Path, connection: Redis) -> Path:
    """Names the folder of one Redis: its answers are for no other."""
    place = address(connection).partition("://")[2]
    return data_dir / "spool" / quote(place, safe="")


class Spool:
    """A folder of answers, made when the first one comes. Readable by its owner only.

    Without a folder nothing is kept.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: set[str] = set()

    def keep(self, finished: Iterable[Finished]) -> None:
        """Writes answers that are not here yet, each whole or not at all."""
        for job, outcome in finished:
            if self._folder is None or job.id in self._kept:
                continue
            try:
                _write(self._folder / f"{job.id}.json", job, outcome)
            except OSError as error:  # a full disk: the worker has it in memory all the same
                logger.error("answers cannot be kept in %s: %s", self._folder, error)
                return
            except (TypeError, ValueError, RecursionError) as error:
                logger.error("job %s: its answer cannot be kept: %s", job.id, error)
                continue
            self._kept.add(job.id)

    def drop(self, job_ids: Iterable[str]) -> None:
        """Takes away answers that Redis has."""
        for job_id in self._kept.intersection(job_ids):
            if self._folder is not None:
                (self._folder / f"{job_id}.json").unlink(missing_ok=True)
            self._kept.discard(job_id)

    def set_aside(self, job: ClaimedJob, outcome: Outcome) -> Path | None:
        """Keeps an answer for which Redis has no job, for a person to look at; says where."""
        if self._folder is None:
            return None
        path = self._folder / UNPLACED / f"{job.id}.json"
        try:
            _write(path, job, outcome)
        except OSError as error:
            logger.error("an answer cannot be kept in %s: %s", path, error)
            return None
        return path

    def load(self) -> list[Finished]:
        """Reads what an earlier worker had to leave; a file that cannot be read is passed by."""
        found = []
        for path in () if self._folder is None else sorted(self._folder.glob("*.json")):
            try:
                found.append(_read(path))
            except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
                logger.error("%s is no answer of a worker, and is left there: %s", path, error)
        self._kept.update(job.id for job, _ in found)
        return found


def _write(path: Path, job: ClaimedJob, outcome: Outcome) -> None:
    """Writes a file that is on the disk, whole, when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path, mode=0o600) as file:
        file.write(_spelled(job, outcome))


def _spelled(job: ClaimedJob, outcome: Outcome) -> bytes:
    """Writes an answer and what is needed to commit it. The prompt is not in it."""
    record = asdict(job)
    del record["data"], record["claimed_at"]  # which means nothing after a restart
    lease = job.lease
    record["lease"] = [*lease[:2], lease.started_at.isoformat(), lease.data_set]
    text = json.dumps({"job": record, "result": outcome.result}, ensure_ascii=False)
    return text.encode(errors="replace")


def _read(path: Path) -> Finished:
    record: dict[str, Any] = json.loads(path.read_bytes())
    execution_id, worker_name, started_at, *data_set = record["job"].pop("lease")
    lease = Lease(execution_id, worker_name, datetime.fromisoformat(started_at), *data_set)
    job = ClaimedJob(**record["job"], data=None, lease=lease)
    if job.id != path.stem or not isinstance(record["result"], dict):
        raise ValueError("it is not what its name says")
    return job, Outcome(job.id, record["result"])
