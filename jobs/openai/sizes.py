"""Numbers of bytes as people write them, and how large a job's body may be."""

import os
import re
from collections.abc import Mapping

from mlx_rq.jobs.openai.errors import RequestError

DEFAULT_MAX_BODY = 4 * 1024 * 1024
MAX_BODY_VARIABLE = "MLX_RQ_MAX_BODY"

_UNITS: Mapping[str, int] = {"": 1, "KB": 1000, "MB": 1000**2, "GB": 1000**3}


def parse_bytes(text: str) -> int:
    """Reads a number of bytes, with a unit if wanted: 500MB, 8GB. Raises ValueError for others."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", text.strip().upper())
    number = 0.0 if match is None else float(match[1]) * _UNITS[match[2] or ""]
    if not 1 <= number < float("inf"):
        raise ValueError(f"{text!r} is not a number of bytes such as 500MB or 8GB")
    return int(number)


def max_body_bytes() -> int:
    """Gives the most bytes of JSON that a body may have: MLX_RQ_MAX_BODY, else 4 MiB.

    Producers, the HTTP server and the worker each go by their own environment. Raises RequestError
    where the variable is no number of bytes.
    """
    given = os.environ.get(MAX_BODY_VARIABLE)
    if not given:
        return DEFAULT_MAX_BODY
    try:
        return parse_bytes(given)
    except ValueError as error:
        raise RequestError(
            f"Invalid {MAX_BODY_VARIABLE} in the environment: {error}.",
            code="invalid_value",
            param="max_body",
        ) from None
