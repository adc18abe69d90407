"""Whether a small model can draft for another one: what it says has to be in the same tokens.

Whatever it drafts, the answers stay those of the model; what is checked is that they can be.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ChunkedKVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)

from mlx_rq.engine.kv.numerics import disagreement, probe_tokens
from mlx_rq.engine.kv.trial import FAILURES, objection
from mlx_rq.engine.models.device import MLXDevice, tried
from mlx_rq.engine.models.load import LoadedModel, ModelError

_HELD, _DRAFTED = 4, 3
"""Tokens of the trial, and those that are taken back."""


def check_draft(model: LoadedModel, draft: LoadedModel) -> None:
    """Raises ModelError, which says what is wrong, where `draft` cannot draft for `model`."""
    where = f"draft model {draft.model_id}"
    if why := _other_tokens(model, draft):
        raise ModelError(f"{where}: {why}: choose a small model of the same family")
    for one in (model, draft):
        if kept := _kept_for_good(one):
            raise ModelError(
                f"{where}: {one.model_id} cannot take back tokens, as the drafted ones that are "
                f"not accepted (it keeps {kept}): do without --draft-model"
            )
    failed = "the device failed when it was tried"
    if why := tried(MLXDevice(), lambda: _wrong_afterwards(model), failed, "taking tokens back"):
        raise ModelError(
            f"{where}: {model.model_id} does not go on as before where tokens were taken back "
            f"({why}): do without --draft-model"
        )


def _kept_for_good(model: LoadedModel) -> str:
    """Names the caches of a model that cannot take back tokens.

    Those of attention in chunks say that they can, but may have let go of a chunk by then.
    """
    caches = make_prompt_cache(model.model)
    if can_trim_prompt_cache(caches) and not any(isinstance(c, ChunkedKVCache) for c in caches):
        return ""
    kept = {type(c) for c in caches if not c.is_trimmable() or isinstance(c, ChunkedKVCache)}
    return ", ".join(sorted(one.__name__ for one in kept))


def _other_tokens(model: LoadedModel, draft: LoadedModel) -> str:
    """Says how the draft's tokens differ from the model's; empty where ids mean the same."""
    ours, theirs = _pieces(model), _pieces(draft)
    both = ours.keys() & theirs.keys()
    others = [token for token in both if ours[token] != theirs[token]]
    if len(others) == len(both):
        return f"its tokenizer has no token in common with that of {model.model_id}"
    if others:
        first = min(others)
        return (
            f"its tokenizer is not that of {model.model_id}: {len(others):,} of {len(both):,} "
            f"tokens differ, the first is {first} ({theirs[first]!r} instead of {ours[first]!r})"
        )
    return ""


def _pieces(model: LoadedModel) -> dict[int, str]:
    """A tokenizer's tokens by their ids."""
    vocabulary: dict[str, int] = model.tokenizer.get_vocab()
    return {token: piece for piece, token in vocabulary.items()}


def _wrong_afterwards(model: LoadedModel) -> str:
    """Computes tokens together and takes some back; says what is wrong with those that follow."""
    network, some = model.model, probe_tokens(model.model)
    prompt, drafted, last = some(1, _HELD), some(1, 1 + _DRAFTED), some(1, 1)

    def logits(first: mx.array) -> mx.array:
        caches: list[Any] = make_prompt_cache(network)
        network(prompt, cache=caches)
        begun = network(first, cache=caches)[:, :1]
        trim_prompt_cache(caches, first.shape[1] - 1)
        found: mx.array = mx.concatenate([begun, network(last, cache=caches)])
        return found

    try:
        return objection(disagreement(logits(drafted), logits(drafted[:, :1])))
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
