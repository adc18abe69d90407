"""Order a window of rows so that every shared prompt token is computed once.

The rows are sorted by their tokens. Rows that share a prefix are then neighbours, and the lengths
of what neighbours share say all there is to know about the prefix tree: one pass over them with a
stack finds its branching nodes. The nodes deep enough to pay become trunks, whose KV the engine
keeps while rows below them are admitted; a row prefills only what follows its trunk. The rows of a
trunk are cut into cohorts of like suffix length, and the cohorts are put in depth-first order, so
that a trunk is used and then done with.

Pure: token ids in, a plan out; no model, no queue, no clock. Depths and lengths count tokens.
"""

from array import array
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Tokens by which the suffixes of a cohort may differ, whatever share of padding that makes: so much
# padding costs less than the forward pass and the admission of one more cohort.
PADDING_SLACK = 8

_TOKEN_BYTES = array("I").itemsize

Tokens = Sequence[int] | NDArray[np.integer[Any]]
_TrunkOf = dict[int, int | None]  # by row
_Sibling = tuple[int | None, bool]  # a trunk (None: the root): its subtree (True) or its own rows


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A row that waits to be generated; a smaller `priority` number is admitted first.

    `max_tokens` is the expected decode length. `duplicate_key` is set only where equal keys and
    equal tokens mean equal answers (greedy or seeded rows): it holds whatever else shapes the
    answer, the token budget too.
    """

    tokens: Tokens
    max_tokens: int
    priority: int = 0
    duplicate_key: Hashable | None = None


@dataclass(frozen=True, slots=True)
class Trunk:
    """A shared prefix whose KV is worth keeping: the first `depth` tokens of row `row`.

    `index` and `parent` are places in `Plan.trunks`, where parents come first. `rows_below` counts
    the rows (not the duplicates) that start from this trunk or one below; all are longer than it.
    """

    index: int
    parent: int | None
    row: int
    depth: int
    rows_below: int


@dataclass(frozen=True, slots=True)
class Cohort:
    """Rows admitted together: same trunk (None: no trunk), same priority, suffix lengths alike."""

    trunk: int | None
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to prefill, and in which order to admit.

    `duplicates` maps a row to the row that is generated in its place. `prompt_tokens` counts the
    tokens of all rows, `distinct_tokens` the nodes of their prefix tree: each shared token once.
    """

    trunks: tuple[Trunk, ...]
    cohorts: tuple[Cohort, ...]
    duplicates: Mapping[int, int]
    prompt_tokens: int
    distinct_tokens: int


def plan(
    rows: Sequence[PlanRow],
    *,
    cohort_rows: int = 16,
    min_trunk_tokens: int = 16,
    max_padding: float = 0.15,
) -> Plan:
    """Choose the trunks to keep and the cohorts to admit, in order, for a window of rows.

    A trunk has at least two rows below it, and at least `min_trunk_tokens` beyond its parent. A
    cohort has at most `cohort_rows` rows; padding is at most the share `max_padding` of its
    positions, unless its suffixes differ by no more than `PADDING_SLACK`.

    Raises ValueError for a row without tokens or an option out of range, OverflowError for a token
    id in a list that does not fit 32 bits.
    """
    if cohort_rows < 1 or min_trunk_tokens < 1 or not 0 <= max_padding < 1:
        raise ValueError("need cohort_rows >= 1, min_trunk_tokens >= 1 and 0 <= max_padding < 1")
    shared, duplicates, distinct_tokens = _sort(rows)
    trunks, trunk_of = _trunks(shared, min_trunk_tokens)
    groups: dict[tuple[int, int | None], list[int]] = defaultdict(list)
    for row in sorted(shared):
        groups[rows[row].priority, trunk_of[row]].append(row)
    place = _places(rows, trunks, trunk_of)
    cohorts: list[Cohort] = []
    for priority, trunk in sorted(groups, key=lambda group: (group[0], place[group[1]])):
        depth = _depth(trunks, trunk)
        suffix = {row: len(rows[row].tokens) - depth for row in groups[priority, trunk]}
        cuts = _cut(rows, suffix, cohort_rows, max_padding)
        cohorts += (Cohort(trunk, tuple(cut)) for cut in cuts)
    prompt_tokens = sum(len(row.tokens) for row in rows)
    return Plan(tuple(trunks), tuple(cohorts), duplicates, prompt_tokens, distinct_tokens)


