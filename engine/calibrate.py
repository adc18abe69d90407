"""Finds how many rows a model decodes at once before more rows give little more.

Measured once for each model and machine, and kept: a short trial of decode steps over 4, 8, 16 …
rows. The smallest batch is taken from which doubling gives less than a fifth more tokens a second.
"""

import json
import logging
import os
import platform
import time
from pathlib import Path

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_rq.engine.models import LoadedModel, models_dir

logger = logging.getLogger("mlx_rq.engine")

SMALLEST = 4
"""A batch costs little where it gains little, and a trial on a busy machine may show no gain."""
LARGEST = 64
_WORTH = 1.2
_STEPS = 3


def batch_rows(model: LoadedModel, *, cache_dir: Path | None = None) -> int:
    """Says how many rows to decode together: what was measured before, else measures."""
    file = models_dir(cache_dir).parent / "batch.json"
    key = f"{model.fingerprint} {platform.node()} {mx.default_device()}"
    known = _read(file)
    if key not in known:
        known[key] = measure_rows(model.model)
        _write(file, known)
        logger.info("measured: %d rows decode together best", known[key])
    return known[key]


def measure_rows(model: Module) -> int:
    """Times decode steps over more and more rows and returns the best number."""
    rows = SMALLEST
    speed = rows / _step_seconds(model, rows)
    while rows < LARGEST:
        doubled = 2 * rows / _step_seconds(model, 2 * rows)
        if doubled < _WORTH * speed:
            return rows
        rows, speed = 2 * rows, doubled
    return rows


def _step_seconds(model: Module, rows: int) -> float:
    """The quickest of a few decode steps, as somebody else may use the machine too."""
    caches = make_prompt_cache(model)
    tokens = mx.zeros((rows, 1), dtype=mx.int32)
    mx.eval(model(tokens, cache=caches))
    times = []
    for _ in range(_STEPS):
        started = time.perf_counter()
        mx.eval(model(tokens, cache=caches))
        times.append(time.perf_counter() - started)
    return min(times)


def _read(file: Path) -> dict[str, int]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(file: Path, known: dict[str, int]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.write_text(json.dumps(known, indent=1))
        new.replace(file)
    except OSError as error:
        logger.warning("the measured batch size could not be kept: %s", error)
