"""Orders the sequences that wait so that every shared prompt token is computed once.

The prefixes of the tree (`prefix_tree.py`) are those whose KV the engine keeps while sequences
below them are admitted; a sequence prefills only what follows its prefix. The sequences of a
prefix are cut into prefill batches of like suffix length, and the prefill batches are put in
depth-first order, so that a prefix is used and then done with.

Sequences come and go: only the prefixes whose own sequences are others than they were are cut
anew, and the plan is the same as if all that wait had been planned at once.

Pure: token ids in, a plan out; no model, no queue, no clock. Depths and lengths count tokens.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from mlx_rq.engine.kv.prefix_key import Key
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.prefill_batches import batches_of
from mlx_rq.engine.scheduling.prefix_tree import (
    Leaf,
    Node,
    PlannedSequence,
    PrefixTree,
    Urgency,
    pack,
)

_DEFAULTS = EngineOptions()


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """Sequences admitted together: of one prefix, one urgency, like suffix lengths.

    `prefixes` are the one that they start from and those below it, the shortest first.
    """

    prefixes: tuple[Key, ...]
    sequences: tuple[int, ...]
    urgency: Urgency


@dataclass(slots=True)
class _Group:
    """What starts from one prefix: its own sequences in prefill batches, the prefixes next below.

    Both ways on have a weight: the longest decode, and all there is to decode; of equals the one
    goes first that has what came first (`first`).
    """

    key: Key
    below: list[Node] = field(default_factory=list)
    batches: list[tuple[Urgency, list[Leaf]]] = field(default_factory=list)
    own: tuple[int, int, int] | None = None
    """The weight of its own sequences, where it has any."""
    subtree: tuple[int, int, int] = (0, 0, 0)
    """The weight of those, and of all below."""


@dataclass(slots=True)
class _Alike:
    """Sequences whose answers are bound to be equal: the most urgent is generated for all."""

    numbers: dict[int, None] = field(default_factory=dict)  # an ordered set
    by_urgency: list[tuple[Urgency, int]] = field(default_factory=list)
    """A heap. Whoever left or has become more urgent since has an entry too many."""
    generated: Leaf | None = None


class RollingPlan:
    """The plan of the sequences that wait, each known by a number: the later, the greater."""

    def __init__(
        self,
        *,
        batch_size: int = _DEFAULTS.batch_size,
        min_prefix_tokens: int = _DEFAULTS.min_prefix_tokens,
        max_padding: float = 0.15,
        pads: bool = True,
    ) -> None:
        """Raises ValueError for an option out of range. See `plan` for what they mean."""
        if batch_size < 1 or min_prefix_tokens < 1 or not 0 <= max_padding < 1:
            raise ValueError(
                "need batch_size >= 1, min_prefix_tokens >= 1 and 0 <= max_padding < 1"
            )
        self._batch_size = batch_size
        self._max_padding = max_padding if pads else None
        self._tree = PrefixTree(min_prefix_tokens)
        self._leaves: dict[int, Leaf] = {}
        self._groups: dict[Node, _Group] = {}
        self._alike: dict[tuple[Key, Hashable], _Alike] = {}
        self._question: dict[int, tuple[Key, Hashable]] = {}  # of those that may have duplicates

    # Sequences come and go.

    def add(self, number: int, sequence: PlannedSequence) -> None:
        """Takes a sequence in.

        Raises ValueError where it has no tokens, OverflowError for a token id in a list that does
        not fit 32 bits.
        """
        key = pack(sequence.tokens) if sequence.packed is None else sequence.packed
        if not key:
            raise ValueError(f"sequence {number} has no tokens; a prompt needs at least one")
        leaf = Leaf(number, key, sequence.max_tokens, sequence.priority, sequence.overdue)
        self._leaves[number] = leaf
        if sequence.duplicate_key is None:
            self._tree.insert(leaf)
            return
        question = self._question[number] = key, sequence.duplicate_key
        alike = self._alike.setdefault(question, _Alike())
        alike.numbers[number] = None
        self._choose(alike, leaf)

    def remove(self, number: int) -> None:
        """Forgets a sequence; one of its duplicates is generated in its place."""
        leaf = self._leaves.pop(number)
        if leaf.node is not None:
            self._tree.remove(leaf)
        if (question := self._question.pop(number, None)) is None:
            return
        alike = self._alike[question]
        del alike.numbers[number]
        if not alike.numbers:
            del self._alike[question]
        elif alike.generated is leaf:
            self._choose(alike)

    def take(self, number: int) -> list[int]:
        """Takes out a sequence that is begun; gives its duplicates, which are out with it."""
        duplicates = self.duplicates_of(number)
        for duplicate in duplicates:
            self.remove(duplicate)
        self.remove(number)
        return duplicates

    def is_overdue(self, number: int) -> None:
        """Has a sequence go before the others of its priority from now on."""
        leaf = self._leaves[number]
        leaf.overdue = True
        if number in self._question:
            self._choose(self._alike[self._question[number]], leaf)
        if leaf.node is not None:
            self._tree.changed(leaf.node)

    def duplicates_of(self, number: int) -> list[int]:
        """Gives the sequences whose answer is bound to be that of this one, which is generated."""
        if number not in self._question or self._leaves[number].node is None:
            return []
        return [one for one in self._alike[self._question[number]].numbers if one != number]

    def _choose(self, alike: _Alike, urgent: Leaf | None = None) -> None:
        """Has the most urgent one generated, and no other; `urgent` came or has become so."""
        heap = alike.by_urgency
        if urgent is not None:
            heappush(heap, (urgent.urgency, urgent.number))
        while heap[0][1] not in alike.numbers:
            heappop(heap)
        chosen, before = self._leaves[heap[0][1]], alike.generated
        if chosen is not before:
            if before is not None and before.node is not None:
                self._tree.remove(before)
            self._tree.insert(chosen)
            alike.generated = chosen

    # The order: by urgency, depth first, long decodes first, like suffixes together.

    def order(self) -> list[PlannedBatch]:
        """Gives the prefill batches in the order of admission."""
        return sorted(self._depth_first(), key=lambda batch: batch.urgency)

    def prefixes(self) -> list[Node]:
        """Gives the prefixes, those below after those above."""
        return self._refreshed()[1:]

    @property
    def duplicates(self) -> dict[int, int]:
        """The sequences for which another is generated, and which."""
        return {
            duplicate: number for number in self._leaves for duplicate in self.duplicates_of(number)
        }

    @property
    def distinct_tokens(self) -> int:
        """Tokens of the prefix tree: each shared one once."""
        return self._tree.distinct_tokens

    def _refreshed(self) -> list[Node]:
        """Cuts anew what has changed; gives the root, which is no prefix, and the prefixes."""
        self._tree.refresh()
        for prefix in self._tree.regrouped:
            if prefix.prefix is prefix:
                self._groups[prefix] = self._group(prefix)
            else:
                self._groups.pop(prefix, None)
        self._tree.regrouped.clear()
        prefixes = [self._tree.root]
        for prefix in prefixes:
            prefixes += self._groups[prefix].below
        return prefixes

    def _group(self, prefix: Node) -> _Group:
        """Finds the sequences that start from a prefix, and cuts them into prefill batches."""
        group = _Group(prefix.key)
        own: list[Leaf] = []
        nodes = [prefix]
        for node in nodes:
            own += node.leaves()
            for child in node.children.values():
                (group.below if child.prefix is child else nodes).append(child)
        if own:
            own.sort(key=lambda leaf: leaf.number)
            decodes = [leaf.max_tokens for leaf in own]
            group.own = max(decodes), sum(decodes), -own[0].number
            group.batches = batches_of(
                prefix, own, batch_size=self._batch_size, max_padding=self._max_padding
            )
        return group

    def _depth_first(self) -> Iterator[PlannedBatch]:
        """Yields the batches of each prefix next to those of the prefixes below it.

        Siblings are a prefix's own sequences and the subtrees below it. The one that holds the
        longest decode goes first, then the one with more to decode: what starts last should not
        run on alone. Sequences of all priorities count, and one order serves them all.
        """
        groups = self._groups
        for prefix in reversed(self._refreshed()):
            group = groups[prefix]
            weights = [groups[below].subtree for below in group.below]
            if group.own is not None:
                weights.append(group.own)
            if weights:
                longest, total, first = zip(*weights, strict=True)
                group.subtree = max(longest), sum(total), max(first)
        walk: list[tuple[Node, tuple[Key, ...], bool]] = [(self._tree.root, (), True)]
        while walk:
            prefix, keys, subtree = walk.pop()
            group = groups[prefix]
            if not subtree:
                for urgency, leaves in group.batches:
                    yield PlannedBatch(keys, tuple(leaf.number for leaf in leaves), urgency)
                continue
            siblings = [
                (groups[below].subtree, below, (*keys, groups[below].key), True)
                for below in group.below
            ]
            if group.own is not None:
                siblings.append((group.own, prefix, keys, False))
            siblings.sort(key=lambda sibling: sibling[0])  # the heaviest is popped next
            walk += [sibling[1:] for sibling in siblings]