def distinct_tokens(rows: Sequence[PlanRow]) -> int:
    """Count the nodes of the rows' prefix tree: what has to be computed at least once."""
    return _sort(rows)[2]


def prefilled_tokens(plan: Plan, rows: Sequence[PlanRow]) -> int:
    """Count the tokens prefilled: each trunk's beyond its parent, each row's beyond its trunk."""
    return _trunk_tokens(plan) + sum(sum(cohort) for cohort in _suffixes(plan, rows))


def computed_positions(plan: Plan, rows: Sequence[PlanRow]) -> int:
    """Count the positions computed: the tokens prefilled, and the padding within cohorts."""
    return _trunk_tokens(plan) + sum(max(cohort) * len(cohort) for cohort in _suffixes(plan, rows))


def _trunk_tokens(plan: Plan) -> int:
    return sum(trunk.depth - _depth(plan.trunks, trunk.parent) for trunk in plan.trunks)


def _suffixes(plan: Plan, rows: Sequence[PlanRow]) -> list[list[int]]:
    """List the suffix lengths of each cohort."""
    return [
        [len(rows[row].tokens) - _depth(plan.trunks, cohort.trunk) for row in cohort.rows]
        for cohort in plan.cohorts
    ]


def _depth(trunks: Sequence[Trunk], trunk: int | None) -> int:
    return 0 if trunk is None else trunks[trunk].depth


# 1. Sort, and measure what neighbours share.


def _sort(rows: Sequence[PlanRow]) -> tuple[dict[int, int], dict[int, int], int]:
    """Sort the rows to generate by their tokens, and set duplicates aside.

    Gives the rows in that order, each with how many tokens of a trunk it may share with the next
    one; the duplicates, as in Plan; and the number of distinct tokens.
    """
    keys = [_key(row.tokens) for row in rows]
    if not all(keys):
        raise ValueError(f"row {keys.index(b'')} has no tokens; a prompt needs at least one")
    # Of rows with equal tokens the most urgent sorts first, so it is the one generated for all.
    by_urgency = sorted(range(len(rows)), key=lambda row: rows[row].priority)
    shared: dict[int, int] = {}
    duplicates: dict[int, int] = {}
    generated: dict[tuple[bytes, Hashable], int] = {}
    distinct_tokens = 0
    before, key_before = -1, b""
    for row in sorted(by_urgency, key=keys.__getitem__):
        key, duplicate_key = keys[row], rows[row].duplicate_key
        if duplicate_key is not None and generated.setdefault((key, duplicate_key), row) != row:
            duplicates[row] = generated[key, duplicate_key]
            continue
        common = _common(key_before, key)
        distinct_tokens += len(key) // _TOKEN_BYTES - common
        if shared:
            # Each row is left a token to prefill. Only the first of two neighbours can be a prefix
            # of the other (or its equal), so the first one's length is the limit.
            shared[before] = min(common, len(rows[before].tokens) - 1)
        shared[row] = 0
        before, key_before = row, key
    return shared, duplicates, distinct_tokens


