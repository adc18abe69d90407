"""One batch of the server on its way, from its input file to its output files."""

import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from redis.exceptions import RedisError

from mlx_rq.api_stub.batch_check import IsServed, check_file, fault
from mlx_rq.api_stub.batch_usage import usage_of_all
from mlx_rq.api_stub.file_store import FileStore
from mlx_rq.api_stub.json_store import JSONStore, Record
from mlx_rq.jobs.batch.batch import Batch, BatchOptions
from mlx_rq.jobs.batch.files import Outputs
from mlx_rq.jobs.batch.lines import BatchFile
from mlx_rq.jobs.batch.state import open_state
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.connection import connect
from mlx_rq.jobs.queue.options import BATCH_PRIORITY, JobOptions

logger = logging.getLogger("mlx_rq.api_stub")

CANCELLED = RequestError("The batch was cancelled before this request ran.", code="batch_cancelled")
EXPIRED = RequestError(
    "This request could not be executed before the completion window expired.",
    code="batch_expired",
)


class ServerStops(Exception):
    """The batch goes on when the server starts again."""


@dataclass(frozen=True)
class Place:
    """What the batches of a server have in common.

    Each has a folder of its own in `folder`; `closing` says that the server stops.
    """

    folder: Path
    records: JSONStore
    files: FileStore
    redis_url: str
    is_served: IsServed
    closing: Event


class BatchRun:
    """A batch that is run; where it was broken off, another one goes on with it."""

    def __init__(self, place: Place, identity: str) -> None:
        self._place = place
        self._id = identity
        self._folder = place.folder / identity
        self._connection = connect(place.redis_url)
        self._input = BatchFile(self._folder / "input.jsonl", identity, {})
        self._outputs = Outputs(self._folder / "output.jsonl", self._folder / "errors.jsonl")
        self._ended_as = "completed"
        self._adopted: dict[str, Any] = {}  # the fields of the files that were made

    @property
    def _record(self) -> Record:
        record = self._place.records.get(self._id)
        assert record is not None
        return record

    @property
    def _owner(self) -> str | None:
        return self._place.records.owner(self._id)

    def run(self) -> None:
        """Takes the batch to its end. Raises RedisError, ServerStops."""
        if self._record["status"] == "validating" and (faults := self._faults()):
            self._advance("failed", errors=_errors(faults))
        elif self._input.path.exists():
            if self._record["status"] != "cancelling":
                self._advance("in_progress")
            self._generate()
            self._finish()
        else:  # cancelled before it was looked at
            self._advance("cancelled")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _advance(self, status: str, **fields: Any) -> None:
        """Takes the batch to its next status and notes when; a cancellation is not overwritten."""

        def change(record: Record) -> Mapping[str, Any]:
            if record["status"] == "cancelling" and status == "finalizing":
                return {}
            # What a batch waited for (its note) is over.
            stamped = {f"{status}_at": int(time.time()), "note": None, **fields}
            keeps = record["status"] == "cancelling" and status == "in_progress"
            return stamped if keeps else {"status": status, **stamped}

        self._place.records.update(self._id, change)

    def _faults(self) -> list[dict[str, Any]]:
        if not self._input.path.exists():
            message = f"The input file {self._record['input_file_id']!r} does not exist."
            return [fault("invalid_request", message, "file_id")]
        return check_file(self._input, self._record["endpoint"], self._place.is_served)

    def _generate(self) -> None:
        options = BatchOptions(
            order="finished",
            skip_bad_lines=True,
            job=JobOptions(BATCH_PRIORITY, owner=self._owner),
            redis_url=self._place.redis_url,
        )
        with open_state(self._folder / "state", self._id) as state:
            batch = Batch(self._input, self._outputs, state, options)
            self._stop_if_due(batch)
            batch.run(self._watch)
            if self._ended_as == "expired" and not batch.tally.errors[str(EXPIRED.code)]:
                self._ended_as = "completed"  # all were answered before any server looked

    def _watch(self, batch: Batch) -> None:
        """Called at least once a second while the batch runs."""
        if self._place.closing.is_set():
            raise ServerStops
        self._stop_if_due(batch)
        tally = batch.tally
        counts = {
            "total": tally.total,
            "completed": tally.answered,
            "failed": tally.errors.total(),
        }
        self._place.records.update(
            self._id,
            lambda _: {"request_counts": counts, "note": batch.flight.note},
            durable=not tally.missing,
        )

    def _stop_if_due(self, batch: Batch) -> None:
        if self._ended_as != "completed":
            return
        if self._record["status"] == "cancelling":
            self._ended_as = "cancelled"
            batch.flight.stop(CANCELLED)
        elif self._is_overdue:
            self._ended_as = "expired"
            batch.flight.stop(EXPIRED)

    @property
    def _is_overdue(self) -> bool:
        """Whether the window has closed, by the clock of Redis; not while that is away."""
        with suppress(RedisError):
            return bool(redis_time(self._connection) >= self._record["expires_at"])
        return False

    def _finish(self) -> None:
        """Makes files of what was written, and ends the batch."""
        if self._ended_as != "cancelled":
            self._advance("finalizing")
        if self._record["status"] == "cancelling":  # also where all had been answered by then
            self._ended_as = "cancelled"
        fields = self._adopt_outputs()
        if usage := usage_of_all(self._outputs.answers):
            fields["usage"] = usage
        self._advance(self._ended_as, **fields)

    def fail(self) -> None:
        """Ends the batch as failed; what was answered before stays, in its output files."""
        saved = False
        try:
            with suppress(RequestError):  # cuts off a torn last line
                self._outputs.recover(ours=True)
            self._adopt_outputs()
            saved = True
        except OSError:
            logger.exception("%s: its answers stay in %s", self._id, self._folder)
        errors = _errors([fault("server_error", "The server failed on this batch.")])
        self._advance("failed", errors=errors, **self._adopted)
        if saved:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _adopt_outputs(self) -> dict[str, Any]:
        """Makes files of what was written; returns their fields of the Batch object."""
        for name, path in (
            ("output_file_id", self._outputs.answers),
            ("error_file_id", self._outputs.errors),
        ):
            if name in self._adopted:
                continue
            if path is not None and path.exists() and path.stat().st_size:
                filename = f"{self._id}_{path.name}"
                file = self._place.files.adopt(path, filename, self._output_lifetime(), self._owner)
                self._adopted[name] = file["id"]
        return dict(self._adopted)

    def _output_lifetime(self) -> int | None:
        path = self._folder / "output_lifetime"
        return int(path.read_text()) if path.exists() else None


def _errors(faults: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": faults}
