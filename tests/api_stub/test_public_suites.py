"""Public suites against the server: llm-comply for shapes, schemathesis for what is sent."""

import re
import subprocess
import sys
from importlib.resources import files
from typing import Any

import pytest
from fakes import FakeEngine, StartWorker
from llm_comply.config import ComplianceConfig
from llm_comply.result import TestStatus as Status
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests import get_tests
from servers import RunningServer, answer_any

from mlx_rq.engine.interface import Task
from mlx_rq.jobs.openai.responses import ResponsesRequest

FAILED = Status.FAILED

OUT_OF_SCOPE = {
    # A text model sees no images, and nothing here is compacted.
    "openai-chat": {"chat-image-input"},
    "open-responses": {
        "image-input",
        "compact-response",
        "compact-missing-model",
    },
}


def _answer(task: Task) -> dict[str, Any]:
    """Calls the first tool where there are any."""
    result = answer_any(task)
    if not task.request.tools:  # type: ignore[union-attr]
        return result
    arguments = '{"location": "Paris"}'
    if isinstance(task.request, ResponsesRequest):
        call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed"}
        name = task.request.tools[0].name  # type: ignore[index]
        return {**result, "output": [{**call, "name": name, "arguments": arguments}]}
    name = task.request.tools[0].function.name  # type: ignore[union-attr,index]
    function = {"name": name, "arguments": arguments}
    choice = result["choices"][0]
    choice["message"] |= {
        "content": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }
    return {**result, "choices": [{**choice, "finish_reason": "tool_calls"}]}


@pytest.mark.parametrize(
    ("suite", "specification"),
    [("openai-chat", "openai_chat.json"), ("open-responses", "openresponses.json")],
)
def test_llm_comply(
    server: RunningServer,
    start_worker: StartWorker,
    suite: str,
    specification: str,
) -> None:
    start_worker(FakeEngine(answer_with=_answer))
    cases = [case for case in get_tests(suite) if case.id not in OUT_OF_SCOPE[suite]]
    runner = Runner(
        ComplianceConfig(base_url=f"{server.url}/v1", api_key="none", model="fake"),
        cases,
        SpecLoader(str(files("llm_comply") / "specs" / specification)),
    )
    found = runner.run_all()
    assert {result.id: result.errors for result in found.results if result.status is FAILED} == {}
    assert found.passed == len(cases) - 1  # that with a summary of reasoning is skipped


def test_schemathesis(server: RunningServer, start_worker: StartWorker) -> None:
    """Requests made from the server's own description never make it fail."""
    start_worker(FakeEngine(answer_with=answer_any))
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,"
        "response_headers_conformance,response_schema_conformance"
    )
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--phases", "examples,fuzzing", "--max-examples", "4", "--seed", "7"),
            *("--checks", checks, "--request-timeout", "60", "--generation-database", "none"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stdout
    assert re.search(r"\d+ generated, \d+ passed", run.stdout), run.stdout
