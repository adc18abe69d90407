"""Order a window of sequences so that every shared prompt token is computed once.

The prefixes of the window's tree (`prefix_tree.py`) are those whose KV the engine keeps while
sequences below them are admitted; a sequence prefills only what follows its prefix. The sequences
of a prefix are cut into prefill batches of like suffix length, and the prefill batches are put in
depth-first order, so that a prefix is used and then done with.

Pure: token ids in, a plan out; no model, no queue, no clock. Depths and lengths count tokens.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.prefix_tree import (
    PlannedPrefix,
    PlannedSequence,
    PrefixOf,
    depth_of,
    prefixes_of,
    sort,
)

_DEFAULTS = EngineOptions()

# Tokens by which the suffixes of a prefill batch may differ, whatever share of padding that makes:
# so much padding costs less than the forward pass and the admission of one more prefill batch.
PADDING_SLACK = 8

Urgency = tuple[int, bool]  # the priority, and whether there is time yet; smaller goes first
_Sibling = tuple[
    int | None, bool
]  # a prefix (None: the root): its subtree (True) or its own sequences


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
    """Choose, for a window of sequences, the prefixes to keep and the order of prefill batches.

    A prefix has at least two sequences below it, and at least `min_prefix_tokens` beyond its
    parent. A prefill batch has at most `batch_size` sequences; padding is at most the share
    `max_padding` of its positions, unless its suffixes differ by no more than `PADDING_SLACK`.
    Without `pads`, there is none.

    Raises ValueError for a sequence without tokens or an option out of range, OverflowError for a
    token id in a list that does not fit 32 bits.
    """
    if batch_size < 1 or min_prefix_tokens < 1 or not 0 <= max_padding < 1:
        raise ValueError("need batch_size >= 1, min_prefix_tokens >= 1 and 0 <= max_padding < 1")
    shared, duplicates, distinct_tokens = sort(sequences)
    prefixes, prefix_of = prefixes_of(shared, min_prefix_tokens)
    groups = _groups(sequences, prefix_of, batch_size)
    place = _places(sequences, prefixes, prefix_of)
    batches: list[PrefillBatch] = []
    prefilled = sum(prefix.depth - depth_of(prefixes, prefix.parent) for prefix in prefixes)
    for urgency, prefix in sorted(groups, key=lambda group: (group[0], place[group[1]])):
        depth = depth_of(prefixes, prefix)
        suffix = {
            sequence: len(sequences[sequence].tokens) - depth
            for sequence in groups[urgency, prefix]
        }
        prefilled += sum(suffix.values())
        cuts = _cut(sequences, suffix, batch_size, max_padding if pads else None)
        batches += (PrefillBatch(prefix, tuple(cut), urgency) for cut in cuts)
    prompt_tokens = sum(len(sequence.tokens) for sequence in sequences)
    return Plan(
        tuple(prefixes), tuple(batches), duplicates, prompt_tokens, distinct_tokens, prefilled
    )


# The order: by urgency, depth first, long decodes first, like suffixes together.


def _groups(
    sequences: Sequence[PlannedSequence], prefix_of: PrefixOf, batch_size: int
) -> dict[tuple[Urgency, int | None], list[int]]:
    """Group the sequences to generate by urgency and prefix."""
    of_prefix: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for sequence in sorted(prefix_of):
        of_prefix[sequences[sequence].priority, prefix_of[sequence]].append(sequence)
    groups: dict[tuple[Urgency, int | None], list[int]] = defaultdict(list)
    for (priority, prefix), members in of_prefix.items():
        together = prefix is not None and len(members) <= batch_size
        any_overdue = any(sequences[member].overdue for member in members)
        for member in members:
            overdue = any_overdue if together else sequences[member].overdue
            groups[(priority, not overdue), prefix].append(member)
    return groups


def _places(
    sequences: Sequence[PlannedSequence], prefixes: Sequence[PlannedPrefix], prefix_of: PrefixOf
) -> dict[int | None, int]:
    """Number the prefixes (and None) in the order of admission of their own sequences, depth first.

    Siblings are a prefix's own sequences and the subtrees below it. The one that holds the longest
    decode goes first, then the one with more to decode: what starts last should not run on alone.
    Sequences of all priorities count, and one order serves them all.
    """
    decodes: dict[int | None, list[int]] = defaultdict(list)
    for sequence, index in prefix_of.items():
        decodes[index].append(sequences[sequence].max_tokens)
    weight = {(index, False): (max(own), sum(own)) for index, own in decodes.items()}
    siblings: dict[int | None, list[_Sibling]] = defaultdict(list)
    for index in decodes:
        siblings[index].append((index, False))
    for prefix in reversed(prefixes):
        longest, total = zip(*(weight[sibling] for sibling in siblings[prefix.index]), strict=True)
        weight[prefix.index, True] = max(longest), sum(total)
        siblings[prefix.parent].append((prefix.index, True))
    place: dict[int | None, int] = {}
    walk: list[_Sibling] = [(None, True)]
    while walk:
        index, subtree = walk.pop()
        if subtree:
            walk += sorted(siblings[index], key=weight.__getitem__)  # the heaviest is popped next
        else:
            place[index] = len(place)
    return place


def _cut(
    sequences: Sequence[PlannedSequence],
    suffix: Mapping[int, int],
    batch_size: int,
    max_padding: float | None,
) -> list[list[int]]:
    """Cut the sequences of a prefix into prefill batches, the longest expected decode first.

    A bucket is so narrow that its shortest sequence next to its longest keeps the bound on padding.
    So does any prefill batch out of it, and its sequences are free to be sorted by decode length.
    None stands for no padding at all.
    """
    buckets: list[list[int]] = []
    shortest = float("inf")
    for sequence in sorted(suffix, key=suffix.__getitem__, reverse=True):
        if suffix[sequence] < shortest:
            shortest = _shortest(suffix[sequence], max_padding)
            buckets.append([])
        buckets[-1].append(sequence)
    batches: list[list[int]] = []
    for bucket in buckets:
        bucket.sort(key=lambda sequence: sequences[sequence].max_tokens, reverse=True)
        batches += (bucket[at : at + batch_size] for at in range(0, len(bucket), batch_size))
    return sorted(batches, key=lambda batch: sequences[batch[0]].max_tokens, reverse=True)


def _shortest(longest: int, max_padding: float | None) -> float:
    """Gives the shortest suffix that may be padded to the length of the longest."""
    if max_padding is None:
        return longest
    return min(longest * (1 - max_padding), longest - PADDING_SLACK)
