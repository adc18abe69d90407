"""The records that a batch writes, one JSON object a line, in OpenAI's shapes.

A record's `id` is made of its line's fingerprint and its job's id. So the output itself says which
lines are done, and a line that changed is seen to be another: no second file can disagree with it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mlx_rq.jobs.batch.lines import Line
from mlx_rq.jobs.openai.errors import error_in, http_status
from mlx_rq.jobs.openai.json_line import json_line

_ID_PREFIX = "batch_req_"
_FINGERPRINT_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Ended:
    """A line with what came of it: the response object, or `{"error": …}`.

    `job_id` is None where the line never became a job.
    """

    line: Line
    result: Mapping[str, Any]
    job_id: str | None = None

    @property
    def error(self) -> Mapping[str, Any] | None:
        """The error object of a line that has no answer."""
        return error_in(self.result)


def record(ended: Ended) -> dict[str, Any]:
    """Writes what came of a line as a record of the output or of the error file."""
    line, error = ended.line, ended.error
    result: dict[str, Any] = {
        "id": f"{_ID_PREFIX}{line.fingerprint.hex()}{ended.job_id or ''}",
        "custom_id": line.custom_id,
        "response": None,
        "error": None,
    }
    if error is not None and line.fault is not None:
        # There was no request: the shape is that of an error in a batch's own list.
        keys = ("code", "message", "param")
        result["error"] = {**{key: error[key] for key in keys}, "line": line.number}
    elif error is not None and (code := _own_code(error)) is not None:
        result["error"] = {"code": code, "message": error["message"]}
    else:
        result["response"] = {
            "status_code": 200 if error is None else http_status(error),
            "request_id": f"req_{ended.job_id or line.fingerprint.hex()}",
            "body": ended.result,
        }
    return result


def encode_record(value: Mapping[str, Any]) -> bytes:
    """Writes a record as a line."""
    # One error that quotes half of a surrogate pair must not be the end of the whole batch.
    return json_line(value).encode(errors="replace") + b"\n"


def may_be_damaged(raw: bytes) -> bool:
    """Tells whether a line can be what is left of a record after a kill or a power cut."""
    beginning = f'{{"id":"{_ID_PREFIX}'.encode()
    return raw.startswith((beginning, b"\0")) or beginning.startswith(raw)


class Stored(NamedTuple):
    """What is read back of a record: which line and job it is of, and its error code.

    `job_id` is empty where the line never became a job; `code` is None for an answer.
    """

    fingerprint: bytes
    job_id: str
    code: str | None


def read_stored(raw: bytes) -> Stored:
    """Reads a line that `encode_record` wrote; raises ValueError where it is another's."""
    try:
        value = json.loads(raw)
        prefix, digits = value["id"][: len(_ID_PREFIX)], value["id"][len(_ID_PREFIX) :]
        fingerprint = bytes.fromhex(digits[:_FINGERPRINT_DIGITS])
        code = code_of(value)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it is no record of a batch: {error!r}") from None
    if prefix != _ID_PREFIX or 2 * len(fingerprint) != _FINGERPRINT_DIGITS:
        raise ValueError("its id is not one of ours")
    return Stored(fingerprint, digits[_FINGERPRINT_DIGITS:], code)


def code_of(value: Mapping[str, Any]) -> str | None:
    """Gives the error code of a record; None where it holds an answer."""
    error = value["error"]
    if error is None and value["response"]["status_code"] == 200:
        return None
    if error is None:
        error = value["response"]["body"]["error"]
    return str(error["code"] or error.get("type") or "error")


def _own_code(error: Mapping[str, Any]) -> str | None:
    """Names an ending that HTTP has no status for, as OpenAI's batches do."""
    if error["type"] == "cancelled":
        return "batch_cancelled"
    code: str | None = error["code"]
    return code if code in ("request_timeout", "batch_cancelled", "batch_expired") else None
