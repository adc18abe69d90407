"""Draws a token for each sequence from its filtered distribution.

In vLLM's order: temperature, then min_p and top_k, then top_p over what is left.

Each of the three filters is a threshold on the weights, so a vocabulary is never sorted for top_p;
few candidates are. A draw inverts the cumulated distribution at one random number, so a seeded row
draws the same tokens whatever stands beside it. Passes over the whole vocabulary are what costs:
rows with a top_k look only at their likeliest tokens, and a draw finds its block of the vocabulary
first.
"""

import math
from collections.abc import Sequence

import mlx.core as mx

from mlx_rq.engine.sampling.params import SamplingParams

LARGEST_DRAW = 1.0 - 2.0**-22
"""A draw stays below 1 in float32, or the last token would be chosen whatever its probability."""

_TOP_P_HALVINGS = 12
"""Halvings of the top_p threshold's logarithm: weights that differ by 1/200 are told apart."""

_FEW = 2048
"""Candidates that are sorted for top_p, in a tenth of the operations that halvings take."""

_LEAST_CANDIDATES = 64
_BLOCK = 64
"""Tokens of a block; divides most vocabularies."""


def draw(logits: mx.array, params: Sequence[SamplingParams], randoms: Sequence[float]) -> mx.array:
    """Draws by one random number in [0, 1) a row: logits [rows, vocabulary] to tokens [rows].

    Greedy rows take the likeliest token.
    """
    groups: dict[tuple[int, bool], list[int]] = {}
    for index, one in enumerate(params):
        kind = _candidates(one, logits.shape[1]), one.filtered
        groups.setdefault(kind, []).append(index)
    tokens = [
        _draw_alike(
            count,
            logits if len(groups) == 1 else logits[mx.array(rows)],
            [params[index] for index in rows],
            mx.array([[randoms[index]] for index in rows]),
        )
        for (count, _), rows in groups.items()
    ]
    if len(groups) == 1:
        return tokens[0]
    order = mx.array([index for rows in groups.values() for index in rows])
    return mx.concatenate(tokens)[mx.argsort(order)]


def _candidates(params: SamplingParams, vocabulary: int) -> int:
    """How many of the likeliest tokens a row looks at.

    It depends on the row alone, since sums over fewer or more would round differently. One more
    than top_k at least, so that a few tokens that are equally likely stay together.
    """
    if params.greedy:
        return 1
    count = max(_LEAST_CANDIDATES, 1 << params.top_k.bit_length())
    return count if params.top_k > 0 and count * 4 <= vocabulary else vocabulary


def _draw_alike(
    count: int, logits: mx.array, params: Sequence[SamplingParams], randoms: mx.array
) -> mx.array:
    """Draws for rows that look at `count` of their likeliest tokens."""
    if count == 1:
        return mx.argmax(logits, axis=-1)
    tokens = None
    if count < logits.shape[1]:
        tokens, logits = likeliest(logits, count)
    temperatures = mx.array([[one.temperature] for one in params])
    weights = _weights(logits, logits.max(axis=-1, keepdims=True), temperatures)
    places = _invert(_filter(weights, params) if params[0].filtered else weights, randoms)
    return (places if tokens is None else mx.take_along_axis(tokens, places, axis=-1))[:, 0]


def likeliest(logits: mx.array, count: int) -> tuple[mx.array, mx.array]:
    """Finds the tokens with the highest logits [rows, vocabulary], and those logits.

    They come in the vocabulary's order, since the one of nearly equal logits may differ beside
    other rows. So many tokens lie in at most as many blocks, those with the highest maxima; only
    these are looked through. Where most tokens are forbidden, places behind the vocabulary may be
    among them, with a logit of -inf.
    """
    tokens = mx.broadcast_to(mx.arange(logits.shape[1]), logits.shape)
    if count * _BLOCK * 2 <= logits.shape[1]:
        blocks = _in_blocks(logits, fill=-mx.inf)
        highest = mx.sort(_last(blocks.max(axis=-1), count), axis=-1)[..., None]
        tokens = (highest * _BLOCK + mx.arange(_BLOCK)).reshape(len(logits), -1)
        logits = mx.take_along_axis(blocks, highest, axis=1).reshape(len(logits), -1)
    best = mx.sort(_last(logits, count), axis=-1)
    return mx.take_along_axis(tokens, best, axis=-1), mx.take_along_axis(logits, best, axis=-1)


def _last(values: mx.array, count: int) -> mx.array:
    """Finds the places of the `count` highest values [rows, any], in no order."""
    return mx.argpartition(values, -count, axis=-1)[:, -count:]


