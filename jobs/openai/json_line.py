"""JSON on one line, for whoever reads it: not all split lines where JSON lines end."""

import json
from typing import Any

_LINE_ENDS = ("\x85", "\u2028", "\u2029")
"""What Python's `str.splitlines` and httpx's `iter_lines` split at beside control characters, which
JSON escapes anyway."""


def json_line(value: Any) -> str:
    """Writes a value as JSON without anything in it that ends a line."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for end in _LINE_ENDS:
        text = text.replace(end, f"\\u{ord(end):04x}")
    return text
