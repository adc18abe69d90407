"""Runs the batches of the server: each in a thread, through the code of `mlx-rq batch`.

    <data dir>/http/batches/<id>.json           the Batch object
    <data dir>/http/batches/<id>/input.jsonl    its input, linked: deleting the File changes nothing
    <data dir>/http/batches/<id>/{output,errors}.jsonl, state    what is written while it runs

A server that starts takes up the batches that were not done. Which lines are done stands in the
output; lines that were submitted are found again by their keys. So nothing runs twice.
"""

import logging
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Any

from redis.exceptions import RedisError

from mlx_rq.api_stub.batch_check import IsServed, check_file, fault
from mlx_rq.api_stub.batch_usage import usage_of_all
from mlx_rq.api_stub.errors import NO_RETRY, ApiError
from mlx_rq.api_stub.file_store import FileStore, is_left_over
from mlx_rq.api_stub.json_store import JSONStore, Record, new_id
from mlx_rq.files import sync_path
from mlx_rq.jobs.batch.batch import Batch, BatchOptions
from mlx_rq.jobs.batch.files import Outputs
from mlx_rq.jobs.batch.lines import BatchFile, read_lines
from mlx_rq.jobs.batch.state import open_state
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.connection import connect, new_connection
from mlx_rq.jobs.queue.options import BATCH_PRIORITY, JobOptions
from mlx_rq.jobs.queue.retry import RedisRetry

logger = logging.getLogger("mlx_rq.api_stub")

WINDOW_SECONDS = {"24h": 24 * 3600}
RUN_TOGETHER = 8
"""Batches that run at once; the others wait their turn."""

_RETRY_SECONDS = 5.0
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

CANCELLED = RequestError("The batch was cancelled before this request ran.", code="batch_cancelled")
EXPIRED = RequestError(
    "This request could not be executed before the completion window expired.",
    code="batch_expired",
)


class _ServerStops(Exception):
    """The batch goes on when the server starts again."""


class BatchRunner:
    """The batches that there are, and the threads that run them."""

    def __init__(self, folder: Path, files: FileStore, redis_url: str, is_served: IsServed) -> None:
        self._folder = folder
        self._files = files
        self._redis_url = redis_url
        self._is_served = is_served
        self.records = JSONStore(folder)
        self._threads = ThreadPoolExecutor(RUN_TOGETHER, thread_name_prefix="batch")
        self._closing = Event()

    def resume(self) -> None:
        """Goes on with the batches that have not ended."""
        for record in self.records.all():
            if record["status"] not in _ENDED:
                self._threads.submit(self._run, record["id"])

    def close(self) -> None:
        """Stops the threads within a second or so; what is in the queue stays there."""
        self._closing.set()
        self._threads.shutdown(cancel_futures=True)

    def create(
        self,
        endpoint: str,
        input_file_id: str,
        completion_window: str,
        metadata: Mapping[str, str] | None,
        output_lifetime: int | None,
        client: str | None,
    ) -> Record:
        """Accepts a client's batch and starts it; what is wrong with its file, that says later."""
        now = int(self._time())
        record: dict[str, Any] = {
            "id": new_id("batch_"),
            "object": "batch",
            "endpoint": endpoint,
            "input_file_id": input_file_id,
            "completion_window": completion_window,
            "status": "validating",
            "created_at": now,
            "expires_at": now + WINDOW_SECONDS[completion_window],
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
        }
        if metadata is not None:
            record["metadata"] = metadata
        folder = self._folder / record["id"]
        folder.mkdir(mode=0o700)
        if self._files.find(client, input_file_id) is not None:
            os.link(self._files.path(input_file_id), folder / "input.jsonl")
            record["request_counts"]["total"] = sum(1 for _ in read_lines(folder / "input.jsonl"))
        if output_lifetime is not None:
            (folder / "output_lifetime").write_text(str(output_lifetime))
            sync_path(folder / "output_lifetime")
        sync_path(folder)
        self.records.add(record, client)
        self._threads.submit(self._run, record["id"])
        return record

    def _time(self) -> float:
        """Tells the time by the clock of Redis, which also says when the batch has expired.

        Where Redis is away, nothing runs anyway; then by that of this machine.
        """
        with suppress(RedisError), new_connection(self._redis_url) as connection:
            return redis_time(connection)
        return time.time()

    def cancel(self, identity: str) -> Record:
        """Stops a batch: what runs finishes. Raises ApiError (409) where it has ended otherwise."""

        def change(record: Record) -> Mapping[str, Any]:
            if record["status"] in ("cancelling", "cancelled"):
                return {}
            if record["status"] in _ENDED or record["status"] == "finalizing":
                raise ApiError(
                    409,
                    f"Cannot cancel a batch with status '{record['status']}'.",
                    code=None,
                    headers=NO_RETRY,
                )
            return {"status": "cancelling", "cancelling_at": int(time.time())}

        return self.records.update(identity, change)

    def sweep(self) -> None:
        """Deletes the folders that a crash left without a batch, or behind one that has ended.

        Answers of a failed batch stay: they are only there where they could not be saved.
        """
        for path in self._folder.iterdir():
            if not path.is_dir() or not is_left_over(path):
                continue
            record = self.records.get(path.name)
            status = None if record is None else record["status"]
            unsaved = status == "failed" and (path / "output.jsonl").exists()
            if status is None or (status in _ENDED and not unsaved):
                shutil.rmtree(path, ignore_errors=True)

    def _run(self, identity: str) -> None:
        """Takes a batch to its end, however often Redis goes away meanwhile."""
        run = None

        def try_again() -> None:
            nonlocal run
            run = _Run(self, identity)
            run.run()

        def waits(error: Exception) -> None:
            logger.warning("%s waits: %s", identity, error)

        try:
            if not self._closing.is_set():
                redis = RedisRetry(waits, seconds=_RETRY_SECONDS)
                redis.until_done(try_again, self._closing.wait)
        except _ServerStops:
            return
        except Exception:
            logger.exception("%s failed", identity)
            self._fail(run or _Run(self, identity))

    def _fail(self, run: "_Run") -> None:
        """Ends a batch as failed, once the disk takes that."""
        while not self._closing.is_set():
            try:
                run.fail()
                return
            except OSError as error:
                logger.error("%s", error)
                self._closing.wait(_RETRY_SECONDS)

    def _advance(self, identity: str, status: str, **fields: Any) -> Record:
        """Takes a batch to its next status and notes when; a cancellation is not overwritten."""

        def change(record: Record) -> Mapping[str, Any]:
            # What a batch waited for (its note) is over.
            stamped = {f"{status}_at": int(time.time()), "note": None, **fields}
            keeps = record["status"] == "cancelling" and status == "in_progress"
            return stamped if keeps else {"status": status, **stamped}

        return self.records.update(identity, change)


