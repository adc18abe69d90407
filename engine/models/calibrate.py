"""Finds what suits a model on this machine: how many sequences, and when they share prefixes.

Measured once for each chip, version of MLX and model, and kept in the data folder.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from mlx_rq.engine.kv.layers import apart, can_share
from mlx_rq.engine.kv.sharing import Sharing, frozen, referring
from mlx_rq.engine.kv.trial import verdict_on
from mlx_rq.engine.models.decode_speed import (
    CONTEXT,
    CONTEXTS,
    DecodeTrial,
    Speeds,
    fewest,
    lengthen,
    measured,
)
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.files import replacing

logger = logging.getLogger("mlx_rq.engine")

FILE = "calibration.json"

Watch = Callable[[Speeds], None]

_STEPS = 5

_SHARING_SEQUENCES = 4
_SHARING_TOKENS = (64, 128, 256, 512, 1024)
"""Sequences and lengths of the prefixes with which sharing is tried; longer ones take too much
memory.
"""

_UNSEEN_TOKENS = 2 * _SHARING_TOKENS[-1]
"""The length from which a prefix is shared where no trial says anything."""

_MOST_TOKENS = 16 * _SHARING_TOKENS[-1]


def best_batch_size(
    model: LoadedModel, folder: Path, *, room: int | None = None, tokens: int | None = None
) -> int:
    """Says how many sequences to decode together: by what was measured before, else measures.

    `room` is what KV may take, in bytes; `tokens` what each sequence holds, where that is known of
    those that wait. Else it is what was known of those that waited the last time.
    """
    waited = tokens or _known(model, folder).get("tokens_waiting")
    if not isinstance(waited, int) or waited < 1:
        waited = None
    context = _context(waited or CONTEXT, model.context_length)
    speeds, when = _speeds(model, folder, context), "before"
    if not speeds:
        speeds, when = measure_speeds(model, folder, room=room, context=context), "now"
    if tokens:
        _keep(model, folder, tokens_waiting=tokens)
    best = fewest(speeds)
    told = ", ".join(f"{size}: {speed:.3g}" for size, speed in speeds.items())
    why = f", as jobs that {'wait' if tokens else 'waited'} have about {waited}" if waited else ""
    logger.info(
        "--batch auto: %d sequences decode together (tokens a second on %s, measured %s, with %d "
        "tokens each%s, by sequences: %s)",
        best,
        _chip(),
        when,
        context,
        why,
        told,
    )
    return best


def _context(tokens: int, longest: int) -> int:
    """Gives the length that is measured for sequences of so many tokens."""
    nearest = min(CONTEXTS, key=lambda context: abs(math.log(context / tokens)))
    return min(nearest, longest - 1)


def _speeds(model: LoadedModel, folder: Path, context: int) -> dict[int, float]:
    """Gives what was measured before with so many tokens; nothing, where nothing was."""
    by_context = _known(model, folder).get("decode_speeds")
    known: Any = by_context.get(str(context)) if isinstance(by_context, dict) else None
    try:
        return {int(size): float(speed) for size, speed in known.items()}
    except (AttributeError, TypeError, ValueError):  # somebody else wrote it
        return {}


def measure_speeds(
    model: LoadedModel,
    folder: Path,
    *,
    room: int | None = None,
    context: int = CONTEXT,
    watch: Watch = lambda _: None,
) -> dict[int, float]:
    """Measures tokens a second by how many sequences decode together, and keeps that.

    Each holds `context` tokens. `watch` is called with the speeds before each size is tried.
    """
    context = min(context, model.context_length - 1)
    trial = DecodeTrial(model.model, room=room, context=context)
    so_far: dict[int, float] = {}

    def seconds(sequences: int) -> float | None:
        watch(so_far)
        taken = trial.seconds(sequences)
        if taken is not None:
            so_far[sequences] = sequences / taken
        return taken

    speeds = measured(seconds)
    known = _known(model, folder).get("decode_speeds")
    others = known if isinstance(known, dict) else {}
    _keep(model, folder, decode_speeds={**others, str(context): speeds})
    return speeds


def share_from(model: LoadedModel, folder: Path, *, again: bool = False) -> int:
    """Says how many tokens of copies a shared prefix must spare a step, likewise.

    Measures `again` what was measured before, if wanted.
    """
    known = known_share_from(model, folder)
    if again or known is None:
        known = measure_share_from(model.model)
        _keep(model, folder, share_from=known)
        logger.info("measured: prefixes are shared where that spares %d tokens a step", known)
    return known


def known_share_from(model: LoadedModel, folder: Path) -> int | None:
    """Says it only where it was measured before."""
    known = _known(model, folder).get("share_from")
    return known if isinstance(known, int) else None


def measure_share_from(model: Module) -> int:
    """Times decode steps on longer and longer prefixes, shared and copied; says where sharing wins.

    In tokens that are not read. It wins at a length where it does so at the next one, too: what
    else the machine does can make any one step slow. Where the model cannot share, or nothing was
    found, errs on copies' side.
    """
    sharing = Sharing(model, verdict=verdict_on(model))
    lost: dict[int, float] = {}
    try:
        for tokens in _SHARING_TOKENS if sharing.on else ():
            shared, copied = _seconds_on_prefix(model, tokens)
            lost[tokens] = shared - copied
            won = [length for length in [*lost][-2:] if lost[length] <= 0]
            if len(won) == 2 or won == [_SHARING_TOKENS[-1]]:
                return _spared(won[0])
    finally:
        sharing.remove()
    return _spared(_beyond([*lost.values()]))


def _spared(tokens: int) -> int:
    return (_SHARING_SEQUENCES - 1) * tokens


def _beyond(lost: list[float]) -> int:
    """Guesses from how many tokens on sharing wins, where it lost by this over all of those tried.

    What it costs is the same for all prefixes, what it spares grows with them.
    """
    shortest, longest = _SHARING_TOKENS[0], _SHARING_TOKENS[-1]
    if lost and all(sooner > later for sooner, later in pairwise(lost)):
        gained = (lost[0] - lost[-1]) / (longest - shortest)
        return min(longest + math.ceil(lost[-1] / gained), _MOST_TOKENS)
    return _UNSEEN_TOKENS


def _seconds_on_prefix(model: Module, tokens: int) -> tuple[float, float]:
    """Times a decode step of sequences that share a prefix, and one of sequences that copy it."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), dtype=mx.int32), cache=caches)
    for cache in filter(can_share, apart(caches)):
        lengthen(cache, tokens)
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


def _chip() -> str:
    return str(mx.device_info().get("device_name", mx.default_device()))


def _key(model: LoadedModel) -> str:
    return f"{_chip()}, mlx {version('mlx')}, {model.model_id} {model.fingerprint}"


def _known(model: LoadedModel, folder: Path) -> dict[str, Any]:
    """What was measured before of this model here."""
    known = _read(folder / FILE).get(_key(model))
    return known if isinstance(known, dict) else {}


def _keep(model: LoadedModel, folder: Path, **found: Any) -> None:
    file = folder / FILE
    everything = {**_read(file), _key(model): {**_known(model, folder), **found}}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(file) as fresh:
            fresh.write(json.dumps(everything, indent=1).encode())
    except OSError as error:
        logger.warning("what was measured could not be kept: %s", error)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
