"""One choice of one task: what the engine knows of a sequence, from its prompt to its answer."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from mlx_rq.engine.kv.cached_prefix import CachedPrefix
from mlx_rq.engine.kv.prefix_key import Key, key_of
from mlx_rq.engine.sampling.logprobs import PromptScore, TokenLogprobs
from mlx_rq.engine.sampling.sampler import SequenceSampler
from mlx_rq.engine.scheduling.state import State
from mlx_rq.engine.structured.constraint import Constraint
from mlx_rq.engine.structured.output_format import OutputFormat, Reading
from mlx_rq.engine.text.detokenizer import SequenceText


@dataclass(eq=False, slots=True, weakref_slot=True)
class TokenSequence:
    """One choice of one task: its prompt, how it chooses, what it has generated.

    What it says it writes itself; where it stands (`state`, `depth`, `shared`, `cached_tokens`,
    `duplicates`) is written by `SequenceTable` alone.
    """

    task_id: str
    rank: int
    index: int
    prompt: list[int]
    budget: int
    sampler: SequenceSampler
    end_tokens: frozenset[int]
    text: SequenceText
    output_format: OutputFormat
    duplicate_key: Hashable | None
    state: State = State.COMPILING
    prompt_index: int = 0
    cached_tokens: int = 0
    given: int = 0
    """Tokens of its answer that its grammar decided; they are prefilled with the prompt."""
    depth: int = 0
    """Tokens of the prefix that it stands on."""
    shared: CachedPrefix | None = None
    """The prefix whose KV it refers to; what it holds none of itself."""
    finish_reason: str | None = None
    score: PromptScore | None = None
    """The logprobs of the prompt itself, where they are to be echoed; its choices share it."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each token of the text, for sequences that ask."""
    prompt_key: Key = b""
    """The prompt as a key. Made once: plan after plan asks for it."""
    others_follow: bool = False
    """Whether others are to come that begin like it."""
    since: float = 0.0
    """When it came in (seconds of the engine's clock)."""
    admitted_at: float | None = None
    """When it first came into the batch."""
    first_token_at: float | None = None
    preempted: int = 0
    """How often it went back to wait, from the batch, because others needed its room."""
    failed: int = 0
    """How often it did because the device failed."""
    first_with: str = ""
    """The task for which the prefix was computed that it came in with, where that is another."""
    duplicates: "list[TokenSequence]" = field(default_factory=list)
    """While it runs: the sequences whose answer is its own, since they ask the very same."""

    @property
    def constraint(self) -> Constraint | None:
        """What keeps the sequence to its form, from `start` on."""
        return self.sampler.constraint

    def start(self) -> None:
        """Gives the sequence its constraint; waits where the grammar is not compiled yet.

        It has said then what every answer begins with, unless somebody asks how likely that was.
        Raises RequestError where it cannot be compiled.
        """
        self._constrain()
        if self.constraint is None or self.sampler.top_logprobs is not None:
            return
        for token in self.constraint.beginning[: self.budget - 1]:
            self.constraint.accept(token)
            if self.text.add(token):
                break  # at a stop string
        self.given = len(self.text.tokens)
        self.sampler.rewind(self.text.tokens)

    def _constrain(self) -> None:
        self.sampler.constraint = self.output_format.start(self.budget)

    def rewind(self) -> None:
        """Goes back to what it has said: it is prefilled again from there.

        Where the device failed, its constraint may have taken in tokens that were never handed out.
        """
        said = self.text.tokens
        self.sampler.rewind(said)
        if self.constraint is not None and self.constraint.taken > len(said):
            self._constrain()
            for token in said:
                self.constraint.accept(token)

    def add(self, token: int, logprobs: TokenLogprobs | None, reason: str | None) -> bool:
        """Takes in a decoded token; returns whether the answer ends with it.

        `reason` is why the generator ends with it, if it does. Else a stop string may end the
        answer, or a constraint that is fulfilled.
        """
        self.finish_reason = reason
        # A stop token is not part of the text; the last token of a spent budget is.
        if reason != "stop":
            if logprobs is not None:
                self.logprobs.append(logprobs)
            stopped = self.text.add(token)
            if stopped and self.constraint is not None:
                self._cut(self.constraint)
            if stopped or (self.constraint is not None and self.constraint.done):
                self.finish_reason = "stop"
        return self.finish_reason is not None

    def _cut(self, constraint: Constraint) -> None:
        """Has its constraint judge the text up to the stop; with it, where it is whole only so."""
        without, through = (self.text.up_to_stop(with_it=with_it) for with_it in (False, True))
        for cut in (without, through, without):
            constraint.cut_to(*cut)
            if constraint.complete:
                break

    def answer_as(self, other: "TokenSequence") -> None:
        """Takes another sequence's answer for this sequence's: nothing was computed for it."""
        self.text, self.finish_reason = other.text, other.finish_reason
        self.logprobs = other.logprobs
        self.admitted_at, self.first_token_at = other.admitted_at, other.first_token_at
        self.sampler.constraint = other.constraint
        self.cached_tokens, self.first_with = len(self.prompt), other.task_id

    def read(self) -> Reading:
        """Takes the finished text apart and validates it; raises InvalidAnswer."""
        text, reason = self.text.finish(), self.finish_reason or "stop"
        return self.output_format.read(text, reason, self.constraint, self.budget)

    @property
    def begun(self) -> bool:
        """Whether it has generated anything."""
        return len(self.text.tokens) > self.given

    @property
    def beginning(self) -> Key:
        """What it generates from: the prompt, and what its grammar decided of the answer."""
        given = self.text.tokens[: self.given]
        return self.prompt_key + key_of(given, self.sampler.adapter) if given else self.prompt_key

    @property
    def tokens(self) -> list[int]:
        """What must be prefilled: the prompt, and what it has said before it is in the batch."""
        return [*self.prompt, *self.text.tokens] if self.text.tokens else self.prompt

    def tokens_from(self, place: int) -> list[int]:
        """The same, without what lies before a place."""
        said = self.text.tokens[max(0, place - len(self.prompt)) :]
        return [*self.prompt[place:], *said]

    @property
    def length(self) -> int:
        """How many these are."""
        return len(self.prompt) + len(self.text.tokens)

    @property
    def key(self) -> Key:
        """The same as a key."""
        said = self.text.tokens
        return self.prompt_key + key_of(said, self.sampler.adapter) if said else self.prompt_key

    @property
    def echoed(self) -> str:
        """The text of the prompt, as it was sent, that the answer begins with."""
        sent = self.output_format.request.echoed(self.prompt_index)
        return sent if isinstance(sent, str) else self.text.decode(sent)

    @property
    def complete(self) -> bool:
        """Whether there is nothing more to compute for it, its prompt's logprobs included."""
        return self.state is State.DONE and (self.score is None or self.score.done)

    @property
    def shared_tokens(self) -> int:
        """Tokens whose KV it refers to."""
        return 0 if self.shared is None else self.shared.depth

    @property
    def remaining(self) -> int:
        """Tokens that it may still generate."""
        return self.budget - len(self.text.tokens)
