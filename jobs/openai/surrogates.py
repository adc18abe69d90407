"""Halves of surrogate pairs: JSON can write them, models do, and UTF-8 has nothing for them."""

import json
from typing import Any


def writable(value: Any) -> Any:
    """Gives a JSON value with `?` for each half; the very same object where it holds none."""
    text = json.dumps(value, ensure_ascii=False)
    written = text.encode(errors="replace")
    return value if written.decode() == text else json.loads(written)
