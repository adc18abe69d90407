"""Order a window of sequences so that every shared prompt token is computed once.

The sequences are sorted by their tokens. Sequences that share a prefix are then neighbours, and the
lengths of what neighbours share say all there is to know about the prefix tree: one pass over them
with a stack finds its branching nodes. The nodes deep enough to pay become prefixes, whose KV the
engine keeps while sequences below them are admitted; a sequence prefills only what follows its
prefix. The sequences of a prefix are cut into prefill batches of like suffix length, and the
prefill batches are put in depth-first order, so that a prefix is used and then done with.

Pure: token ids in, a plan out; no model, no queue, no clock. Depths and lengths count tokens.
"""

from array import array
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_rq.engine.options import EngineOptions

_DEFAULTS = EngineOptions()

# Tokens by which the suffixes of a prefill batch may differ, whatever share of padding that makes:
# so much padding costs less than the forward pass and the admission of one more prefill batch.
PADDING_SLACK = 8

_TOKEN_BYTES = array("I").itemsize

Tokens = Sequence[int] | NDArray[np.integer[Any]]
_PrefixOf = dict[int, int | None]  # by sequence
_Sibling = tuple[
    int | None, bool
]  # a prefix (None: the root): its subtree (True) or its own sequences


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence that waits to be generated; a smaller `priority` number is admitted first.

    `max_tokens` is the expected decode length. `duplicate_key` is set only where equal keys and
    equal tokens mean equal answers (greedy or seeded sequences): it holds whatever else shapes the
    answer, the token budget too.
    """

    tokens: Tokens
    max_tokens: int
    priority: int = 0
    duplicate_key: Hashable | None = None


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


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Sequences admitted together: of one prefix (or None), one priority, like suffix lengths."""

    prefix: int | None
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to prefill, and in which order to admit.

    `duplicates` maps a sequence to the sequence that is generated in its place. `prompt_tokens`
    counts the tokens of all sequences, `distinct_tokens` the nodes of their prefix tree: each
    shared token once.
    """

    prefixes: tuple[PlannedPrefix, ...]
    batches: tuple[PrefillBatch, ...]
    duplicates: Mapping[int, int]
    prompt_tokens: int
    distinct_tokens: int


def plan(
    sequences: Sequence[PlannedSequence],
    *,
    batch_size: int = _DEFAULTS.batch_size,
    min_prefix_tokens: int = _DEFAULTS.min_prefix_tokens,
    max_padding: float = 0.15,
) -> Plan:
    """Choose, for a window of sequences, the prefixes to keep and the order of prefill batches.

    A prefix has at least two sequences below it, and at least `min_prefix_tokens` beyond its
    parent. A prefill batch has at most `batch_size` sequences; padding is at most the share
    `max_padding` of its positions, unless its suffixes differ by no more than `PADDING_SLACK`.

    Raises ValueError for a sequence without tokens or an option out of range, OverflowError for a
    token id in a list that does not fit 32 bits.
    """
    if batch_size < 1 or min_prefix_tokens < 1 or not 0 <= max_padding < 1:
        raise ValueError("need batch_size >= 1, min_prefix_tokens >= 1 and 0 <= max_padding < 1")
    shared, duplicates, distinct_tokens = _sort(sequences)
    prefixes, prefix_of = _prefixes(shared, min_prefix_tokens)
    groups: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for sequence in sorted(shared):
        groups[sequences[sequence].priority, prefix_of[sequence]].append(sequence)
    place = _places(sequences, prefixes, prefix_of)
    batches: list[PrefillBatch] = []
    for priority, prefix in sorted(groups, key=lambda group: (group[0], place[group[1]])):
        depth = _depth(prefixes, prefix)
        suffix = {
            sequence: len(sequences[sequence].tokens) - depth
            for sequence in groups[priority, prefix]
        }
        cuts = _cut(sequences, suffix, batch_size, max_padding)
        batches += (PrefillBatch(prefix, tuple(cut)) for cut in cuts)
    prompt_tokens = sum(len(sequence.tokens) for sequence in sequences)
    return Plan(tuple(prefixes), tuple(batches), duplicates, prompt_tokens, distinct_tokens)


def _depth(prefixes: Sequence[PlannedPrefix], prefix: int | None) -> int:
    return 0 if prefix is None else prefixes[prefix].depth


# 1. Sort, and measure what neighbours share.


def _sort(sequences: Sequence[PlannedSequence]) -> tuple[dict[int, int], dict[int, int], int]:
    """Sort the sequences to generate by their tokens, and set duplicates aside.

    Gives the sequences in that order, each with how many tokens of a prefix it may share with the
    next one; the duplicates, as in Plan; and the number of distinct tokens.
    """
    keys = [_key(sequence.tokens) for sequence in sequences]
    if not all(keys):
        raise ValueError(f"sequence {keys.index(b'')} has no tokens; a prompt needs at least one")
    # Of sequences with equal tokens the most urgent sorts first, so it is the one generated for
    # all.
    by_urgency = sorted(range(len(sequences)), key=lambda sequence: sequences[sequence].priority)
    shared: dict[int, int] = {}
    duplicates: dict[int, int] = {}
    generated: dict[tuple[bytes, Hashable], int] = {}
    distinct_tokens = 0
    before, key_before = -1, b""
    for sequence in sorted(by_urgency, key=keys.__getitem__):
        key, duplicate_key = keys[sequence], sequences[sequence].duplicate_key
        if (
            duplicate_key is not None
            and generated.setdefault((key, duplicate_key), sequence) != sequence
        ):
            duplicates[sequence] = generated[key, duplicate_key]
            continue
        common = _common(key_before, key)
        distinct_tokens += len(key) // _TOKEN_BYTES - common
        if shared:
            # Each sequence is left a token to prefill. Only the first of two neighbours can be a
            # prefix of the other (or its equal), so the first one's length is the limit.
            shared[before] = min(common, len(sequences[before].tokens) - 1)
        shared[sequence] = 0
        before, key_before = sequence, key
    return shared, duplicates, distinct_tokens


def _key(tokens: Tokens) -> bytes:
    """Pack token ids into bytes, so that sequences sort and compare at the speed of memcmp.

    Sequences that share a prefix become neighbours in whatever order the machine puts a token's
    bytes.
    """
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.uint32).tobytes()
    return array("I", tokens).tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Count the tokens that two keys share at their start."""
    length = min(len(a), len(b)) // _TOKEN_BYTES
    differ = np.frombuffer(a, np.uint32, length) != np.frombuffer(b, np.uint32, length)
    return int(differ.argmax()) if differ.any() else length


