"""Cuts the sequences of a prefix into prefill batches: of one urgency, and of like suffix lengths.

Pure, as the plan is. Lengths count tokens.
"""

from collections import defaultdict
from collections.abc import Sequence

from mlx_rq.engine.scheduling.prefix_tree import Leaf, Node, Urgency

# Tokens by which the suffixes of a prefill batch may differ, whatever share of padding that makes:
# so much padding costs less than the forward pass and the admission of one more prefill batch.
PADDING_SLACK = 8


def batches_of(
    prefix: Node, leaves: Sequence[Leaf], *, batch_size: int, max_padding: float | None
) -> list[tuple[Urgency, list[Leaf]]]:
    """Cuts the sequences that start from a prefix, the most urgent first.

    Where those of one priority are no more than a batch, none is left behind by an overdue one.
    """
    of_priority: dict[int, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        of_priority[leaf.priority].append(leaf)
    of_urgency: dict[Urgency, list[Leaf]] = defaultdict(list)
    for priority, members in of_priority.items():
        together = prefix.depth > 0 and len(members) <= batch_size
        any_overdue = any(leaf.overdue for leaf in members)
        for leaf in members:
            overdue = any_overdue if together else leaf.overdue
            of_urgency[priority, not overdue].append(leaf)
    return [
        (urgency, batch)
        for urgency in sorted(of_urgency)
        for batch in _cut(of_urgency[urgency], prefix.depth, batch_size, max_padding)
    ]


def _cut(
    leaves: Sequence[Leaf], depth: int, batch_size: int, max_padding: float | None
) -> list[list[Leaf]]:
    """Cuts the sequences of a prefix into prefill batches, the longest expected decode first.

    A bucket is so narrow that its shortest sequence next to its longest keeps the bound on padding.
    So does any prefill batch out of it, and its sequences are free to be sorted by decode length.
    None stands for no padding at all.
    """
    buckets: list[list[Leaf]] = []
    shortest = float("inf")
    for leaf in sorted(leaves, key=lambda leaf: leaf.length, reverse=True):
        if leaf.length - depth < shortest:
            shortest = _shortest(leaf.length - depth, max_padding)
            buckets.append([])
        buckets[-1].append(leaf)
    batches: list[list[Leaf]] = []
    for bucket in buckets:
        bucket.sort(key=lambda leaf: leaf.max_tokens, reverse=True)
        batches += (bucket[at : at + batch_size] for at in range(0, len(bucket), batch_size))
    return sorted(batches, key=lambda batch: batch[0].max_tokens, reverse=True)


def _shortest(longest: int, max_padding: float | None) -> float:
    """Gives the shortest suffix that may be padded to the length of the longest."""
    if max_padding is None:
        return longest
    return min(longest * (1 - max_padding), longest - PADDING_SLACK)
