"""Measures how fast a model prefills and decodes here, by rows and context."""

from collections.abc import Callable, Iterator
from pathlib import Path

from mlx_rq.engine.models.calibrate import measure_speeds, share_from
from mlx_rq.engine.models.decode_speed import CONTEXT, DecodeTrial, PrefillTrial, Speeds, fewest
from mlx_rq.engine.models.device import Device, tried
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.budget import default_kv_bytes
from mlx_rq.worker.cli.bench.report import Kind, Report, Speed

CONTEXTS = (0, CONTEXT, 4 * CONTEXT)
ROWS = (1, 4, 16)
"""Beside the best batch, and what `--batch auto` tries at its own context."""

_LEAST_TOKENS = 16
_PREFILL_SECONDS = 1
"""A step prefills as much as the engine's, but no more than is decoded in that time."""

Say = Callable[[str], None]
Clock = Callable[[], float]


def measure_batch(
    report: Report, model: LoadedModel, folder: Path, device: Device, say: Say
) -> None:
    """Measures, and keeps, what `--batch auto` goes by: the best batch, and from where on to share.

    What a run that is interrupted has found is in the report; it is not kept.
    """
    context = min(CONTEXT, model.context_length - 1)
    before = list(report.speeds)

    def note(speeds: Speeds) -> None:
        report.speeds[:] = [*before, *(_speed("decode", n, context, s) for n, s in speeds.items())]

    def watch(speeds: Speeds) -> None:
        note(speeds)
        say(f"decode, beyond {max(speeds)} rows" if speeds else "decode")

    room = default_kv_bytes(model.model, device)
    speeds = tried(
        device,
        lambda: measure_speeds(model, folder, room=room, watch=watch),
        dict[int, float](),
        "the batch size",
    )
    note(speeds)
    report.best_batch = fewest(speeds) if speeds else EngineOptions().batch_size
    say("from where on prefixes are shared")
    usual = EngineOptions().share_from
    report.share_from = tried(
        device, lambda: share_from(model, folder, again=True), usual, "sharing"
    )


def measure_others(
    report: Report, model: LoadedModel, device: Device, say: Say, until: float, clock: Clock
) -> None:
    """Measures prefill, and decoding on other contexts, as far as there is time."""
    room = default_kv_bytes(model.model, device)
    step = _prefilled_in_a_step(report)
    for kind, rows, context in _cells(report.best_batch or 1, model.context_length - step):
        if clock() > until:
            report.notes.append("some speeds were left out, for want of time")
            return
        if report.speed(kind, rows, context) is not None:
            continue
        say(f"{kind}, rows: {rows}, tokens of context: {context:,}")
        trial = (
            DecodeTrial(model.model, room=room, context=context)
            if kind == "decode"
            else PrefillTrial(model.model, step, room=room, context=context)
        )
        seconds = tried(device, lambda: trial.seconds(rows), None, f"{kind} of {rows} rows")  # noqa: B023
        if seconds is not None:
            tokens = rows if kind == "decode" else step // rows * rows
            report.speeds.append(_speed(kind, rows, context, tokens / seconds))


def _cells(best: int, longest: int) -> Iterator[tuple[Kind, int, int]]:
    """Yields what is to be measured, what tells most first."""
    contexts = [context for context in CONTEXTS if context <= longest]
    yield from (("prefill", 1, context) for context in contexts)
    for context in contexts:
        for rows in sorted({*(rows for rows in ROWS if rows < best), best}):
            yield "decode", rows, context
    yield from (("prefill", rows, context) for rows in ROWS[1:] for context in contexts[:2])


def _prefilled_in_a_step(report: Report) -> int:
    """Says how many prompt tokens a step is to prefill: as in the engine, or less where slow."""
    quickest = max(1.0, report.best_speed("decode"))
    tokens = EngineOptions().chunk
    while tokens > _LEAST_TOKENS and tokens > _PREFILL_SECONDS * quickest:
        tokens //= 2
    return tokens


def _speed(kind: Kind, rows: int, context: int, tokens_per_second: float) -> Speed:
    return Speed(kind, rows, context, round(tokens_per_second, 2))
