"""Finds how many sequences a model decodes at once before more sequences give little more.

Measured once for each model and machine, and kept: a short trial of decode steps over 4, 8, 16 …
sequences. The smallest batch is taken from which doubling gives less than a fifth more tokens a
second. So is the length from which a prefix is better held once than copied into the sequences on
it.
"""

import json
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_rq.engine.kv.sharing import Sharing, can_share, frozen, referring
from mlx_rq.engine.kv.trial import verdict_on
from mlx_rq.engine.models.load import LoadedModel, models_dir
from mlx_rq.files import replacing

logger = logging.getLogger("mlx_rq.engine")

SMALLEST = 4
"""A batch costs little where it gains little, and a trial on a busy machine may show no gain."""
LARGEST = 64
_WORTH = 1.2
_STEPS = 3

_SHARING_SEQUENCES = 4
_SHARING_TOKENS = (64, 128, 256, 512, 1024)
"""Sequences and lengths of the prefixes with which sharing is tried; longer ones take too much
memory.
"""


def best_batch_size(model: LoadedModel, *, cache_dir: Path | None = None) -> int:
    """Says how many sequences to decode together: what was measured before, else measures."""
    return _once(model, "", measure_sequences, "sequences decode together best", cache_dir)


def share_from(model: LoadedModel, *, cache_dir: Path | None = None) -> int:
    """Says from how many tokens times sequences on to share a prefix, likewise."""
    what = "tokens, times sequences, make a prefix worth sharing"
    return _once(model, " share_from", measure_share_from, what, cache_dir)


def _once(
    model: LoadedModel,
    kind: str,
    measure: Callable[[Module], int],
    what: str,
    cache_dir: Path | None,
) -> int:
    file = models_dir(cache_dir).parent / "batch.json"
    key = f"{model.fingerprint} {platform.node()} {mx.default_device()}{kind}"
    known = _read(file)
    if key not in known:
        known[key] = measure(model.model)
        _write(file, known)
        logger.info("measured: %d %s", known[key], what)
    return known[key]


def measure_sequences(model: Module) -> int:
    """Times decode steps over more and more sequences and returns the best number."""
    sequences = SMALLEST
    speed = sequences / _step_seconds(model, sequences)
    while sequences < LARGEST:
        doubled = 2 * sequences / _step_seconds(model, 2 * sequences)
        if doubled < _WORTH * speed:
            return sequences
        sequences, speed = 2 * sequences, doubled
    return sequences


def _step_seconds(model: Module, sequences: int) -> float:
    """The quickest of a few decode steps, as somebody else may use the machine too."""
    caches = make_prompt_cache(model)
    tokens = mx.zeros((sequences, 1), dtype=mx.int32)
    mx.eval(model(tokens, cache=caches))
    return min(_seconds(model, tokens, caches) for _ in range(_STEPS))


def measure_share_from(model: Module) -> int:
    """Times decode steps on longer and longer prefixes, shared and copied; says where sharing wins.

    In tokens times sequences. Where the model cannot share, or nothing was found, errs on copies'
    side.
    """
    sharing = Sharing(model, verdict=verdict_on(model))
    try:
        for tokens in _SHARING_TOKENS if sharing.on else ():
            shared, copied = _seconds_on_prefix(model, tokens)
            if shared <= copied:
                return _SHARING_SEQUENCES * tokens
    finally:
        sharing.remove()
    return 2 * _SHARING_SEQUENCES * _SHARING_TOKENS[-1]


def _seconds_on_prefix(model: Module, tokens: int) -> tuple[float, float]:
    """Times a decode step of sequences that share a prefix, and one of sequences that copy it."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    for cache in filter(can_share, caches):  # long ones need not be computed: only time counts
        cache.keys = mx.repeat(cache.keys[:, :, :1], tokens, axis=2)
        cache.values = mx.repeat(cache.values[:, :, :1], tokens, axis=2)
        cache.offset = tokens
    prefix, _ = frozen(caches)
    ways = [
        [layer.merge([layer] * _SHARING_SEQUENCES) for layer in referring(prefix, levels)]
        for levels in (1, 0)
    ]
    inputs = mx.zeros((_SHARING_SEQUENCES, 1), dtype=mx.int32)
    # In turn, so that what else the machine does hits both; the first round is to warm up.
    rounds = [[_seconds(model, inputs, way) for way in ways] for _ in range(1 + _STEPS)][1:]
    shared, copied = (min(times) for times in zip(*rounds, strict=True))
    return shared, copied


def _seconds(model: Module, tokens: mx.array, caches: list[Any]) -> float:
    """The time of one step."""
    started = time.perf_counter()
    mx.eval(model(tokens, cache=caches))
    return time.perf_counter() - started


def _read(file: Path) -> dict[str, int]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write(file: Path, known: dict[str, int]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as fresh:
            fresh.write(json.dumps(known, indent=1).encode())
    except OSError as error:
        logger.warning("the measured batch size could not be kept: %s", error)
