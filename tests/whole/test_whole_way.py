"""The whole way of a job on real parts: processes, valkey-server, SmolLM2, OpenAI's types."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, free_port
from models import small_folder, smollm2, smollm2_folder
from openai import OpenAI
from openai._models import construct_type, validate_type
from openai.types import Completion
from openai.types.chat import ChatCompletion
from redis import Redis

from mlx_rq import Job, as_completed, fetch, submit, submit_many
from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Task
from mlx_rq.engine.models.load import load
from mlx_rq.engine.options import EngineOptions
from mlx_rq.jobs.openai.validation import kind_of, validate
from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.jobs.queue.discovery import embedded_url
from mlx_rq.jobs.queue.workers import live_workers

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-P", "-m", "mlx_rq.worker"]
SYSTEM = {"role": "system", "content": "Answer in one word."}


@contextmanager
def process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a command of ours; what it says on standard error can be read line by line."""
    started = subprocess.Popen(
        [*COMMAND, *arguments],
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def wait_for_line(running: subprocess.Popen[str], pattern: str) -> str:
    """Reads what a process says until a line matches."""
    assert running.stderr is not None
    said = []
    for line in running.stderr:
        said.append(line)
        if re.search(pattern, line):
            return line
    raise AssertionError(f"no line matched {pattern!r}: {''.join(said)}")


def chat(question: str, **more: Any) -> dict[str, Any]:
    messages = [SYSTEM, {"role": "user", "content": question}]
    return {"messages": messages, "max_completion_tokens": 3, "temperature": 0, **more}


def mixed_jobs() -> list[dict[str, Any]]:
    """24 jobs: chats on one system prompt, completions alike and unlike, one with a stop."""
    chats = [chat(f"Say {word}.") for word in ("hi", "yes", "no", "red", "blue")]
    stories = [
        {"prompt": f"Once upon a time {who}", "max_tokens": 3, "temperature": 0}
        for who in ("a king", "a cat", "there was", "in Rome", "the sun", "we", "a cat")
    ]
    counts = [
        {"prompt": f"{n}, {n + 1}, {n + 2},", "max_tokens": 1 + n, "temperature": 0}
        for n in range(1, 7)
    ]
    seeded = [
        {"prompt": "The best colour is", "max_tokens": 2, "temperature": 1, "seed": n}
        for n in range(5)
    ]
    stopped = [{"prompt": "1, 2, 3,", "max_tokens": 12, "temperature": 0, "stop": ", 6"}]
    return [*chats, *stories, *counts, *seeded, *stopped]


def answer_texts(result: Any) -> list[str]:
    return [
        choice["message"]["content"] if "message" in choice else choice["text"]
        for choice in result["choices"]
    ]


def alone(bodies: list[dict[str, Any]], folder: Path) -> Iterator[Any]:
    """The results of jobs that are generated one at a time, so that there is never a prefix."""
    model = smollm2() if folder == smollm2_folder() else load(str(folder))
    engine = MLXEngine(model, EngineOptions(batch_size=1, share_prefixes=False))
    for body in bodies:
        assert engine.add([Task("alone", validate(kind_of(body), body))]) == []
        while not (outcomes := engine.step()):
            pass
        assert engine.totals.prefixes_held == 0
        yield outcomes[0].result


@pytest.mark.parametrize(
    ("model", "bodies"),
    [(smollm2_folder, mixed_jobs()[3::4]), (small_folder, mixed_jobs())],
    ids=["smollm2", "24 jobs, small"],
)
def test_mixed_jobs_in_one_window_answer_as_each_alone(
    redis_url: str, model: Callable[[], Path], bodies: list[dict[str, Any]]
) -> None:
    folder = model()
    jobs = submit_many(bodies)  # all wait before the worker comes: one window

    with process("worker", "--model", str(folder), "--batch", "8") as worker:
        results = {job: job.result(timeout=300) for job in as_completed(jobs, timeout=300)}
        os.kill(worker.pid, signal.SIGTERM)
        assert worker.wait(timeout=60) == 0

    for job, body, expected in zip(jobs, bodies, alone(bodies, folder), strict=True):
        result = results[job]
        assert answer_texts(result) == answer_texts(expected), body
        kind = ChatCompletion if "messages" in body else Completion
        validate_type(type_=kind, value=result)
        parsed: Any = construct_type(type_=kind, value=result)
        assert parsed.choices[0].finish_reason == expected["choices"][0]["finish_reason"]
        assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + (
            parsed.usage.completion_tokens
        )
        names = rf"{folder.name}_fp_\w+_mlx-rq-.+_mlx-.+_mlx-lm-.+"
        assert re.fullmatch(names, parsed.system_fingerprint)
        assert job.id in parsed.id
    if folder == smollm2_folder():
        assert answer_texts(results[jobs[-1]]) == [" 4, 5"]


def test_up_keeps_jobs_over_a_restart_and_ends_with_one_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_RQ_DATA_DIR", str(tmp_path))
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    port = str(free_port())
    arguments = ["up", "--model", str(small_folder()), "--batch", "4", "--queue-port", port]
    http_port = free_port()
    arguments += ["--grace", "0", "--port", str(http_port)]

    with process(*arguments) as up:
        wait_for_line(up, "serves")
        done = submit(chat("Say hi."))  # found without a URL, from another process
        assert done.redis_url == embedded_url(tmp_path)
        text = answer_texts(done.result(timeout=120))
        client = OpenAI(
            base_url=f"http://127.0.0.1:{http_port}/v1",
            api_key="none needed on loopback",
            _strict_response_validation=True,
        )
        completion: Any = client.chat.completions.create(**chat("Say hi.", model="default"))
        assert completion.choices[0].message.content == text[0]
        unfinished = submit(chat("Say hi.", max_completion_tokens=5000, min_tokens=5000))
        os.killpg(up.pid, signal.SIGINT)  # as Ctrl-C does: everybody in the terminal gets it
        assert up.wait(timeout=60) == 0

    with process(*arguments) as up:
        wait_for_line(up, "serves")
        assert answer_texts(fetch(done.id).result(timeout=PATIENCE)) == text
        again = Job(unfinished.id)
        assert again.status() in ("queued", "in_progress")
        assert again.cancel()
        os.killpg(up.pid, signal.SIGTERM)  # as `timeout` does
        assert up.wait(timeout=60) == 0
        assert up.stderr is not None
        said = up.stderr.read()
    assert re.search(r"worker \w+ ended \d jobs", said)
    assert "Redis" not in said, "Valkey was there until the worker had signed off"


def test_a_second_worker_finishes_what_a_killed_one_had(redis_url: str, connection: Redis) -> None:
    long = {"max_completion_tokens": 600, "min_tokens": 600}
    jobs = submit_many([chat(f"Say {n}.", **long) for n in range(4)])
    arguments = ["worker", "--model", str(small_folder()), "--batch", "4", "--lease", "2"]

    with process(*arguments) as first:
        while any(job.status() == "queued" for job in jobs):
            assert first.poll() is None
        (worker,) = live_workers(connection)
        os.kill(worker["pid"], signal.SIGSTOP)
        assert {job.status() for job in jobs} == {"in_progress"}
        first.kill()  # who would start another one
        os.kill(worker["pid"], signal.SIGKILL)
        first.wait()
    with process(*arguments) as second:
        for job in jobs:
            assert job.result(timeout=120)["usage"]["completion_tokens"] == 600
        os.kill(second.pid, signal.SIGTERM)
        assert second.wait(timeout=60) == 0
