"""Turns a task into sequences: one for each choice that is to be generated."""

import os
from collections.abc import Hashable, Sequence

from mlx_rq.engine.interface import Steps, Task
from mlx_rq.engine.kv.prefix_key import key_of
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.prompts.render import render
from mlx_rq.engine.prompts.truncation import generated_from
from mlx_rq.engine.sampling.logprobs import PromptScore
from mlx_rq.engine.sampling.params import SamplingParams, params_of
from mlx_rq.engine.sampling.sampler import SequenceSampler
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.structured.output_format import OutputFormat, OutputFormats
from mlx_rq.engine.text.detokenizer import SequenceText
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import Request


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
            sequence.others_follow = task.others_follow
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
