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
from functools import partial, reduce

import mlx.core as mx

from mlx_rq.engine.sampling.params import SamplingParams

LARGEST_DRAW = 1.0 - 2.0**-22
"""A draw stays below 1 in float32, or the last token would be chosen whatever its probability."""

_TOP_P_HALVINGS = 12
"""Halvings of the top_p threshold's logarithm: weights that differ by 1/200 are told apart."""

_PIECES = 4
"""Pieces of the vocabulary that are looked through at once: so much less is held and summed up."""

_FEW = 2048
"""Candidates that are sorted for top_p, in a tenth of the operations that halvings take."""

_LEAST_CANDIDATES = 64
_BLOCK = 64
"""Tokens of a block; divides most vocabularies."""


def draw(logits: mx.array, params: Sequence[SamplingParams], randoms: Sequence[float]) -> mx.array:
    """Draws by one random number in [0, 1) a row: logits [rows, vocabulary] to tokens [rows].

    Greedy rows take the likeliest token.
    """
    groups: dict[tuple[int, bool, bool], list[int]] = {}
    for index, one in enumerate(params):
        count = _candidates(one, logits.shape[1])
        kind = count, one.filtered, one.top_p < 1 and count > _FEW
        groups.setdefault(kind, []).append(index)
    tokens = [
        _draw_alike(
            count,
            logits if len(groups) == 1 else logits[mx.array(rows)],
            [params[index] for index in rows],
            mx.array([[randoms[index]] for index in rows]),
        )
        for (count, *_), rows in groups.items()
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
    """Sets to zero what min_p, top_k and top_p leave out of weights [rows, any].

    Of more than a few, either all rows have a top_p or none.
    """
    width = weights.shape[1]
    floor = mx.array([[one.min_p] for one in params])  # the highest weight is 1
    top_ps = mx.array([[one.top_p] for one in params])
    nuclear, by_rank = any(one.top_p < 1 for one in params), any(one.top_k > 0 for one in params)
    few = width <= _FEW
    ordered = mx.sort(weights, axis=-1) if by_rank or (nuclear and few) else None
    if ordered is not None and by_rank:
        last = mx.array([[width - min(one.top_k or width, width)] for one in params])
        floor = mx.maximum(floor, mx.take_along_axis(ordered, last, axis=-1))
    if ordered is not None and nuclear and few:
        floor = mx.maximum(floor, _nucleus_of_few(_at_least(ordered, floor), top_ps))
    elif nuclear:
        floor = mx.maximum(floor, _nucleus(_at_least(weights, floor), top_ps))
    return _at_least(weights, floor)


def _nucleus_of_few(ordered: mx.array, top_ps: mx.array) -> mx.array:
    """The weight from which on the likeliest tokens of each row have its top_p of the mass.

    `ordered` are the weights [rows, any] that are left, the smallest first.
    """
    up_to = mx.cumsum(ordered, axis=-1)
    first = _first(up_to > (1 - top_ps) * up_to[:, -1:])
    return mx.take_along_axis(ordered, first, axis=-1)


@partial(mx.compile, shapeless=True)
def _at_least(weights: mx.array, floor: mx.array) -> mx.array:
    """Sets smaller weights to zero. On the CPU, `where` would take ten times as long."""
    return weights * (weights >= floor)


def _nucleus(kept: mx.array, top_ps: mx.array) -> mx.array:
    """The weight from which on the likeliest tokens of each row have its top_p of the mass.

    Nearly: of a whole vocabulary, [rows, any], which is halved instead of sorted.
    """
    whole, width = _filled_up(kept, _PIECES), -(-kept.shape[1] // _PIECES)
    pieces = [whole[:, at * width : (at + 1) * width] for at in range(_PIECES)]
    total = _mass(mx.array(0.0), pieces)
    goal, low, high, middle = _whole(total, top_ps, mx.array(kept.shape[1]))
    for _ in range(_TOP_P_HALVINGS):
        low, high, middle = _half(_mass(middle, pieces), goal, low, high, middle)
    return low


def _mass(floor: mx.array, pieces: Sequence[mx.array]) -> mx.array:
    """Sums up the weights of each row, in pieces [rows, any], that are not smaller."""
    return _overlaid(floor, *pieces).sum(axis=-1, keepdims=True)


@partial(mx.compile, shapeless=True)
def _overlaid(floor: mx.array, *pieces: mx.array) -> mx.array:
    """Adds up pieces of weights, place by place, without those that are smaller."""
    return reduce(mx.add, [piece * (piece >= floor) for piece in pieces])


@partial(mx.compile, shapeless=True)
def _whole(total: mx.array, top_ps: mx.array, vocabulary: mx.array) -> tuple[mx.array, ...]:
    """The mass that is wanted, and where it begins: between two weights; and their middle."""
    # Even if all tokens lay below this, they would not have the mass that may be left out.
    low = 0.5 * (1 - top_ps) * total / vocabulary
    high = mx.ones_like(total)  # the highest weight
    return top_ps * total, low, high, mx.sqrt(low * high)


@partial(mx.compile, shapeless=True)
def _half(
    mass: mx.array, goal: mx.array, low: mx.array, high: mx.array, middle: mx.array
) -> tuple[mx.array, ...]:
    """The half in which the mass that is wanted begins, by that from the middle on; its middle."""
    enough = mass >= goal
    low, high = mx.where(enough, middle, low), mx.where(enough, high, middle)
    return low, high, mx.sqrt(low * high)


def _in_blocks(values: mx.array, fill: float = 0) -> mx.array:
    """Gives values [rows, any] as [rows, blocks, tokens], the last block filled up."""
    return _filled_up(values, _BLOCK, fill).reshape(len(values), -1, _BLOCK)


def _filled_up(values: mx.array, step: int, fill: float = 0) -> mx.array:
    """Makes rows of values [rows, any] as long as a multiple of `step`."""
    uneven = -values.shape[1] % step
    return mx.pad(values, [(0, 0), (0, uneven)], constant_values=fill) if uneven else values


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
