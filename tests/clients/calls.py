"""Runs the calls of one client in the client's own environment, and prints what came of each.

`python calls.py client_openai` with the server's URL in OPENAI_BASE_URL, as clients look for it.
"""

import importlib
import json
import sys
from typing import Any

FEATURES = ("chat", "stream", "tools", "structured", "responses", "batch")
"""Each a function of the client's module, where the client does it at all."""

ASK: Any = [{"role": "user", "content": "What is two and two?"}]
ANSWER = "four"
"""What the scripted model says where it is asked for nothing else."""
JSON_ANSWER = {"city": {"name": "x", "people": 1}}
"""What it says where it is asked for any JSON object."""


def main() -> None:
    """Makes all calls of the client that the command line names."""
    client, found = importlib.import_module(sys.argv[1]), {}
    for feature in FEATURES:
        if (call := getattr(client, feature, None)) is None:
            continue
        try:
            call()
            found[feature] = "ok"
        except Exception as error:
            found[feature] = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