def _weights(logits: mx.array, highest: mx.array, temperatures: mx.array) -> mx.array:
    """The probabilities, as multiples of each row's highest: nothing here needs their sum to be 1.

    As powers of 2, not of e: on the CPU, MLX computes those in less than half of the time.
    """
    return mx.power(2.0, (logits - highest) * (math.log2(math.e) / temperatures))


def _filter(weights: mx.array, params: Sequence[SamplingParams]) -> mx.array:
    """Sets to zero what min_p, top_k and top_p leave out of weights [rows, any]."""
    width = weights.shape[1]
    floor = mx.array([[one.min_p] for one in params])  # the highest weight is 1
    nuclear = [index for index, one in enumerate(params) if one.top_p < 1]
    by_rank = any(one.top_k > 0 for one in params)
    few = width <= _FEW
    ordered = mx.sort(weights, axis=-1) if by_rank or (nuclear and few) else None
    if ordered is not None and by_rank:
        last = mx.array([[width - min(one.top_k or width, width)] for one in params])
        floor = mx.maximum(floor, mx.take_along_axis(ordered, last, axis=-1))
    if ordered is not None and nuclear and few:
        top_ps = mx.array([[one.top_p] for one in params])
        floor = mx.maximum(floor, _nucleus_of_few(_at_least(ordered, floor), top_ps))
    elif nuclear:
        which = mx.array(nuclear)
        kept = _at_least(weights[which], floor[which])
        least = _nucleus(kept, mx.array([[params[index].top_p] for index in nuclear]))
        floor[which] = mx.maximum(floor[which], least)
    return _at_least(weights, floor)


def _nucleus_of_few(ordered: mx.array, top_ps: mx.array) -> mx.array:
    """The weight from which on the likeliest tokens of each row have its top_p of the mass.

    `ordered` are the weights [rows, any] that are left, the smallest first.
    """
    up_to = mx.cumsum(ordered, axis=-1)
    first = _first(up_to > (1 - top_ps) * up_to[:, -1:])
    return mx.take_along_axis(ordered, first, axis=-1)


def _at_least(weights: mx.array, floor: mx.array) -> mx.array:
    """Sets smaller weights to zero. On the CPU, `where` would take four times as long."""
    return weights * (weights >= floor).view(mx.uint8)


def _nucleus(kept: mx.array, top_ps: mx.array) -> mx.array:
    """The weight from which on the likeliest tokens of each row have its top_p of the mass.

    Nearly: of a whole vocabulary, [rows, any], which is halved instead of sorted.
    """
    blocks = _in_blocks(kept)
    total = _mass(blocks)
    high = mx.ones_like(total)  # the highest weight
    # Even if all tokens lay below this, they would not have the mass that may be left out.
    low = 0.5 * (1 - top_ps) * total / kept.shape[-1]
    for _ in range(_TOP_P_HALVINGS):
        middle = mx.sqrt(low * high)
        enough = _mass(_at_least(blocks, middle[..., None])) >= top_ps * total
        low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return low


def _mass(blocks: mx.array) -> mx.array:
    """The sums of weights [rows, blocks, tokens], first over blocks: the CPU adds those faster."""
    return blocks.sum(axis=1).sum(axis=-1, keepdims=True)


def _in_blocks(values: mx.array, fill: float = 0) -> mx.array:
    """Gives values [rows, any] as [rows, blocks, tokens], the last block filled up."""
    if uneven := -values.shape[1] % _BLOCK:
        values = mx.pad(values, [(0, 0), (0, uneven)], constant_values=fill)
    return values.reshape(len(values), -1, _BLOCK)


def _invert(weights: mx.array, randoms: mx.array) -> mx.array:
    """Finds where the cumulated weights [rows, any] pass these parts [rows, 1] of their sums."""
    if weights.shape[1] <= _BLOCK:
        return _passed(weights, randoms * weights.sum(axis=-1, keepdims=True))
    blocks = _in_blocks(weights)
    sums = blocks.sum(axis=-1)
    cumulated = mx.cumsum(sums, axis=-1)
    targets = randoms * cumulated[:, -1:]
    block = _first(cumulated > targets)
    before = mx.take_along_axis(cumulated - sums, block, axis=-1)
    inside = mx.take_along_axis(blocks, block[..., None], axis=1)[:, 0]
    return block * _BLOCK + _passed(inside, targets - before)


def _passed(weights: mx.array, targets: mx.array) -> mx.array:
    """Finds the first place where the cumulated weights [rows, any] are more than the targets."""
    cumulated = mx.cumsum(weights, axis=-1)
    # Sums in another order round differently; the place must be there all the same, with a weight.
    targets = mx.maximum(mx.minimum(targets, cumulated[:, -1:] * LARGEST_DRAW), 0)
    return _first(cumulated > targets)


def _first(true: mx.array) -> mx.array:
    return mx.argmax(true, axis=-1, keepdims=True)
