"""The prefix tree of the sequences that wait: its branching nodes, and which of them are prefixes.

Sequences come and go one by one. Each touches only the nodes on its own way, and `refresh` looks
again only at those, so that what a sequence costs does not depend on how many others wait. The
tree is the same in whatever order its sequences came.

Each sequence is left a token to prefill: its last token is never part of a prefix, so a sequence
that is the prefix of others hangs from a node one token above theirs.

Pure: token ids in, a tree out; no model, no queue, no clock. Depths and lengths count tokens.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlx_rq.engine.kv.prefix_key import TOKEN_BYTES, Key, key_of

Tokens = Sequence[int] | NDArray[np.integer[Any]]

Urgency = tuple[int, bool]
"""The priority, and whether there is time yet; smaller goes first."""


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence that waits to be generated; a smaller `priority` number is admitted first.

    Of one priority, those that are `overdue` go first, and with each the rest of its prefix where
    that is no more than a batch: else the prefix would be computed again for them.
    `max_tokens` is the expected decode length. `duplicate_key` is set only where equal keys and
    equal tokens mean equal answers (greedy or seeded sequences): it holds whatever else shapes the
    answer, the token budget too. `packed` is the tokens as `pack` gives them, where they are known.
    """

    tokens: Tokens
    max_tokens: int
    priority: int = 0
    overdue: bool = False
    duplicate_key: Hashable | None = None
    packed: Key | None = None


def pack(tokens: Tokens) -> Key:
    """Pack token ids into bytes, so that sequences are compared at the speed of memcmp."""
    if isinstance(tokens, np.ndarray):
        return tokens.astype(np.uint32).tobytes()
    return key_of(tokens)


@dataclass(slots=True, eq=False)
class Leaf:
    """A sequence in the tree. `number` says when it came: the later, the greater."""

    number: int
    source: Key
    """Its tokens."""
    max_tokens: int
    priority: int
    overdue: bool
    node: "Node | None" = None
    """From where it branches off."""

    @property
    def length(self) -> int:
        return len(self.source) // TOKEN_BYTES

    @property
    def urgency(self) -> Urgency:
        return self.priority, not self.overdue


@dataclass(slots=True, eq=False)
class Node:
    """A branching node of the prefix tree: all sequences below begin with the same tokens."""

    source: Key
    """A sequence that begins with them, which may have left."""
    depth: int
    parent: "Node | None" = None
    children: "dict[Key, Node]" = field(default_factory=dict)
    """The branching nodes next below, by the token that leads there."""
    lone: dict[Key, Leaf] = field(default_factory=dict)
    """The sequences that share no more with others, by the token that leads there."""
    endings: dict[Leaf, None] = field(default_factory=dict)
    """The sequences that have only their last token left here (an ordered set)."""
    stale: bool = True
    """Whether something has changed here or below since it was looked at."""
    prefix: "Node | None" = None
    """Itself where it is a prefix, or else the prefix above it."""

    @property
    def key(self) -> Key:
        return self.source[: self.depth * TOKEN_BYTES]

    def begins(self, key: Key, known: int = 0) -> bool:
        """Says whether a sequence begins with its tokens, as it does with the first `known`."""
        edge = slice(known * TOKEN_BYTES, self.depth * TOKEN_BYTES)
        return self.source[edge] == key[edge]

    @property
    def above(self) -> "Node | None":
        """The prefix above it, or the root."""
        return None if self.parent is None else self.parent.prefix

    @property
    def branches(self) -> int:
        return len(self.children) + len(self.lone) + len(self.endings)

    def leaves(self) -> Iterator[Leaf]:
        """Gives the sequences that hang from this very node."""
        yield from self.lone.values()
        yield from self.endings

    def too_close(self, min_prefix_tokens: int) -> int:
        """Counts the tokens computed again if this prefix keeps nodes next below from being one."""
        again = 0
        for child in self.children.values():
            if (new := child.depth - self.depth) < min_prefix_tokens:
                again += (child.branches - 1) * new
        return again


