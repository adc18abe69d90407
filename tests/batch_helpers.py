"""What the tests of batches have in common: request lines, an engine that echoes, the command."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, answer, eventually

from mlx_rq.engine.interface import Task
from mlx_rq.jobs.batch import files as batch_files
from mlx_rq.jobs.batch.lines import Line, read_request
from mlx_rq.jobs.batch.records import Ended
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.queue.connection import URL_VARIABLE

CHAT = "/v1/chat/completions"


def batch_line(custom_id: str, content: str = "Say hi.", **body: Any) -> dict[str, Any]:
    """A chat request as a batch line has it."""
    body = {"messages": [{"role": "user", "content": content}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def batch_lines(count: int) -> list[dict[str, Any]]:
    """So many requests, r0 to rN, each with a prompt of its own."""
    return [batch_line(f"r{number}", f"Say {number}.") for number in range(count)]


@contextmanager
def full_disk_at(custom_id: str) -> Iterator[None]:
    """Lets the disk be full, while the block runs, when one line's record is to be written."""
    whole = batch_files.encode_record

    def full(value: Any) -> bytes:
        if value["custom_id"] == custom_id:
            raise OSError(28, "No space left on device")
        return whole(value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_files, "encode_record", full)
        yield


def answered(line: Line, text: str, finish_reason: str = "stop") -> Ended:
    """A line with the chat completion that came of it."""
    response = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"message": {"content": text}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7},
    }
    return Ended(line, response, "1" * 32)


def refusal(line: Line) -> RequestError | None:
    """Why a line cannot be put into the queue; None where it can."""
    try:
        read_request(line)
    except RequestError as error:
        return error
    return None


def write_jsonl(path: Path, values: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line_count(path: Path) -> int:
    """Whole lines in a file, which may not be there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def content_of(record: Mapping[str, Any]) -> str:
    """The text of the answer in an output record."""
    text: str = record["response"]["body"]["choices"][0]["message"]["content"]
    return text


def contents(path: Path) -> dict[str, str]:
    """What was answered to whom, in the order of the file."""
    return {record["custom_id"]: content_of(record) for record in read_jsonl(path)}


def prompt_of(task: Task) -> str:
    """The last turn of a task's chat."""
    assert isinstance(task.request, ChatRequest)
    return str(task.request.messages[-1].content)


def says(text: str, task: Task, finish_reason: str = "stop") -> dict[str, Any]:
    """An answer with this text."""
    response = answer(task)
    response["choices"][0]["message"]["content"] = text
    response["choices"][0]["finish_reason"] = finish_reason
    return response


def echo(task: Task) -> dict[str, Any]:
    """An answer that repeats the prompt, so that it is seen whose it is."""
    return says(f"You said: {prompt_of(task)}", task)


def echoes(count: int) -> dict[str, str]:
    """What `batch_lines(count)` have as answers."""
    return {f"r{number}": f"You said: Say {number}." for number in range(count)}


def generated(engine: FakeEngine) -> Counter[str]:
    """How often each prompt was given to the engine."""
    return Counter(prompt_of(task) for task in engine.added)


class BatchProcess:
    """A `mlx-rq batch` in a process of its own."""

    def __init__(self, redis_url: str, arguments: Sequence[Any]) -> None:
        command = [sys.executable, "-P", "-m", "mlx_rq.worker", "batch", *map(str, arguments)]
        self._out, self._err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env={**os.environ, URL_VARIABLE: redis_url},
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
        )

    def wait_for_lines(self, path: Path, count: int) -> None:
        """Returns once the file has so many lines; fails where the command ended before."""

        def there() -> bool:
            assert self._process.poll() is None, self.said()
            return line_count(path) >= count

        eventually(there, f"line {count} of {path.name}")

    def send(self, sent: signal.Signals) -> None:
        self._process.send_signal(sent)

    def kill(self) -> None:
        """SIGKILL: the process has no chance to tidy up."""
        self._process.kill()
        self._process.wait()

    def said(self) -> str:
        """What it wrote to standard error so far."""
        self._err.seek(0)
        return self._err.read()

    def end(self, timeout: float = PATIENCE) -> tuple[int, str, str]:
        """Waits for the end; returns the exit code, standard output and standard error."""
        code = self._process.wait(timeout)
        self._out.seek(0)
        return code, self._out.read(), self.said()
