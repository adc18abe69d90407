"""How much a step does: halved where the device has no room for it, and grown again later.

Three things shrink together, because nobody knows which of them was too much: the sequences that
decode, the prompt tokens that are prefilled in one forward pass, and the part of the KV budget that
is used.
"""

MIN_CHUNK = 64
"""Prompt tokens of the smallest pass: below, a pass takes hardly less memory."""

_CHUNKS_ALONE = 4
"""A pass beside which nothing decodes may be so many times as large."""

_PATIENCE = 64
"""Good steps after which more is tried again."""

_LONGEST_PATIENCE = 4096
_IMPATIENCE = 4
"""Where more was tried in vain, it is so many times longer until the next try."""


class StepSize:
    """What a step may do, at most `rows` sequences and a `chunk` of prompt tokens."""

    def __init__(self, rows: int, chunk: int) -> None:
        self.most_rows, self._most_chunk = rows, chunk
        self._rows, self._chunk, self._memory = rows, chunk, 1.0
        self._least_chunk = min(chunk, MIN_CHUNK)
        self._allowed = 1.0
        self._good_steps = 0
        self.has_worked = False
        """Whether a step went well since it was made smaller."""
        self._patience = _PATIENCE
        self._has_grown = False

    @property
    def rows(self) -> int:
        """Sequences that may decode together."""
        return max(1, min(int(self._allowed * self.most_rows), self._rows))

    @property
    def chunk(self) -> int:
        """Prompt tokens that one forward pass may prefill."""
        return self._chunk

    @property
    def chunk_alone(self) -> int:
        """Prompt tokens of a pass beside which nothing decodes."""
        return self._chunk if self._chunk < self._most_chunk else _CHUNKS_ALONE * self._chunk

    @property
    def memory(self) -> float:
        """The part of the KV budget that is used by sequences that could also wait."""
        return self._allowed * self._memory

    @property
    def full(self) -> bool:
        """Whether nothing is smaller than it was set."""
        most = (self.most_rows, self._most_chunk, 1.0)
        return (self._rows, self._chunk, self._memory) == most

    @property
    def smallest(self) -> bool:
        """Whether there is nothing left to make smaller."""
        return self._rows == 1 and self._chunk == self._least_chunk

    def allow(self, share: float) -> None:
        """Uses only a part (0 to 1) of the sequences and the memory, whatever else holds."""
        self._allowed = share

    def shrink(self, in_flight: int) -> bool:
        """Halves what was in flight when there was no room; says whether that makes a difference.

        One sequence alone, in the smallest pass, cannot be made smaller.
        """
        smaller = self._chunk > self._least_chunk or in_flight > 1
        if in_flight:
            self._rows = max(1, min(self.rows, in_flight) // 2)
        self.shrink_chunk()
        self._memory /= 2
        if self._has_grown:  # it was the last growth that was too much
            self._patience = min(_IMPATIENCE * self._patience, _LONGEST_PATIENCE)
            self._has_grown = False
        return smaller

    def shrink_chunk(self) -> None:
        """Halves the forward passes of prompts alone."""
        self._chunk = max(self._least_chunk, self._chunk // 2)
        self._good_steps, self.has_worked = 0, False

    def worked(self, *, has_room: bool) -> bool:
        """A step went well; returns whether, after many, the next ones may do twice as much."""
        self._good_steps += 1
        self.has_worked = True
        if self._good_steps < self._patience or not has_room:
            return False
        self._good_steps = 0
        if self.full:
            self._patience, self._has_grown = _PATIENCE, False
            return False
        self._rows = min(2 * self._rows, self.most_rows)
        self._chunk = min(2 * self._chunk, self._most_chunk)
        self._memory = min(2 * self._memory, 1.0)
        self._has_grown = True
        return True
