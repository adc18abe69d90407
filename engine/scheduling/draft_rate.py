"""Whether drafting is faster, as measured: a few stretches of each way, then the better one.

The worse one is tried again now and then: texts differ in how well they are drafted, and contexts
grow.
"""

_STRETCH = 16
"""Steps that are measured together: how much of a draft is accepted differs from step to step."""

_TRIALS = 2
"""Stretches of each way before one is chosen."""

_RETRY = 64
"""Stretches of the better way until the other one has a stretch again."""

_CLEARLY = 1.05
"""Another way is chosen where it is so many times as fast: measures are rough."""

_NEWS = 0.5
"""How much of a mean is the latest stretch."""


class DraftRate:
    """Learns what a token takes with drafts and without them. Knows no clock: it is told."""

    def __init__(self) -> None:
        self.drafts = False
        """Whether the next step is to be drafted."""
        self.chosen: bool | None = None
        """Whether drafts are used; None before each way had its trials."""
        self._seconds: dict[bool, float] = {}  # a token, by whether it was drafted
        self._stretches = {False: 0, True: 0}
        self._in_a_row = 0  # stretches of one way
        self._retries = False  # whether this stretch tries again what was measured long ago
        self._begin()

    def _begin(self) -> None:
        self._warm = False
        self._steps, self._took, self._tokens = 0, 0.0, 0

    @property
    def gain(self) -> float | None:
        """How many times as fast drafting is; None before both ways were measured."""
        return None if len(self._seconds) < 2 else self._seconds[False] / self._seconds[True]

    def interrupt(self) -> None:
        """Takes note that a step comes between that tells nothing."""
        self._warm = False

    def took(self, seconds: float, tokens: int) -> None:
        """Learns from a step of the way that it was to go.

        The first one of a stretch does not count: plain steps are launched one ahead, so it waits
        for what is not its own, or for nothing.
        """
        if not self._warm:
            self._warm = True
            return
        self._steps += 1
        self._took += seconds
        self._tokens += tokens
        if self._steps == _STRETCH:
            self._end_stretch()

    def _end_stretch(self) -> None:
        way, latest = self.drafts, max(self._took, 1e-9) / self._tokens
        before = latest if self._retries else self._seconds.get(way, latest)
        self._seconds[way] = (1 - _NEWS) * before + _NEWS * latest
        self._stretches[way] += 1
        self._in_a_row += 1
        self._choose()
        self._retries = self.chosen is way and self._in_a_row >= _RETRY
        self.drafts = not way if self.chosen is None or self._retries else self.chosen
        if self.drafts is not way:
            self._in_a_row = 0
        self._begin()

    def _choose(self) -> None:
        if self.gain is None or min(self._stretches.values()) < _TRIALS:
            return
        if self.chosen is None:
            self.chosen = self.gain > 1
        elif self.chosen and self.gain < 1 / _CLEARLY:
            self.chosen = False
        elif not self.chosen and self.gain > _CLEARLY:
            self.chosen = True
