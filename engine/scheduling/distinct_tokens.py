"""Counts the distinct tokens of all prompts ever seen: the nodes of their prefix tree.

A token is the same as another only where all before it are the same, too, so a node is named by a
hash of the tokens up to it. Up to `EXACT` nodes their hashes are kept and the count is exact; from
there on a sketch goes on, whose memory stays as it is however much work comes: HyperLogLog
(Flajolet, Fusy, Gandouet, Meunier, 2007) with 2^16 registers, a standard error of 0.4 %.
"""

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

EXACT = 2**20
"""Nodes up to which the count is exact: 8 MB of hashes."""

_REGISTER_BITS = 16
_REGISTERS = 2**_REGISTER_BITS
_ALPHA = 0.7213 / (1 + 1.079 / _REGISTERS)
_GATHERED = 2**16
"""Hashes that are gathered, at least, before they are sorted in among the known ones."""

Hashes = NDArray[np.uint64]


class DistinctTokens:
    """How many distinct tokens the prompts have that were added."""

    def __init__(self, exact: int = EXACT) -> None:
        self._exact = exact
        self.of = ""
        """What the model is adapted to: the same tokens are others for each adapter."""
        self._known: Hashes = np.zeros(0, np.uint64)
        self._new: list[Hashes] = []
        self._gathered = 0
        self._registers: NDArray[np.uint8] | None = None  # once there are too many to be kept

    def add(self, prompt: Sequence[int]) -> None:
        """Takes a prompt's token ids in, or the numbers of its key."""
        if not prompt:
            return
        self._new.append(_hashes(prompt, zlib.crc32(self.of.encode())))
        self._gathered += len(prompt)
        # More, where more are known: sorting them all again for a few would cost too much.
        if self._gathered >= max(_GATHERED, len(self._known) // 8):
            self._merge()

    @property
    def count(self) -> int:
        """Distinct tokens so far: exact up to `EXACT`, then an estimate.

        Asked for after every few answers, so the known hashes are only searched, not sorted again.
        """
        if self._registers is None:
            unknown = self._unknown()
            if len(self._known) + len(unknown) <= self._exact:
                return len(self._known) + len(unknown)
        self._merge()
        if self._registers is None:
            return len(self._known)
        # With this many registers the small-range correction is for counts that are kept exactly.
        inverse = np.sum(np.exp2(-self._registers.astype(np.float64)))
        return int(_ALPHA * _REGISTERS**2 / float(inverse) + 0.5)

    def _unknown(self) -> Hashes:
        """Gives the gathered hashes that are not known yet, each once."""
        if not self._new:
            return np.zeros(0, np.uint64)
        gathered = np.unique(np.concatenate(self._new))
        self._new, self._gathered = [gathered], len(gathered)
        if not len(self._known):
            return gathered
        places = np.minimum(np.searchsorted(self._known, gathered), len(self._known) - 1)
        unknown: Hashes = gathered[self._known[places] != gathered]
        return unknown

    def _merge(self) -> None:
        if not self._new:
            return
        hashes = np.concatenate(self._new)
        self._new, self._gathered = [], 0
        if self._registers is None:
            self._known = np.union1d(self._known, hashes)
            if len(self._known) <= self._exact:
                return
            self._registers = np.zeros(_REGISTERS, np.uint8)
            hashes, self._known = self._known, np.zeros(0, np.uint64)
        _update(self._registers, hashes)


def _update(registers: NDArray[np.uint8], hashes: Hashes) -> None:
    """Raises each hash's register to the place of the first 1 among the hash's other bits."""
    index = (hashes >> np.uint64(64 - _REGISTER_BITS)).astype(np.intp)
    # A double has the exponent of the highest bit; the bits below 2^48 are exact in it.
    rest = (hashes & np.uint64(2 ** (64 - _REGISTER_BITS) - 1)).astype(np.float64)
    _, exponent = np.frexp(rest)
    place = (64 - _REGISTER_BITS + 1 - exponent).astype(np.uint8)
    np.maximum.at(registers, index, place)


def _hashes(prompt: Sequence[int], root: int) -> Hashes:
    """Hashes each beginning of a prompt, the shortest first; those of each root are others."""
    tokens = _mixed(np.asarray(prompt, np.uint64))
    places = _mixed(np.arange(1, len(prompt) + 1, dtype=np.uint64)) | np.uint64(1)
    return _mixed(np.cumsum(tokens * places, dtype=np.uint64) + np.uint64(root << 32))


def _mixed(values: Hashes) -> Hashes:
    """Mixes the bits of each value (the finalizer of SplitMix64; Steele, Lea, Flood, 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
