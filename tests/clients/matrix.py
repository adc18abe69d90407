"""Runs other people's clients against the server, and writes docs/clients/index.md.

`make test-clients` runs it. Each client has an environment of its own below `.clients/`, with the
versions that stand here. A client that cannot be installed or run is in the table as that.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "api_stub", "engine"))]

from calls import FEATURES  # noqa: E402
from scripted import scripted_server  # noqa: E402

ENVIRONMENTS = ROOT / ".clients"
PAGES = ROOT / "docs" / "clients"


class Client(NamedTuple):
    """A client: what the table calls it, its calls, its page, and what is installed for it."""

    name: str
    calls: str
    page: str
    packages: tuple[str, ...]
    has_batches: bool = True
    """Whether it can ask for batches at all; everything else, all clients can."""

    @property
    def environment(self) -> Path:
        return ENVIRONMENTS / self.calls

    @property
    def features(self) -> tuple[str, ...]:
        return tuple(name for name in FEATURES if name != "batch" or self.has_batches)

    @property
    def version(self) -> str:
        return self.packages[0].rpartition("==" if self.calls in PYTHON else "@")[2]


_PYTHON = (
    Client("openai-python", "client_openai", "openai", ("openai==3.57.0",)),
    Client("openai-agents", "client_openai_agents", "others", ("openai-agents==0.24.0",), False),
    Client("instructor", "client_instructor", "instructor", ("instructor==1.17.0",)),
    Client(
        "pydantic-ai", "client_pydantic_ai", "pydantic-ai", ("pydantic-ai-slim[openai]==2.68.0",)
    ),
    Client("LangChain", "client_langchain", "langchain", ("langchain-openai==1.7.4",), False),
    Client(
        "LlamaIndex",
        "client_llama_index",
        "llamaindex",
        ("llama-index-llms-openai-like==0.8.1",),
        False,
    ),
    Client("litellm", "client_litellm", "litellm", ("litellm==1.110.2",)),
    Client("DSPy", "client_dspy", "others", ("dspy==3.4.1",), False),
    Client("llm", "client_llm", "others", ("llm==0.36",), False),
)
_NODE = (
    Client("openai-node", "client_openai_node", "openai", ("openai@7.55.0", "zod@4.6.7")),
    Client(
        "Vercel AI SDK",
        "client_vercel",
        "vercel",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
    ),
)
PYTHON = {client.calls for client in _PYTHON}
CLIENTS = (*_PYTHON, *_NODE)

INSTALL_SECONDS, RUN_SECONDS = 900, 300


def main() -> int:
    """Runs all clients, or those that are named; writes the page where all were run."""
    wanted = set(sys.argv[1:])
    chosen = [client for client in CLIENTS if not wanted or client.name in wanted]
    with tempfile.TemporaryDirectory() as folder, scripted_server(Path(folder)) as url:
        found = {client.name: _try(client, url) for client in chosen}
    for name, results in found.items():
        print(name, json.dumps(results, indent=2), flush=True)
    if not wanted:
        (PAGES / "index.md").write_text(_page(found))
    return int(any(result != "ok" for results in found.values() for result in results.values()))


def _try(client: Client, url: str) -> dict[str, str]:
    """Installs a client where it is not, and makes its calls."""
    try:
        command, folder = _installed(client)
    except (OSError, subprocess.SubprocessError) as error:
        return {"installation": _why(error)}
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "any",
        "PYTHONPATH": "",
    }
    try:
        done = subprocess.run(
            [*command, client.calls, str(PAGES / f"{client.page}.md")],
            cwd=folder,
            env=environment,
            timeout=RUN_SECONDS,
            check=True,
            capture_output=True,
            text=True,
        )
        results: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError, subprocess.SubprocessError) as error:
        return {"start": _why(error)}
    missing = dict.fromkeys((*client.features, "page"), "its call is not there")
    return {**missing, **results}


def _installed(client: Client) -> tuple[list[str], Path]:
    """Gives the command that makes a client's calls, and the folder to run it in."""
    there, quiet = client.environment, {"check": True, "capture_output": True, "text": True}
    stamp = there / "installed"
    fresh = not stamp.exists() or stamp.read_text() != " ".join(client.packages)
    if client.calls in PYTHON:
        python = there / "bin" / "python"
        if fresh:
            subprocess.run([sys.executable, "-m", "venv", there], **quiet)
            install = [python, "-m", "pip", "install", "--disable-pip-version-check"]
            subprocess.run([*install, *client.packages], timeout=INSTALL_SECONDS, **quiet)
        command, folder = [str(python), str(HERE / "calls.py")], HERE
    else:
        there.mkdir(parents=True, exist_ok=True)
        if fresh:
            install = ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(there)]
            subprocess.run([*install, *client.packages], timeout=INSTALL_SECONDS, **quiet)
        for script in HERE.glob("*.mjs"):  # Node looks for packages beside the script
            shutil.copy(script, there)
        command, folder = ["node", "calls.mjs"], there
    stamp.write_text(" ".join(client.packages))
    return command, folder


def _why(error: Exception) -> str:
    """Says in one line what went wrong."""
    said = getattr(error, "stderr", None) or str(error)
    return (said.strip().splitlines() or [type(error).__name__])[-1][:300]


def _page(found: dict[str, dict[str, str]]) -> str:
    rows = []
    notes = []
    for client in CLIENTS:
        results = found[client.name]
        cells = [_cell(results, feature) for feature in FEATURES]
        named = f"[{client.name} {client.version}]({client.page}.md)"
        rows.append(f"| {named} | {' | '.join(cells)} |")
        notes += [f"- {client.name}, {what}: {why}" for what, why in results.items() if why != "ok"]
    page = (HERE / "clients.template.md").read_text()
    page = page.replace("{features}", " | ".join(FEATURES)).replace("{rows}", "\n".join(rows))
    return page.replace("{line}", "---|" * (len(FEATURES) + 1)).replace(
        "{notes}", "\n".join(["", "What did not work:", "", *notes, ""]) if notes else ""
    )


def _cell(results: dict[str, str], feature: str) -> str:
    if not {"installation", "start"}.isdisjoint(results):
        return "not run"
    return {"ok": "✓", None: "-"}.get(results.get(feature), "✗")


if __name__ == "__main__":
    sys.exit(main())