class _Run:
    """One batch on its way from its input file to its output files."""

    def __init__(self, runner: BatchRunner, identity: str) -> None:
        self._runner = runner
        self._id = identity
        self._folder = runner._folder / identity
        self._connection = connect(runner._redis_url)
        self._input = BatchFile(self._folder / "input.jsonl", identity, {})
        self._outputs = Outputs(self._folder / "output.jsonl", self._folder / "errors.jsonl")
        self._ended_as = "completed"
        self._adopted: dict[str, Any] = {}  # the fields of the files that were made

    @property
    def _record(self) -> Record:
        record = self._runner.records.get(self._id)
        assert record is not None
        return record

    @property
    def _owner(self) -> str | None:
        return self._runner.records.owner(self._id)

    def run(self) -> None:
        if self._record["status"] == "validating" and (faults := self._faults()):
            self._runner._advance(self._id, "failed", errors=_errors(faults))
        elif self._input.path.exists():
            if self._record["status"] != "cancelling":
                self._runner._advance(self._id, "in_progress")
            self._generate()
            self._finish()
        else:  # cancelled before it was looked at
            self._runner._advance(self._id, "cancelled")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _faults(self) -> list[dict[str, Any]]:
        if not self._input.path.exists():
            message = f"The input file {self._record['input_file_id']!r} does not exist."
            return [fault("invalid_request", message, "file_id")]
        return check_file(self._input, self._record["endpoint"], self._runner._is_served)

    def _generate(self) -> None:
        options = BatchOptions(
            order="finished",
            skip_bad_lines=True,
            job=JobOptions(BATCH_PRIORITY, owner=self._owner),
            redis_url=self._runner._redis_url,
        )
        with open_state(self._folder / "state", self._id) as state:
            batch = Batch(self._input, self._outputs, state, options)
            self._stop_if_due(batch)
            batch.run(self._watch)
            if self._ended_as == "expired" and not batch.tally.errors[str(EXPIRED.code)]:
                self._ended_as = "completed"  # all were answered before any server looked

    def _watch(self, batch: Batch) -> None:
        """Called at least once a second while the batch runs."""
        if self._runner._closing.is_set():
            raise _ServerStops
        self._stop_if_due(batch)
        tally = batch.tally
        counts = {
            "total": tally.total,
            "completed": tally.answered,
            "failed": tally.errors.total(),
        }
        self._runner.records.update(
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
            self._runner._advance(self._id, "finalizing")
        fields = self._adopt_outputs()
        if usage := usage_of_all(self._outputs.answers):
            fields["usage"] = usage
        self._runner._advance(self._id, self._ended_as, **fields)

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
        self._runner._advance(self._id, "failed", errors=errors, **self._adopted)
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
                file = self._runner._files.adopt(
                    path, filename, self._output_lifetime(), self._owner
                )
                self._adopted[name] = file["id"]
        return dict(self._adopted)

    def _output_lifetime(self) -> int | None:
        path = self._folder / "output_lifetime"
        return int(path.read_text()) if path.exists() else None


def _errors(faults: list[dict[str, Any]]) -> dict[str, Any]:
    return {"object": "list", "data": faults}
