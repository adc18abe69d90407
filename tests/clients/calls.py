"""Runs the calls of one client in the client's own environment, and prints what came of each.

`python calls.py client_openai PAGE` with the server's URL in OPENAI_BASE_URL, where clients look.
"""

import importlib
import json
import os
import re
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

FEATURES = ("chat", "stream", "tools", "structured", "responses", "batch")
"""Each a function of the client's module, where the client does it at all."""

ASK: Any = [{"role": "user", "content": "What is two and two?"}]
ANSWER = "four"
"""What the scripted model says where it is asked for nothing else."""
JSON_ANSWER = {"city": {"name": "x", "people": 1}}
"""What it says where it is asked for any JSON object."""


PAGES_URL = "http://127.0.0.1:8000/v1"


def main() -> None:
    """Makes all calls of the client that the command line names, and runs its page's examples."""
    client, page = importlib.import_module(sys.argv[1]), Path(sys.argv[2])
    calls = {feature: getattr(client, feature, None) for feature in FEATURES}
    found = {}
    for name, call in {**calls, "page": lambda: run_page(page)}.items():
        if call is None:
            continue
        try:
            call()
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps(found))


def run_page(page: Path) -> None:
    """Runs the blocks of a page for which everything is installed, each by itself."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
    text = page.read_text().replace(PAGES_URL, os.environ["OPENAI_BASE_URL"])
    with tempfile.TemporaryDirectory() as folder, chdir(folder), redirect_stdout(sys.stderr):
        Path("requests.jsonl").write_text(json.dumps({**line, "body": {"messages": ASK}}))
        for code in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            if all(map(find_spec, re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE))):
                module = ModuleType("page")
                exec(compile(code, page.name, "exec"), vars(module))


if __name__ == "__main__":
    main()