# 2. Find the branching nodes, and keep those that pay.


@dataclass(slots=True, eq=False)
class _Node:
    """A branching node of the prefix tree."""

    depth: int
    sequence: int  # any sequence below
    sequences_below: int = 0
    own_sequences: list[int] = field(default_factory=list)  # those that hang from this very node
    branches: int = 0  # own sequences, and nodes next below
    too_close: int = 0  # tokens computed again if this prefix keeps nodes next below from being one
    parent: "_Node | None" = None
    prefix: int | None = None  # the prefix at this node, or else the one above it


def _prefixes(
    shared: Mapping[int, int], min_prefix_tokens: int
) -> tuple[list[PlannedPrefix], _PrefixOf]:
    """Choose the prefixes, parents first, and the prefix that each sequence starts from.

    A node that is no prefix leaves its branches to the prefix above, and all of them but one
    compute the tokens in between again. A node deep enough is given up only where that costs less
    than to give up the nodes too close below it. A sequence that is the prefix of others is no
    special case: it hangs from a node one token above theirs, and one of the two nodes has to go.
    """
    prefixes: list[PlannedPrefix] = []
    prefix_of: _PrefixOf = {}
    for node in _nodes(shared, min_prefix_tokens):
        node.prefix = above = node.parent.prefix if node.parent else None
        new = node.depth - _depth(prefixes, above)
        if new >= min_prefix_tokens and (node.branches - 1) * new >= node.too_close:
            node.prefix = len(prefixes)
            prefixes.append(
                PlannedPrefix(node.prefix, above, node.sequence, node.depth, node.sequences_below)
            )
        prefix_of |= dict.fromkeys(node.own_sequences, node.prefix)
    return prefixes, prefix_of


def _nodes(shared: Mapping[int, int], min_prefix_tokens: int) -> list[_Node]:
    """Build the branching nodes, the root first and parents before their children.

    `path` leads from the root to the sequence at hand. A sequence opens the node that it shares
    with the sequence after it, and closes the nodes that reach deeper than that.
    """
    path = [_Node(depth=0, sequence=-1)]
    closed: list[_Node] = []
    for sequence, depth in shared.items():
        if depth > path[-1].depth:
            path.append(_Node(depth, sequence))
        path[-1].own_sequences.append(sequence)
        path[-1].sequences_below += 1
        path[-1].branches += 1
        while path[-1].depth > depth:
            node = path.pop()
            if depth > path[-1].depth:
                path.append(_Node(depth, sequence))
            node.parent = parent = path[-1]
            parent.sequences_below += node.sequences_below
            parent.branches += 1
            if node.depth - parent.depth < min_prefix_tokens:
                parent.too_close += (node.branches - 1) * (node.depth - parent.depth)
            closed.append(node)
    return [*path, *reversed(closed)]


# 3. Order: depth first, long decodes first, like suffixes together.


def _places(
    sequences: Sequence[PlannedSequence], prefixes: Sequence[PlannedPrefix], prefix_of: _PrefixOf
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
    max_padding: float,
) -> list[list[int]]:
    """Cut the sequences of a prefix into prefill batches, the longest expected decode first.

    A bucket is so narrow that its shortest sequence next to its longest keeps the bound on padding.
    So does any prefill batch out of it, and its sequences are free to be sorted by decode length.
    """
    buckets: list[list[int]] = []
    shortest = float("inf")
    for sequence in sorted(suffix, key=suffix.__getitem__, reverse=True):
        if suffix[sequence] < shortest:
            shortest = min(suffix[sequence] * (1 - max_padding), suffix[sequence] - PADDING_SLACK)
            buckets.append([])
        buckets[-1].append(sequence)
    batches: list[list[int]] = []
    for bucket in buckets:
        bucket.sort(key=lambda sequence: sequences[sequence].max_tokens, reverse=True)
        batches += (bucket[at : at + batch_size] for at in range(0, len(bucket), batch_size))
    return sorted(batches, key=lambda batch: sequences[batch[0]].max_tokens, reverse=True)
