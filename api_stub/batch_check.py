"""The check of a batch's whole file before anything runs: what is wrong with it, line by line.

What is wrong with a single body is not looked for here: its line gets a record in the error file.
"""

from collections.abc import Callable
from typing import Any

from mlx_rq.jobs.batch.lines import Line, Source, digest
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest, asked_model
from mlx_rq.jobs.openai.responses import ResponsesRequest

MAX_LINES = 50_000
MAX_FAULTS = 100
"""Faults that are told of one batch; a file that is wrong throughout has thousands."""

IsServed = Callable[[str], bool]

_CALLED = {
    ChatRequest.url: "Chat Completions",
    CompletionRequest.url: "Completions",
    ResponsesRequest.url: "Responses",
}
"""What OpenAI calls the endpoints of batches."""


def fault(
    code: str | None, message: str, param: str | None = None, line: int | None = None
) -> dict[str, Any]:
    """Makes an entry of a batch's list of errors."""
    return {"code": code, "line": line, "message": message, "param": param}


def check_file(source: Source, endpoint: str, is_served: IsServed) -> list[dict[str, Any]]:
    """Reads all lines and tells what keeps the batch from running, at most MAX_FAULTS things."""
    checker = _Checker(endpoint, is_served)
    for line in source:
        if line.number > MAX_LINES and checker.count >= MAX_LINES:
            message = f"The file has more than {MAX_LINES:,} requests, the limit of a batch."
            return [fault("invalid_request", message, "file_id")]
        checker.look(line)
        if len(checker.faults) >= MAX_FAULTS:
            break
    if not checker.count:
        return [fault("empty_file", "The file holds no requests.", "file_id")]
    return checker.faults


class _Checker:
    """What was seen of a file so far."""

    def __init__(self, endpoint: str, is_served: IsServed) -> None:
        self._endpoint = endpoint
        self._is_served = is_served
        self._seen: set[bytes] = set()
        self._model: str | None = None
        self.count = 0
        self.faults: list[dict[str, Any]] = []

    def look(self, line: Line) -> None:
        """Adds what is wrong with a line, if anything."""
        self.count += 1
        try:
            self._check(line)
        except RequestError as error:
            self.faults.append(fault(error.code, str(error), error.param, line.number))

    def _check(self, line: Line) -> None:
        if line.fault is not None and line.fault.code != "invalid_url":
            raise line.fault
        if line.fault is not None or line.url != self._endpoint:
            raise RequestError(
                "The URL provided for this request does not match the batch endpoint.",
                code="invalid_url",
                param="url",
            )
        identity = digest(str(line.custom_id).encode())
        if identity in self._seen:
            raise RequestError(
                f"The custom_id {line.custom_id!r} is that of an earlier line already.",
                code="duplicate_custom_id",
                param="custom_id",
            )
        self._seen.add(identity)
        if line.body.get("stream"):
            raise RequestError(
                f"{_CALLED[line.url]}: Streaming is not supported in the Batch API.",
                code="streaming_unsupported",
                param="body.stream",
            )
        self._check_model(line)

    def _check_model(self, line: Line) -> None:
        """Raises RequestError unless the model is that of all lines; without one, any will do."""
        model, adapter = line.body.get("model"), line.body.get("adapters")
        if (
            not isinstance(model, str)
            or not isinstance(adapter, str | None)
            or "" in (model, adapter)
        ):
            return  # what is wrong with it, the line's own record says
        model = asked_model(model, adapter)
        if self._model is None:
            if not self._is_served(model):
                raise RequestError(
                    f"The provided model '{model}' is not supported by the Batch API.",
                    code="model_not_found",
                    param="body.model",
                )
            self._model = model
        if model != self._model:
            raise RequestError(
                f"All requests of a batch have one model: expected {self._model!r}, but got "
                f"{model!r} instead.",
                code="mismatched_model",
                param="body.model",
            )
