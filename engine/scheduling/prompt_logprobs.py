"""Goes through prompts whose own logprobs are asked for, a chunk at a time beside other work."""

from collections import deque
from collections.abc import Iterable, Iterator

from mlx_rq.engine.kv.adapter_rows import adapter_rows
from mlx_rq.engine.scheduling.sequence import TokenSequence


class PromptLogprobs:
    """The sequences whose prompts are to be scored, and those that generate nothing at all."""

    def __init__(self) -> None:
        self._sequences: deque[TokenSequence] = deque()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[TokenSequence]:
        return iter(self._sequences)

    @property
    def head(self) -> TokenSequence | None:
        """The sequence that `advance` works on."""
        return self._sequences[0] if self._sequences else None

    def add(self, sequences: Iterable[TokenSequence]) -> None:
        """Takes in those sequences for which there is something to do here."""
        self._sequences.extend(
            sequence for sequence in sequences if sequence.score is not None or sequence.budget == 0
        )

    def remove(self, sequences: Iterable[TokenSequence]) -> None:
        """Forgets sequences."""
        gone = set(sequences)
        self._sequences = deque(sequence for sequence in self._sequences if sequence not in gone)

    def advance(self, tokens: int) -> int:
        """Scores up to so many tokens of the head's prompt; returns how many that was."""
        sequence = self._sequences[0]
        score = sequence.score
        with adapter_rows([sequence.sampler.adapter]):
            scored = 0 if score is None or score.done else score.advance(tokens)
        if score is None or score.done:
            self._sequences.popleft()
        return scored