def _key(tokens: Tokens) -> bytes:
    """Pack token ids into bytes, so that rows sort and compare at the speed of memcmp.

    Rows that share a prefix become neighbours in whatever order the machine puts a token's bytes.
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
    row: int  # any row below
    rows_below: int = 0
    own_rows: list[int] = field(default_factory=list)  # those that hang from this very node
    branches: int = 0  # own rows, and nodes next below
    too_close: int = 0  # tokens computed again if this trunk keeps nodes next below from being one
    parent: "_Node | None" = None
    trunk: int | None = None  # the trunk at this node, or else the one above it


def _trunks(shared: Mapping[int, int], min_trunk_tokens: int) -> tuple[list[Trunk], _TrunkOf]:
    """Choose the trunks, parents first, and the trunk that each row starts from.

    A node that is no trunk leaves its branches to the trunk above, and all of them but one compute
    the tokens in between again. A node deep enough is given up only where that costs less than to
    give up the nodes too close below it. A row that is the prefix of others is no special case: it
    hangs from a node one token above theirs, and one of the two nodes has to go.
    """
    trunks: list[Trunk] = []
    trunk_of: _TrunkOf = {}
    for node in _nodes(shared, min_trunk_tokens):
        node.trunk = above = node.parent.trunk if node.parent else None
        new = node.depth - _depth(trunks, above)
        if new >= min_trunk_tokens and (node.branches - 1) * new >= node.too_close:
            node.trunk = len(trunks)
            trunks.append(Trunk(node.trunk, above, node.row, node.depth, node.rows_below))
        trunk_of |= dict.fromkeys(node.own_rows, node.trunk)
    return trunks, trunk_of


def _nodes(shared: Mapping[int, int], min_trunk_tokens: int) -> list[_Node]:
    """Build the branching nodes, the root first and parents before their children.

    `path` leads from the root to the row at hand. A row opens the node that it shares with the row
    after it, and closes the nodes that reach deeper than that.
    """
    path = [_Node(depth=0, row=-1)]
    closed: list[_Node] = []
    for row, depth in shared.items():
        if depth > path[-1].depth:
            path.append(_Node(depth, row))
        path[-1].own_rows.append(row)
        path[-1].rows_below += 1
        path[-1].branches += 1
        while path[-1].depth > depth:
            node = path.pop()
            if depth > path[-1].depth:
                path.append(_Node(depth, row))
            node.parent = parent = path[-1]
            parent.rows_below += node.rows_below
            parent.branches += 1
            if node.depth - parent.depth < min_trunk_tokens:
                parent.too_close += (node.branches - 1) * (node.depth - parent.depth)
            closed.append(node)
    return [*path, *reversed(closed)]


# 3. Order: depth first, long decodes first, like suffixes together.


def _places(
    rows: Sequence[PlanRow], trunks: Sequence[Trunk], trunk_of: _TrunkOf
) -> dict[int | None, int]:
    """Number the trunks (and None) in the order in which their own rows are admitted, depth first.

    Siblings are a trunk's own rows and the subtrees below it. The one that holds the longest decode
    goes first, then the one with more to decode: what starts last should not run on alone. Rows of
    all priorities count, and one order serves them all.
    """
    decodes: dict[int | None, list[int]] = defaultdict(list)
    for row, index in trunk_of.items():
        decodes[index].append(rows[row].max_tokens)
    weight = {(index, False): (max(own), sum(own)) for index, own in decodes.items()}
    siblings: dict[int | None, list[_Sibling]] = defaultdict(list)
    for index in decodes:
        siblings[index].append((index, False))
    for trunk in reversed(trunks):
        longest, total = zip(*(weight[sibling] for sibling in siblings[trunk.index]), strict=True)
        weight[trunk.index, True] = max(longest), sum(total)
        siblings[trunk.parent].append((trunk.index, True))
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
    rows: Sequence[PlanRow], suffix: Mapping[int, int], cohort_rows: int, max_padding: float
) -> list[list[int]]:
    """Cut the rows of a trunk into cohorts, the longest expected decode first.

    A bucket is so narrow that its shortest row next to its longest keeps the bound on padding. So
    does any cohort out of it, and its rows are free to be sorted by decode length.
    """
    buckets: list[list[int]] = []
    shortest = float("inf")
    for row in sorted(suffix, key=suffix.__getitem__, reverse=True):
        if suffix[row] < shortest:
            shortest = min(suffix[row] * (1 - max_padding), suffix[row] - PADDING_SLACK)
            buckets.append([])
        buckets[-1].append(row)
    cohorts: list[list[int]] = []
    for bucket in buckets:
        bucket.sort(key=lambda row: rows[row].max_tokens, reverse=True)
        cohorts += (bucket[at : at + cohort_rows] for at in range(0, len(bucket), cohort_rows))
    return sorted(cohorts, key=lambda cohort: rows[cohort[0]].max_tokens, reverse=True)
