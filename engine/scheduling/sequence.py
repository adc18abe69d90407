"""Turns a task into sequences: one for each choice that is to be generated."""

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from mlx_rq.engine.interface import Steps, Task
from mlx_rq.engine.kv.prefix_cache import CachedPrefix
from mlx_rq.engine.kv.prefix_key import Key, key_of
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.prompts.render import render
from mlx_rq.engine.prompts.truncation import generated_from
from mlx_rq.engine.sampling.logprobs import PromptScore, TokenLogprobs
from mlx_rq.engine.sampling.params import SamplingParams, params_of
from mlx_rq.engine.sampling.sampler import SequenceSampler
from mlx_rq.engine.scheduling.state import State
from mlx_rq.engine.structured.constraint import Constraint
from mlx_rq.engine.structured.output_format import OutputFormat, OutputFormats, Reading
from mlx_rq.engine.text.detokenizer import SequenceText
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import Request


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


def sequences_of(
    task: Task, model: LoadedModel, output_formats: OutputFormats, *, now: float, adapter: int = 0
) -> list[TokenSequence]:
    """Renders a task's prompts and makes its sequences, in the order of the choices.

    They are computed with the `adapter` of this number. Raises RequestError where a prompt does not
    fit the context, or cannot be rendered, or the model cannot give the answer the form that is
    asked for.
    """
    request = generated_from(task.request, model, output_formats.model_format)
    params = params_of(request, model.vocab_size)
    prompts = render(request, model.tokenizer, model.vocab_size, output_formats.model_format)
    sequences = []
    for prompt_index, prompt in enumerate(prompts):
        budget = budget_of(request, len(prompt), model.context_length)
        output_format = output_formats.output_format_of(
            request, prompt, budget_field=task.request.budget_field
        )
        score, key = _score(request, model, prompt), key_of(prompt, adapter)
        for choice in range(request.generated):
            index = prompt_index * request.generated + choice
            sequence = _sequence(task, request, model, output_format, params, prompt, index, budget)
            sequence.prompt_index, sequence.score, sequence.since = prompt_index, score, now
            sequence.prompt_key, sequence.sampler.adapter = key, adapter
            sequences.append(sequence)
    return sequences


def steps_of(sequences: Sequence[TokenSequence], now: float) -> Steps:
    """Says how long before now a task's sequences took their steps: the first to take each."""
    moments = (
        [sequence.since for sequence in sequences],
        [one.admitted_at for one in sequences if one.admitted_at is not None],
        [one.first_token_at for one in sequences if one.first_token_at is not None],
    )
    rendered, admitted, first = (now - min(times) if times else None for times in moments)
    others = (one.first_with for one in sequences if one.first_with not in ("", one.task_id))
    return Steps(
        rendered,
        admitted,
        first,
        preempted=sum(one.preempted for one in sequences),
        failed=sum(one.failed for one in sequences),
        first_with=next(others, ""),
    )


def _score(request: Request, model: LoadedModel, prompt: list[int]) -> PromptScore | None:
    """What is to measure a prompt's own tokens; None where nobody asks."""
    top = request.prompt_logprobs
    return None if top is None else PromptScore(model.model, prompt, top)


def _sequence(
    task: Task,
    request: Request,
    model: LoadedModel,
    output_format: OutputFormat,
    params: SamplingParams,
    prompt: list[int],
    index: int,
    budget: int,
) -> TokenSequence:
    seed = f"{request.seed}/{index}" if request.seed is not None else os.urandom(16).hex()
    end_tokens = frozenset() if request.ignore_eos else model.eos_token_ids
    # Greedy sequences, and sequences of one seed, answer alike where all that shapes an answer is
    # alike.
    duplicate_key: Hashable | None = None
    if params.greedy or request.seed is not None:
        stream = None if params.greedy else seed
        duplicate_key = (
            *(type(request), params, stream, budget, request.stops, end_tokens, output_format.key),
            request.measured,
        )
    sampler = SequenceSampler(params, seed, prompt, model.eos_token_ids)
    sampler.top_logprobs = request.measured
    return TokenSequence(
        task_id=task.id,
        rank=task.rank,
        index=index,
        prompt=prompt,
        budget=budget,
        sampler=sampler,
        end_tokens=end_tokens,
        text=SequenceText(
            model.tokenizer,
            request.stops,
            prompt=() if request.in_turns else prompt,
            marks=output_format.shows_marks,
        ),
        output_format=output_format,
        duplicate_key=duplicate_key,
        finish_reason="length" if budget == 0 else None,
    )


def budget_of(request: Request, prompt_length: int, context_length: int) -> int:
    """Says how many tokens an answer may have; raises RequestError where they do not fit."""
    where = request.prompt_field
    if prompt_length >= context_length:
        raise RequestError(
            f"This model's maximum context length is {context_length} tokens. However, your "
            f"{where} resulted in {prompt_length} tokens. Please reduce the length of the {where}.",
            code="context_length_exceeded",
            param=where,
        )
    budget = request.budget
    if budget is None:
        return context_length - prompt_length
    if prompt_length + budget > context_length:
        raise RequestError(
            f"This model's maximum context length is {context_length} tokens. However, you "
            f"requested {prompt_length + budget} tokens ({prompt_length} in the {where}, {budget} "
            f"in the completion). Please reduce the length of the {where} or of the completion.",
            code="context_length_exceeded",
            param=where,
        )
    return budget
