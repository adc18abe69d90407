"""One model: whether it loads and fits, may be batched, and shares prefixes; why not, where not."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mlx_rq.worker.cli.doctor.finding import Finding, gigabytes

if TYPE_CHECKING:
    from mlx_rq.engine.models.load import LoadedModel


def model_findings(name: str, *, trust_remote_code: bool) -> Iterator[Finding]:
    """Loads a model and tries it as a worker does at its start."""
    from mlx_rq.engine.models.load import ModelError, load

    try:
        yield from findings_of(load(name, trust_remote_code=trust_remote_code))
    except ModelError as error:
        yield Finding("model", "error", str(error))


def findings_of(loaded: "LoadedModel") -> Iterator[Finding]:
    """Tries a model that is loaded."""
    from mlx_rq.engine.kv.sharing import Sharing
    from mlx_rq.engine.kv.trial import Batching, verdict_on
    from mlx_rq.engine.models.device import MLXDevice, weight_bytes

    weights, device = weight_bytes(loaded.model), MLXDevice()
    room = device.ceiling or device.physical
    said = (
        f"{loaded.model_id}: {gigabytes(weights)} of weights, {loaded.context_length:,} tokens of "
        "context"
    )
    if weights > room:
        advice = f"It does not fit into {gigabytes(room)}: take one of fewer parameters or bits."
        yield Finding("model", "error", said, advice)
        return
    if weights > 0.8 * room:
        advice = f"Little of {gigabytes(room)} is left for KV: fewer bits let more run at once."
        yield Finding("model", "warning", said, advice)
    else:
        yield Finding("model", "ok", said)
    verdict = verdict_on(loaded.model)
    if verdict.batching is Batching.ANY:
        yield Finding("batching", "ok", verdict.batching.value)
    else:
        said = f"{verdict.batching.value}: {verdict.why}"
        advice = "Answers are right, only slower. docs/families.md lists models that batch."
        yield Finding("batching", "warning", said, advice)
    sharing = Sharing(loaded.model, verdict=verdict)
    try:
        if sharing.on:
            yield Finding("sharing", "ok", f"shared prefixes are {sharing}")
        else:
            advice = "Prefixes are computed once all the same; each sequence holds a copy."
            yield Finding("sharing", "warning", f"shared prefixes are {sharing}", advice)
    finally:
        sharing.remove()