class PrefixTree:
    """A prefix tree whose sequences come and go.

    `regrouped` collects the prefixes whose own sequences, or whose prefixes next below, are others
    than they were; the root stands for no prefix.
    """

    def __init__(self, min_prefix_tokens: int) -> None:
        self._min_prefix_tokens = min_prefix_tokens
        self.root = Node(b"", 0)
        self.root.prefix = self.root
        self.regrouped: dict[Node, None] = {self.root: None}  # an ordered set
        self._last = self.root  # what comes next is often like what came last

    # Sequences come and go.

    def insert(self, leaf: Leaf) -> None:
        """Hangs a sequence where it branches off from all others."""
        node, key, most = self._last, leaf.source, leaf.length - 1
        while node.parent is not None and not (node.depth <= most and node.begins(key)):
            node = node.parent
        while node.depth < most:
            token = _token(key, node.depth)
            other = node.children.get(token) or node.lone.get(token)
            if other is None:
                break
            if isinstance(other, Node) and other.depth <= most and other.begins(key, node.depth):
                node = other
            else:
                limit = other.depth if isinstance(other, Node) else other.length - 1
                depth = _common(key, other.source, node.depth, min(limit, most))
                node = self._split(node, other, depth)
        self._hang(leaf, node)
        self._last = node
        self.changed(node)

    def remove(self, leaf: Leaf) -> None:
        """Takes a sequence out; the tree is then as if it had never been there."""
        node = leaf.node
        assert node is not None
        if leaf.length - 1 == node.depth:
            del node.endings[leaf]
        else:
            del node.lone[_token(leaf.source, node.depth)]
        leaf.node = None
        self.changed(node)
        if node.parent is not None and node.branches == 1:
            self._dissolve(node, node.parent)

    def changed(self, node: Node) -> None:
        """Notes that sequences at a node are others than they were."""
        assert node.prefix is not None
        self.regrouped[node.prefix] = None
        above: Node | None = node
        while above is not None and not above.stale:
            above.stale = True
            above = above.parent

    def _hang(self, leaf: Leaf, node: Node) -> None:
        leaf.node = node
        if leaf.length - 1 == node.depth:
            node.endings[leaf] = None
        else:
            node.lone[_token(leaf.source, node.depth)] = leaf

    def _split(self, above: Node, below: Node | Leaf, depth: int) -> Node:
        """Puts a new node between a node and one of its branches."""
        node = Node(below.source, depth, above, prefix=above.prefix)
        token = _token(below.source, above.depth)
        above.children[token] = node
        if isinstance(below, Leaf):
            del above.lone[token]
            self._hang(below, node)
        else:
            node.children[_token(below.source, depth)] = below
            below.parent = node
        self.changed(above)
        return node

    def _dissolve(self, node: Node, parent: Node) -> None:
        """Hangs the only branch of a node from the node above."""
        token = _token(node.source, parent.depth)
        del parent.children[token]
        for child in node.children.values():
            parent.children[token] = child
            child.parent, child.stale = parent, True
        for leaf in node.leaves():
            self._hang(leaf, parent)
        node.prefix = None
        self.regrouped[node] = None
        if self._last is node:
            self._last = parent
        self.changed(parent)

    # Which nodes are prefixes.

    def refresh(self) -> None:
        """Chooses anew which nodes are prefixes, as far as something has changed.

        A node that is no prefix leaves its branches to the prefix above, and all of them but one
        compute the tokens in between again. A node deep enough is given up only where that costs
        less than to give up the nodes too close below it.
        """
        self.root.stale = False
        nodes = [child for child in self.root.children.values() if child.stale]
        while nodes:
            node = nodes.pop()
            node.stale = False
            before, node.prefix = node.prefix, self._prefix_of(node)
            moved = before is not node.prefix
            if moved:
                self.regrouped |= dict.fromkeys(filter(None, (before, node.prefix)))
            nodes += [child for child in node.children.values() if child.stale or moved]

    def _prefix_of(self, node: Node) -> Node:
        above = node.above
        assert above is not None
        new, least = node.depth - above.depth, self._min_prefix_tokens
        if new >= least and (node.branches - 1) * new >= node.too_close(least):
            return node
        return above

    @property
    def distinct_tokens(self) -> int:
        """The tokens of all sequences, each shared one once."""
        count, nodes = 0, [self.root]
        for node in nodes:
            nodes += node.children.values()
            count += sum(child.depth - node.depth for child in node.children.values())
            count += sum(leaf.length - node.depth for leaf in node.lone.values())
            last = {_token(leaf.source, node.depth) for leaf in node.endings}
            count += len(last - node.children.keys() - node.lone.keys())
        return count


def _token(key: Key, depth: int) -> Key:
    """Gives the token that follows the first `depth` ones."""
    return key[depth * TOKEN_BYTES : (depth + 1) * TOKEN_BYTES]


def _common(a: Key, b: Key, known: int, most: int) -> int:
    """Counts the tokens that two keys share at their start: `known` at least, `most` at most."""
    count, offset = most - known, known * TOKEN_BYTES
    differ = np.frombuffer(a, np.uint32, count, offset) != np.frombuffer(
        b, np.uint32, count, offset
    )
    return known + (int(differ.argmax()) if differ.any() else count)
