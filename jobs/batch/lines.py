"""Reads requests from a file, one at a time: OpenAI's batch lines.

Records are split on newline bytes and on nothing else, because text may hold U+2028 and its kin. A
byte order mark, carriage returns and blank lines are not part of a record. A line that is no
request becomes a `Line` with a `fault`: one bad line never stops the reading of the others.
"""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeGuard

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.kinds import KINDS
from mlx_rq.jobs.openai.validation import RepeatedKey, short, unique_keys, validate
from mlx_rq.jobs.queue.prepare import Prepared, check_encoded

KIND_BY_URL: Mapping[str, str] = {
    request.url: kind for kind, request in KINDS.items() if request.url is not None
}

MAX_LINE_BYTES = 32 * 1024 * 1024
"""The longest line that is read. A body of the size that jobs may have is shorter, even escaped."""


OpenFile = Callable[[Path, str], AbstractContextManager[BinaryIO]]
"""Opens a file that errors call by the name."""


class Line(NamedTuple):
    """One request of the input, or what is wrong with it (`fault`).

    `number` counts lines or rows from 1. `encoded` is the body as JSON. `fingerprint` changes with
    all that shapes the answer. `row` holds the columns that a dataset repeats beside the answer.
    """

    number: int
    custom_id: str | None
    url: str
    body: Mapping[str, Any]
    encoded: bytes
    fingerprint: bytes
    row: Mapping[str, Any]
    fault: RequestError | None = None

    @property
    def is_stored(self) -> bool:
        """Whether its answer is to be kept after it was written to the output."""
        return self.body.get("store") is True

    def without_body(self) -> "Line":
        """Gives the line as it is kept while its job runs; the body lies in Redis then."""
        return self._replace(body={"store": True} if self.is_stored else {}, encoded=b"")


class Source(Protocol):
    """Lines that can be read again and again, always the same."""

    @property
    def name(self) -> str:
        """What errors call it."""

    @property
    def unit(self) -> str:
        """What is counted: line or row."""

    def __iter__(self) -> Iterator[Line]: ...


def input_changed(source: Source) -> RequestError:
    """The error for an input that is not what it was when the run began."""
    return RequestError(
        f"{source.name} changed while it was run. The same command runs what is new.",
        code="input_changed",
    )


def good_line(
    number: int,
    custom_id: str,
    url: str,
    body: Mapping[str, Any],
    row: Mapping[str, Any],
) -> Line:
    """Makes the line of a request that can be tried; raises RequestError where it is not JSON."""
    try:
        # Key order counts: it reaches prompts through tools and schemas.
        encoded = json.dumps(body).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}.", code="invalid_json") from None
    # That of the list of the three as JSON.
    beginning = f"[{encode_basestring_ascii(custom_id)}, {encode_basestring_ascii(url)}, "
    fingerprint = digest(b"%s%s]" % (beginning.encode(), encoded))
    return Line(number, custom_id, url, body, encoded, fingerprint, row)


def bad_line(
    number: int,
    fault: RequestError,
    raw: bytes,
    *,
    custom_id: str | None = None,
    row: Mapping[str, Any] | None = None,
) -> Line:
    """Makes the line of something that is no request; `raw` tells it from other bad lines."""
    fingerprint = digest(b"%d:%s:%s" % (number, str(fault).encode(), raw))
    row = {"custom_id": custom_id} if row is None else row
    return Line(number, custom_id, "", {}, b"", fingerprint, row, fault)


def digest(data: bytes) -> bytes:
    """Gives 16 bytes that stand for the data."""
    return hashlib.blake2b(data, digest_size=16).digest()


def read_request(line: Line) -> JobRequest:
    """Validates a line; raises RequestError where it cannot be put into the queue."""
    if line.fault is not None:
        raise line.fault
    request = validate(KIND_BY_URL[line.url], line.body)
    check_encoded(line.encoded, line.body)
    return request


def prepare_line(line: Line) -> Prepared:
    """Makes a line ready for the queue; raises RequestError where it cannot be put there."""
    return Prepared.of(read_request(line), line.body, line.encoded)


def open_plain(path: Path, name: str) -> BinaryIO:
    """Opens a file as it is."""
    return path.open("rb")


def read_lines(
    path: Path, name: str = "", opened: OpenFile = open_plain
) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not blank, stripped, with their numbers.

    Of a line above MAX_LINE_BYTES comes just so much that it can be seen to be too long.
    """
    with opened(path, name) as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            rest = raw
            while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES + 1)
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if raw := raw.strip(b" \t\r\n"):
                yield number, raw


def parse_object(raw: bytes) -> dict[str, Any]:
    """Reads one record as a JSON object; raises RequestError where it is none."""
    if len(raw) > MAX_LINE_BYTES:
        raise RequestError(
            f"The line is longer than {MAX_LINE_BYTES:,} bytes.", code="request_too_large"
        )
    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise RequestError(f"This line is not UTF-8: {error}.", code="invalid_json_line") from None
    except RepeatedKey as error:
        raise RequestError(
            f"This line is not parseable as valid JSON: {error}.", code="invalid_json_line"
        ) from None
    except (ValueError, RecursionError):
        raise RequestError(
            "This line is not parseable as valid JSON.", code="invalid_json_line"
        ) from None
    if not isinstance(value, dict):
        raise RequestError("This line is not a JSON object.", code="invalid_json_line")
    return value


@dataclass(frozen=True)
class BatchFile:
    """The lines of a file in OpenAI's batch form. `settings` go into every body, over its own."""

    path: Path
    name: str
    settings: Mapping[str, Any]
    opened: OpenFile = open_plain
    unit: str = "line"

    def __iter__(self) -> Iterator[Line]:
        for number, raw in read_lines(self.path, self.name, self.opened):
            record: dict[str, Any] = {}
            try:
                record = parse_object(raw)
                _check_record(record)
                custom_id, body = record["custom_id"], {**record["body"], **self.settings}
                row = {"custom_id": custom_id}
                line = good_line(number, custom_id, record["url"], body, row)
            except RequestError as error:
                known = record.get("custom_id")
                line = bad_line(number, error, raw, custom_id=known if is_id(known) else None)
            yield line


def _check_record(record: Mapping[str, Any]) -> None:
    """Raises RequestError unless the record has the form of a batch line."""
    for field, expected in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        value = record.get(field)
        if value is None:
            raise RequestError(
                f"Missing required parameter: '{field}'.",
                code="missing_required_parameter",
                param=field,
            )
        if not isinstance(value, expected):
            what = "an object" if expected is dict else "a string"
            raise RequestError(
                f"Invalid type for '{field}': expected {what}, but got {short(value)!r} instead.",
                code="invalid_type",
                param=field,
            )
    if not is_id(record["custom_id"]):
        raise RequestError(
            f"Invalid 'custom_id': expected a text, but got {record['custom_id']!r} instead.",
            code="invalid_value",
            param="custom_id",
        )
    if record["method"] != "POST":
        raise RequestError(
            f"Invalid 'method': expected 'POST', but got {record['method']!r} instead.",
            code="invalid_value",
            param="method",
        )
    if record["url"] not in KIND_BY_URL:
        raise RequestError(
            f"Invalid 'url': expected one of {', '.join(KIND_BY_URL)}, but got "
            f"{record['url']!r} instead.",
            code="invalid_url",
            param="url",
        )


def is_id(value: Any) -> TypeGuard[str]:
    """Tells whether a value can name a line: a text that can be written as UTF-8."""
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
