"""llm, Simon Willison's tool, with its file for other servers that speak as OpenAI does."""

import os
import tempfile
from pathlib import Path
from typing import Any

from calls import ANSWER
from client_data import City

_FOLDER = tempfile.mkdtemp()
os.environ["LLM_USER_PATH"] = _FOLDER
_ENTRY = (
    "- model_name: default\n  supports_tools: true\n  supports_schema: true\n"
    f"  api_base: {os.environ['OPENAI_BASE_URL']}\n"
)
(Path(_FOLDER) / "extra-openai-models.yaml").write_text(
    f"{_ENTRY}  model_id: here\n{_ENTRY}  model_id: responses-here\n  responses: true\n"
)

import llm  # noqa: E402  (it reads the file)

_MODEL: Any = llm.get_model("here")
_HOSTED: Any = llm.get_model("responses-here")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def chat() -> None:
    assert _MODEL.prompt("What is two and two?", stream=False, key="any").text() == ANSWER


def stream() -> None:
    assert "".join(_MODEL.prompt("What is two and two?", stream=True, key="any")) == ANSWER


def _use_tools(model: Any) -> None:
    chain = model.chain("What is two and two?", tools=[add], stream=False, key="any")
    assert chain.text() == ANSWER


def tools() -> None:
    _use_tools(_MODEL)


def structured() -> None:
    answer = _MODEL.prompt("A city?", schema=City, stream=False, key="any")
    City.model_validate_json(answer.text())


def responses() -> None:
    assert _HOSTED.prompt("What is two and two?", stream=False, key="any").text() == ANSWER
    assert "".join(_HOSTED.prompt("What is two and two?", stream=True, key="any")) == ANSWER
    _use_tools(_HOSTED)
