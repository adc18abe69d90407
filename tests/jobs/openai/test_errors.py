"""Errors that a producer catches."""

import pickle

import pytest

from mlx_rq import (
    IdempotencyConflict,
    JobFailed,
    JobNotFound,
    NotParsed,
    QueueFull,
    RedisUnavailable,
    RequestError,
    ResultTimeout,
)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("No.", code="no", param="model"),
        IdempotencyConflict("k"),
        QueueFull("jobs", 9, 10, 4),
        JobFailed("abc", {"code": "no", "message": "No."}),
        JobNotFound("abc"),
        NotParsed("abc", "{", "length", ValueError("x")),
        RedisUnavailable("away"),
        ResultTimeout("late"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_they_come_out_of_a_pool_of_processes_as_they_are(error: Exception) -> None:
    came = pickle.loads(pickle.dumps(error))
    assert (type(came), came.args, vars(came)) == (type(error), error.args, vars(error))
