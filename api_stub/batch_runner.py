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

from mlx_rq.api_stub.batch_check import IsServed
from mlx_rq.api_stub.batch_run import BatchRun, Place, ServerStops
from mlx_rq.api_stub.errors import NO_RETRY, ApiError
from mlx_rq.api_stub.file_store import FileStore, is_left_over
from mlx_rq.api_stub.json_store import JSONStore, Record, new_id
from mlx_rq.files import sync_path
from mlx_rq.jobs.batch.lines import read_lines
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.connection import new_connection
from mlx_rq.jobs.queue.retry import RedisRetry

logger = logging.getLogger("mlx_rq.api_stub")

WINDOW_SECONDS = {"24h": 24 * 3600}
RUN_TOGETHER = 8
"""Batches that run at once; the others wait their turn."""

_RETRY_SECONDS = 5.0
_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class BatchRunner:
    """The batches that there are, and the threads that run them."""

    def __init__(self, folder: Path, files: FileStore, redis_url: str, is_served: IsServed) -> None:
        self.records = JSONStore(folder)
        self._closing = Event()
        self._place = Place(folder, self.records, files, redis_url, is_served, self._closing)
        self._threads = ThreadPoolExecutor(RUN_TOGETHER, thread_name_prefix="batch")

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
        folder = self._place.folder / record["id"]
        folder.mkdir(mode=0o700)
        if self._place.files.find(client, input_file_id) is not None:
            os.link(self._place.files.path(input_file_id), folder / "input.jsonl")
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
        with suppress(RedisError), new_connection(self._place.redis_url) as connection:
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
        for path in self._place.folder.iterdir():
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
            run = BatchRun(self._place, identity)
            run.run()

        def waits(error: Exception) -> None:
            logger.warning("%s waits: %s", identity, error)

        try:
            if not self._closing.is_set():
                redis = RedisRetry(waits, seconds=_RETRY_SECONDS)
                redis.until_done(try_again, self._closing.wait)
        except ServerStops:
            return
        except Exception:
            logger.exception("%s failed", identity)
            self._fail(run or BatchRun(self._place, identity))

    def _fail(self, run: BatchRun) -> None:
        """Ends a batch as failed, once the disk takes that."""
        while not self._closing.is_set():
            try:
                run.fail()
                return
            except OSError as error:
                logger.error("%s", error)
                self._closing.wait(_RETRY_SECONDS)
