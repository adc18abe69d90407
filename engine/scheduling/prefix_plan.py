"""The plan of sequences that are all there: what the rolling plan comes to, and what it saves.

Pure: token ids in, a plan out; no model, no queue, no clock. Depths and lengths count tokens.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.prefix_tree import Node, PlannedSequence, Urgency
from mlx_rq.engine.scheduling.rolling_plan import RollingPlan

_DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True)
class PlannedPrefix:
    """A shared prefix whose KV is worth keeping: the first `depth` tokens of sequence `sequence`.

    `index` and `parent` are places in `Plan.prefixes`, where parents come first. `sequences_below`
    counts the sequences (not the duplicates) that start from this prefix or one below; all are
    longer than it.
    """

    index: int
    parent: int | None
    sequence: int
    depth: int
    sequences_below: int


def depth_of(prefixes: Sequence[PlannedPrefix], prefix: int | None) -> int:
    """Gives the tokens of a prefix, 0 for none."""
    return 0 if prefix is None else prefixes[prefix].depth


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Sequences admitted together: of one prefix (or None), one urgency, like suffix lengths."""

    prefix: int | None
    sequences: tuple[int, ...]
    urgency: Urgency


@dataclass(frozen=True, slots=True)
class Plan:
    """What to prefill, and in which order to admit.

    `duplicates` maps a sequence to the sequence that is generated in its place. `prompt_tokens`
    counts the tokens of all sequences, `distinct_tokens` the nodes of their prefix tree: each
    shared token once. `prefilled_tokens` are computed when all goes by the plan.
    """

    prefixes: tuple[PlannedPrefix, ...]
    batches: tuple[PrefillBatch, ...]
    duplicates: Mapping[int, int]
    prompt_tokens: int
    distinct_tokens: int
    prefilled_tokens: int


def plan(
    sequences: Sequence[PlannedSequence],
    *,
    batch_size: int = _DEFAULTS.batch_size,
    min_prefix_tokens: int = _DEFAULTS.min_prefix_tokens,
    max_padding: float = 0.15,
    pads: bool = True,
) -> Plan:
    """Chooses, for a set of sequences, the prefixes to keep and the order of prefill batches.

    A prefix has at least two sequences below it, and at least `min_prefix_tokens` beyond its
    parent. A prefill batch has at most `batch_size` sequences; padding is at most the share
    `max_padding` of its positions, unless its suffixes differ by no more than `PADDING_SLACK`.
    Without `pads`, there is none.

    Raises ValueError for a sequence without tokens or an option out of range, OverflowError for a
    token id in a list that does not fit 32 bits.
    """
    rolling = RollingPlan(
        batch_size=batch_size,
        min_prefix_tokens=min_prefix_tokens,
        max_padding=max_padding,
        pads=pads,
    )
    for index, sequence in enumerate(sequences):
        rolling.add(index, sequence)
    ordered = rolling.order()
    place = {node.key: index for index, node in enumerate(rolling.prefixes())}
    batches = tuple(
        PrefillBatch(
            place[batch.prefixes[-1]] if batch.prefixes else None, batch.sequences, batch.urgency
        )
        for batch in ordered
    )
    prefixes = _prefixes(rolling.prefixes(), batches)
    prefilled = sum(prefix.depth - depth_of(prefixes, prefix.parent) for prefix in prefixes)
    prefilled += sum(
        len(sequences[sequence].tokens) - depth_of(prefixes, batch.prefix)
        for batch in batches
        for sequence in batch.sequences
    )
    return Plan(
        prefixes,
        batches,
        rolling.duplicates,
        sum(len(sequence.tokens) for sequence in sequences),
        rolling.distinct_tokens,
        prefilled,
    )


def _prefixes(nodes: Sequence[Node], batches: Sequence[PrefillBatch]) -> tuple[PlannedPrefix, ...]:
    """Says of each prefix what stands on it."""
    place = {node: index for index, node in enumerate(nodes)}
    own: dict[int | None, list[int]] = defaultdict(list)
    for batch in batches:
        own[batch.prefix] += batch.sequences
    parents = [None if node.above is None else place.get(node.above) for node in nodes]
    some = [next(iter(own[index]), -1) for index in range(len(nodes))]
    below = [len(own[index]) for index in range(len(nodes))]
    for index, parent in reversed(list(enumerate(parents))):
        if parent is not None:
            some[parent] = some[index]
            below[parent] += below[index]
    return tuple(
        PlannedPrefix(index, parents[index], some[index], node.depth, below[index])
        for index, node in enumerate(nodes)
    )
