"""llm, Simon Willison's tool, with its file for other servers that speak as OpenAI does."""

import os
import tempfile
from pathlib import Path
from typing import Any

from calls import ANSWER
from client_data import City

_FOLDER = tempfile.mkdtemp()
os.environ["LLM_USER_PATH"] = _FOLDER
(Path(_FOLDER) / "extra-openai-models.yaml").write_text(
    "- model_id: here\n  model_name: default\n  supports_tools: true\n  supports_schema: true\n"
    f"  api_base: {os.environ['OPENAI_BASE_URL']}\n"
)

import llm  # noqa: E402  (it reads the file)

_MODEL: Any = llm.get_model("here")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def chat() -> None:
    assert _MODEL.prompt("What is two and two?", stream=False, key="any").text() == ANSWER


def stream() -> None:
    assert "".join(_MODEL.prompt("What is two and two?", stream=True, key="any")) == ANSWER


def tools() -> None:
    chain = _MODEL.chain("What is two and two?", tools=[add], stream=False, key="any")
    assert chain.text() == ANSWER


def structured() -> None:
    answer = _MODEL.prompt("A city?", schema=City, stream=False, key="any")
    City.model_validate_json(answer.text())
