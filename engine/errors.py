"""The outcomes of tasks that have no answer: refused ones, and those at which the engine raised."""

import logging

from mlx_rq.engine.interface import Outcome, Task
from mlx_rq.jobs.openai.errors import RequestError, error_object

logger = logging.getLogger("mlx_rq.engine")


def ended_by(error: Exception, task: Task) -> Outcome:
    """The outcome of a task at which something was raised that is its own."""
    if isinstance(error, RequestError):
        return bad_request(task, error)
    logger.error("the engine raised at a request", exc_info=error)
    return failure(task.id, error)


def bad_request(task: Task, error: RequestError) -> Outcome:
    """The outcome of a task that can never be generated."""
    return Outcome(task.id, {"error": task.request.restated(error).error})


def failure(task_id: str, error: Exception) -> Outcome:
    """The outcome of a task at which the engine raised."""
    message = f"The engine failed on this request: {type(error).__name__}: {error}"
    details = error_object(message, code="engine_error", type="server_error")
    return Outcome(task_id, {"error": details})
