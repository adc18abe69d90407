"""The records that are written, in OpenAI's shapes, and how they are read back."""

import json
from typing import Any

import pytest
from batch_helpers import batch_line

from mlx_rq.jobs.batch.lines import Line, bad_line, good_line
from mlx_rq.jobs.batch.records import Ended, Stored, encode_record, read_stored, record
from mlx_rq.jobs.openai.errors import ErrorType, RequestError, error_object

JOB = "0123456789abcdef0123456789abcdef"


def line() -> Line:
    request = batch_line("a")
    return good_line(1, "a", request["url"], request["body"], {"custom_id": "a"})


def failed(code: str | None, type: ErrorType) -> Ended:
    return Ended(line(), {"error": error_object("It went wrong.", code=code, type=type)}, JOB)


class TestTheShapes:
    def test_an_answer(self) -> None:
        response = {"object": "chat.completion", "choices": []}
        assert record(Ended(line(), response, JOB)) == {
            "id": f"batch_req_{line().fingerprint.hex()}{JOB}",
            "custom_id": "a",
            "response": {"status_code": 200, "request_id": f"req_{JOB}", "body": response},
            "error": None,
        }

    @pytest.mark.parametrize(
        ("code", "type", "status"),
        [
            ("context_length_exceeded", "invalid_request_error", 400),
            (None, "invalid_request_error", 400),
            ("model_not_found", "invalid_request_error", 404),
            ("job_lost", "server_error", 500),
        ],
    )
    def test_an_error_of_the_endpoint_is_in_the_response(
        self, code: str | None, type: ErrorType, status: int
    ) -> None:
        ended = failed(code, type)
        assert record(ended)["error"] is None
        assert record(ended)["response"] == {
            "status_code": status,
            "request_id": f"req_{JOB}",
            "body": {"error": ended.error},
        }

    @pytest.mark.parametrize(
        ("code", "type", "name"),
        [
            ("cancelled", "cancelled", "batch_cancelled"),
            ("request_timeout", "server_error", "request_timeout"),
        ],
    )
    def test_an_ending_that_http_has_no_status_for_is_beside_it(
        self, code: str, type: ErrorType, name: str
    ) -> None:
        value = record(failed(code, type))
        assert value["response"] is None
        assert value["error"] == {"code": name, "message": "It went wrong."}

    def test_a_line_that_was_no_request_says_which_it_was(self) -> None:
        fault = RequestError("No JSON.", code="invalid_json_line")
        value = record(Ended(bad_line(7, fault, b"oops"), {"error": fault.error}))
        assert value["custom_id"] is None
        assert value["response"] is None
        assert value["error"] == {
            "code": "invalid_json_line",
            "message": "No JSON.",
            "param": None,
            "line": 7,
        }


class TestReadingBack:
    def test_tells_the_line_the_job_and_the_error(self) -> None:
        print_ = line().fingerprint
        answered = Ended(line(), {"object": "chat.completion"}, JOB)
        refused = Ended(line(), {"error": error_object("No.", code="invalid_value")})
        assert read_stored(encode_record(record(answered))) == Stored(print_, JOB, None)
        assert read_stored(encode_record(record(refused))) == Stored(print_, "", "invalid_value")
        nameless = failed(None, "invalid_request_error")
        assert read_stored(encode_record(record(nameless))).code == "invalid_request_error"

    @pytest.mark.parametrize(
        "value",
        [
            1,
            [],
            {"id": "batch_req_1", "response": None, "error": {"code": "x"}},
            {"id": f"other_thing_{JOB}", "response": None, "error": {"code": "x"}},
            {"id": 7, "response": None, "error": {"code": "x"}},
            {"id": f"batch_req_{JOB}"},
            {"id": f"batch_req_{JOB}", "response": None, "error": None},
        ],
    )
    def test_refuses_what_is_none_of_ours(self, value: Any) -> None:
        with pytest.raises(ValueError, match=r"it is no record|its id|non-hexadecimal"):
            read_stored(json.dumps(value).encode())

    @pytest.mark.parametrize("raw", [b"", b"\0\0\0\n", b"\xff\n", b'{"id": "batch_req_'])
    def test_refuses_what_was_torn(self, raw: bytes) -> None:
        with pytest.raises(ValueError):  # noqa: PT011
            read_stored(raw)
