"""The prefix tree of a window of sequences: its branching nodes, and which of them become prefixes.

The sequences are sorted by their tokens. Sequences that share a prefix are then neighbours, and the
lengths of what neighbours share say all there is to know about the prefix tree: one pass over them
with a stack finds its branching nodes. The nodes deep enough to pay become prefixes.

Pure: token ids in, a tree out; no model, no queue, no clock. Depths and lengths count tokens.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_rq.engine.kv.prefix_key import TOKEN_BYTES, key_of

Tokens = Sequence[int] | NDArray[np.integer[Any]]
PrefixOf = dict[int, int | None]
"""For each sequence its prefix."""


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence that waits to be generated; a smaller `priority` number is admitted first.

    Of one priority, those that are `overdue` go first, and with each the rest of its prefix where
    that is no more than a batch: else the prefix would be computed again for them.
    `max_tokens` is the expected decode length. `duplicate_key` is set only where equal keys and
    equal tokens mean equal answers (greedy or seeded sequences): it holds whatever else shapes the
    answer, the token budget too. `packed` is the tokens as `pack` gives them, for those that are
    planned again and again: packing takes longer than the rest of the plan.
    """

    tokens: Tokens
    max_tokens: int
    priority: int = 0
    overdue: bool = False
    duplicate_key: Hashable | None = None
    packed: bytes | None = None


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


# Sort, and measure what neighbours share.


def sort(sequences: Sequence[PlannedSequence]) -> tuple[dict[int, int], dict[int, int], int]:
    """Sort the sequences to generate by their tokens, and set duplicates aside.

    Gives the sequences in that order, each with how many tokens of a prefix it may share with the
    next one; the duplicates, as in Plan; and the number of distinct tokens.
    """
    keys = [
        pack(sequence.tokens) if sequence.packed is None else sequence.packed
        for sequence in sequences
    ]
    if not all(keys):
        raise ValueError(f"sequence {keys.index(b'')} has no tokens; a prompt needs at least one")
    # Of sequences with equal tokens the most urgent sorts first, so it is the one generated for
    # all.
    by_urgency = sorted(
        range(len(sequences)),
        key=lambda sequence: (sequences[sequence].priority, not sequences[sequence].overdue),
    )
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
        distinct_tokens += len(key) // TOKEN_BYTES - common
        if shared:
            # Each sequence is left a token to prefill. Only the first of two neighbours can be a
            # prefix of the other (or its equal), so the first one's length is the limit.
            shared[before] = min(common, len(sequences[before].tokens) - 1)
        shared[sequence] = 0
        before, key_before = sequence, key
    return shared, duplicates, distinct_tokens


def pack(tokens: Tokens) -> bytes:
    """Pack token ids into bytes, so that sequences sort and compare at the speed of memcmp.

    Sequences that share a prefix become neighbours in whatever order the machine puts a token's
    bytes.
    """
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.uint32).tobytes()
    return key_of(tokens)


def _common(a: bytes, b: bytes) -> int:
    """Count the tokens that two keys share at their start."""
    length = min(len(a), len(b)) // TOKEN_BYTES
    differ = np.frombuffer(a, np.uint32, length) != np.frombuffer(b, np.uint32, length)
    return int(differ.argmax()) if differ.any() else length


# Find the branching nodes, and keep those that pay.


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


def prefixes_of(
    shared: Mapping[int, int], min_prefix_tokens: int
) -> tuple[list[PlannedPrefix], PrefixOf]:
    """Choose the prefixes, parents first, and the prefix that each sequence starts from.

    A node that is no prefix leaves its branches to the prefix above, and all of them but one
    compute the tokens in between again. A node deep enough is given up only where that costs less
    than to give up the nodes too close below it. A sequence that is the prefix of others is no
    special case: it hangs from a node one token above theirs, and one of the two nodes has to go.
    """
    prefixes: list[PlannedPrefix] = []
    prefix_of: PrefixOf = {}
    for node in _nodes(shared, min_prefix_tokens):
        node.prefix = above = node.parent.prefix if node.parent else None
        new = node.depth - depth_of(prefixes, above)
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
