"""A worker among RQ's: its name in RQ's lists, and the thread that listens for RQ's commands."""

import logging
import os
import signal
import time
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError
from rq.command import parse_payload
from rq.worker import BaseWorker, WorkerStatus
from rq.worker_registration import WORKERS_BY_QUEUE_KEY

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.retry import RETRY_SECONDS
from mlx_rq.worker.leases.claim import ClaimedJob
from mlx_rq.worker.leases.name import NameLease, NameTaken

logger = logging.getLogger("mlx_rq.worker")

_LEAST_TIMEOUT = 2
"""In seconds: longer than the longest blocking read of a worker."""


class RQRegistration(BaseWorker):
    """What an MLXWorker is to RQ."""

    @property
    def connection_timeout(self) -> int:
        """Seconds that a socket of the connection has to wait at least.

        RQ has the length of its blocking reads here, and waits so long whatever the URL says.
        """
        return _LEAST_TIMEOUT

    def sign_on(self, name: NameLease) -> None:
        """Takes the name, enters RQ's lists and listens for commands; raises NameTaken."""
        name.take()
        self._make_room()
        try:
            self.register_birth()  # type: ignore[no-untyped-call]
        except ValueError:
            raise NameTaken(self.name) from None
        self.subscribe()  # type: ignore[no-untyped-call]
        self.set_state(WorkerStatus.STARTED)

    def sign_off(self, name: NameLease) -> None:
        """Leaves RQ's lists, unless another worker stands there under the name by now."""
        if name.lost:
            self.unsubscribe()
            return
        self.teardown()  # type: ignore[no-untyped-call]
        name.give_up()

    def sign_on_again(self) -> None:
        """Enters RQ's lists anew, where they know of this worker no more."""
        self._make_room()
        self.connection.delete(self.key)
        self.register_birth()  # type: ignore[no-untyped-call]

    def _make_room(self) -> None:
        """Deletes the keys of RQ's lists, and of this worker, that hold another type."""
        for name in (
            self.redis_workers_keys,
            *map(WORKERS_BY_QUEUE_KEY.__mod__, self.queue_names()),
        ):
            if reading.ask(self.connection.srem, name, "") is reading.WRONG_TYPE:
                self.connection.delete(name)
        if reading.ask(self.connection.hget, self.key, "birth") is reading.WRONG_TYPE:
            self.connection.delete(self.key)

    def say_state(self, state: WorkerStatus) -> None:
        """Tells RQ what this worker does, unless it knows."""
        if self.get_state() == state:
            return
        if reading.ask(self.set_state, state) is reading.WRONG_TYPE:
            self.sign_on_again()

    def lost_data_since(self, job: ClaimedJob) -> bool:
        """Tells whether Redis lost its data, and with it the job, since it was claimed.

        Or another server took over, which may not have known all. No clock is asked: each data set
        has an id, and so has the history of a server (`claim_job.lua`).
        """
        try:
            data_set = reading.text(reading.ask(self.connection.get, keys.DATA_SET))
        except RedisError:
            return True
        history = ""
        with suppress(RedisError):
            history = self.connection.info("replication").get("master_replid", "")
        return f"{data_set}/{history}" != job.lease.data_set

    def handle_payload(self, message: Any) -> None:
        """Called with RQ's commands, by the thread that listens: no message may end it."""
        try:
            payload = parse_payload(message)
            match payload["command"]:
                case "shutdown":
                    # RQ sends itself a SIGINT, which is ignored in the background of a script.
                    os.kill(os.getpid(), signal.SIGTERM)
                case "stop-job":  # RQ looks for the one job that it works on
                    self.request_stop_execution(payload["job_id"])
                case _:
                    super().handle_payload(message)  # type: ignore[no-untyped-call]
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            logger.warning("no command of RQ's: %.200r (%s)", message.get("data"), what)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """Goes on listening for commands; RQ would not after a timeout."""
        if not isinstance(exc, RedisError):
            raise exc
        logger.debug("Redis: %s; listening again", exc)
        time.sleep(RETRY_SECONDS)

    def unsubscribe(self) -> None:
        """Ends the thread that listens for commands.

        It is told before it gets its last message; RQ tells it afterwards, and often waits a second
        in vain.
        """
        if self.pubsub_thread is not None:
            self.pubsub_thread.stop()
        super().unsubscribe()  # type: ignore[no-untyped-call]
