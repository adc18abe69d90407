"""A payload is data: read as JSON, never run."""

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue.payload import (
    FUNCTION,
    InertJob,
    only_an_mlx_rq_worker_can_run_this,
    read_payload,
)

GOOD = [FUNCTION, None, [], {"kind": "chat", "body": {"messages": []}}]


def packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode())


def refusal(data: bytes | None) -> str:
    with pytest.raises(RequestError, match=r"^The payload is not a job of mlx-rq: ") as refused:
        read_payload(data)
    assert (refused.value.code, refused.value.param) == ("invalid_payload", None)
    return str(refused.value)


def test_what_submit_wrote_is_read() -> None:
    assert read_payload(packed(GOOD)) == ("chat", {"messages": []})


def test_jobs_that_waited_through_an_upgrade_are_read() -> None:
    former = ["mlx_rq.jobs.payload.only_an_mlx_rq_worker_can_run_this", *GOOD[1:]]

    assert read_payload(packed(former)) == ("chat", {"messages": []})


class TouchesAFile:
    """Unpickling this makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_pickle_is_refused_and_not_loaded(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    data = pickle.dumps((FUNCTION, None, (), {"kind": "chat", "body": TouchesAFile(trap)}))
    pickle.loads(data)
    assert trap.exists(), "the trap works"
    trap.unlink()

    refusal(zlib.compress(data))
    refusal(data)
    assert not trap.exists()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "it has no data"),
        (b"", "it is cut off"),
        (b"not compressed", "incorrect header check"),
        (packed(GOOD)[:-1], "it is cut off"),
        (packed(GOOD)[:20], "it is cut off"),
        (zlib.compress(b"[1, 2"), "Expecting"),
        (zlib.compress(b"\xff\xfe\xff"), "codec can't decode"),
        (packed(["os.system", None, ["true"], {}]), "it calls 'os.system'"),
        (packed([FUNCTION, None, []]), "not enough values"),
        (packed([*GOOD, 1]), "too many values"),
        (packed({"a": 1}), "not enough values"),
        (packed("abcd"), "it calls 'a'"),
        (packed(5), "cannot unpack"),
        (packed(None), "cannot unpack"),
        (packed([FUNCTION, None, [], {}]), "'kind'"),
        (packed([FUNCTION, None, [], []]), "indices must be integers"),
        (packed([FUNCTION, None, [], {"kind": "chat"}]), "'body'"),
        (packed([FUNCTION, None, [], {"kind": 5, "body": {}}]), "its kind is not a string"),
        (packed([FUNCTION, None, [], {"kind": "chat", "body": []}]), "its body not an object"),
        (zlib.compress(b"[" * 100_000), "recursion"),
    ],
)
def test_what_submit_did_not_write_is_refused(data: bytes | None, reason: str) -> None:
    assert reason in refusal(data)


def test_a_bomb_is_not_unpacked() -> None:
    hundred_mebibytes = b'["' + b" " * (100 * 1024 * 1024) + b'"]'
    bomb = zlib.compress(hundred_mebibytes, 1)
    assert len(bomb) < 1024 * 1024
    assert "it is too large" in refusal(bomb)


@given(st.binary(max_size=200) | st.binary(max_size=200).map(zlib.compress))
def test_any_bytes_are_refused_without_another_error(data: bytes) -> None:
    refusal(data)


def test_a_stock_rq_worker_is_told_what_to_start_instead() -> None:
    with pytest.raises(RuntimeError, match="start `mlx-rq worker` on this queue"):
        only_an_mlx_rq_worker_can_run_this(kind="chat", body={})


def test_a_job_record_that_cannot_be_read_is_no_job(connection: Any) -> None:
    # RQ's recovery goes on with the next job where there is none, but not after another error.
    from rq.exceptions import NoSuchJobError

    connection.hset("rq:job:broken", mapping={"data": b"x", "status": "started", "ttl": "soon"})
    with pytest.raises(NoSuchJobError):
        InertJob.fetch("broken", connection=connection)
