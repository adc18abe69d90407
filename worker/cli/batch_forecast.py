"""What a batch would take, told before it runs: `mlx-rq batch --dry-run`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from statistics import fmean
from typing import Any

import click

from mlx_rq.jobs.batch.batch import BatchOptions
from mlx_rq.jobs.batch.check import checked
from mlx_rq.jobs.batch.lines import Source, read_request
from mlx_rq.jobs.openai.errors import RedisUnavailable, RequestError
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.requests import ANY_MODEL, Request, asked_model
from mlx_rq.jobs.openai.words import counted
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.workers import workers_for
from mlx_rq.worker.cli.batch_progress import duration
from mlx_rq.worker.cli.common import print_json
from mlx_rq.worker.cli.distinct_text import DistinctText
from mlx_rq.worker.cli.local_model import LocalModel, find_local_model

SAMPLE = 1000
"""Lines that are counted in tokens; the others are taken to be like them."""

_SHOWN = 3
"""Prompts and refusals that are told."""

_SHOWN_CHARACTERS = 500
"""Of a prompt's beginning, and of its end."""

_CHARACTERS_PER_TOKEN = 4

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Refusal:
    """Why a line would end with an error."""

    number: int
    code: str
    message: str


@dataclass(frozen=True)
class Forecast:
    """What is to be expected. `refused` are the first lines that would end with an error.

    Tokens are `counted`, or estimated from characters. `distinct_share` is the part of all prompt
    tokens that is left when every shared beginning is computed once; of more lines than are
    counted, it is that of their text. `answer_tokens` and `seconds` are None where no worker has
    shown its speed.
    """

    lines: int
    errors: dict[str, int]
    refused: list[Refusal]
    prompt_tokens: int
    distinct_share: float
    counted: bool
    answer_tokens: int | None
    seconds: float | None


def forecast(source: Source, options: BatchOptions, *, as_json: bool) -> int:
    """Prints the first prompts and refusals, the tokens, and the time expected.

    Raises RequestError where a run would, before it began. Returns the exit code that a run would
    have which answers all else: 1 where lines are refused.
    """
    lines, refusals, text = 0, _Refusals(), DistinctText()
    sample: list[_Sampled] = []
    for line in checked(source, skip_bad_lines=options.skip_bad_lines):
        lines += 1
        try:
            request = read_request(line)
        except RequestError as error:
            refusals.add(line.number, error)
            continue
        generated_from = request.generated_from()
        text.add(generated_from.plain_text)
        if len(sample) < SAMPLE:
            sample.append(_Sampled(line.number, request, generated_from))
    workers = _workers(sample, options.redis_url)
    model = _model(sample, workers)
    prompts = list(_prompts(sample, model, refusals))
    requests = [sampled.generated_from for sampled in sample if sampled.prompts]
    expected = _expect(lines, refusals, requests, prompts, model is not None, text, workers)
    if as_json:
        print_json(asdict(expected))
    else:
        for one in [one for one in sample if one.prompts][:_SHOWN]:
            click.echo(
                f"--- {source.unit} {one.number} ---\n{_cut(one.generated_from.plain_text)}\n"
            )
        _print(expected, source.unit)
    return 1 if refusals.codes else 0


@dataclass
class _Sampled:
    """A request that is looked at closely; `prompts` counts those that a worker would take."""

    number: int
    request: JobRequest
    generated_from: Request
    prompts: int = 0


class _Refusals:
    """Lines that would end with an error: how many of which, and why the first ones."""

    def __init__(self) -> None:
        self.codes: Counter[str] = Counter()
        self.first: list[Refusal] = []

    def add(self, number: int, error: RequestError) -> None:
        code = error.code or "invalid_request_error"
        self.codes[code] += 1
        if len(self.first) < _SHOWN:
            self.first.append(Refusal(number, code, str(error)))


def _cut(text: str) -> str:
    """Shows the beginning and the end of a prompt that is long."""
    if len(text) <= 2 * _SHOWN_CHARACTERS:
        return text
    left_out = len(text) - 2 * _SHOWN_CHARACTERS
    return f"{text[:_SHOWN_CHARACTERS]}\n[… {left_out:,} characters …]\n{text[-_SHOWN_CHARACTERS:]}"


def _workers(sample: Sequence[_Sampled], redis_url: str | None) -> list[dict[str, Any]]:
    """Finds the live workers that would take the first request; none where there is no Redis."""
    model = (
        asked_model(sample[0].request.model, sample[0].request.adapters) if sample else ANY_MODEL
    )
    connection = connect(redis_url)
    try:
        with reachable(connection):
            return workers_for(connection, model)
    except RedisUnavailable:
        return []


def _model(sample: Sequence[_Sampled], workers: Sequence[Mapping[str, Any]]) -> LocalModel | None:
    """Finds the model that would answer, if it lies on this machine.

    A worker that was given a folder serves it under its name and its path: this is where it lies.
    """
    asked = sample[0].generated_from.model if sample else ANY_MODEL
    names = [asked] if asked is not None else [ANY_MODEL]
    for worker in workers:
        known = [model["names"] for model in worker.get("models", ())]
        names += [*chain.from_iterable(one for one in known if names[0] in one), worker["model"]]
    named = (name for name in dict.fromkeys(names) if name != ANY_MODEL)
    return next(filter(None, map(find_local_model, named)), None)


def _prompts(
    sample: Sequence[_Sampled], model: LocalModel | None, refusals: _Refusals
) -> Iterator[Prompt]:
    """Yields the prompts of requests as tokens, or as text where there is no tokenizer."""
    for sampled in sample:
        prompts: Sequence[Prompt] = [sampled.generated_from.plain_text]
        if model is not None:
            try:
                prompts = model.prompts(sampled.request, sampled.generated_from)
            except RequestError as error:
                refusals.add(sampled.number, sampled.request.restated(error))
                continue
        sampled.prompts = len(prompts)
        yield from prompts


def _expect(
    lines: int,
    refusals: _Refusals,
    requests: Sequence[Request],
    prompts: Sequence[Prompt],
    counted: bool,
    text: DistinctText,
    workers: Sequence[Mapping[str, Any]],
) -> Forecast:
    length, distinct = count_distinct(prompts)
    per_token = 1 if counted else _CHARACTERS_PER_TOKEN
    runnable = lines - refusals.codes.total()
    prompt_tokens = round(length / per_token * runnable / max(1, len(requests)))
    share = distinct / length if length and runnable <= SAMPLE else text.share
    answer = _answer_tokens(requests, workers)
    return Forecast(
        lines=lines,
        errors=dict(refusals.codes.most_common()),
        refused=refusals.first,
        prompt_tokens=prompt_tokens,
        distinct_share=share,
        counted=counted,
        answer_tokens=None if answer is None else round(answer * runnable),
        seconds=_seconds(prompt_tokens * share, answer, runnable, workers),
    )


def count_distinct(prompts: Sequence[Prompt]) -> tuple[int, int]:
    """Counts all tokens (or characters), and those left when shared beginnings count once."""
    ordered: list[Any] = sorted(prompts)
    total = sum(map(len, ordered))
    shared = sum(_shared(*pair) for pair in pairwise(ordered))
    return total, total - shared


def _shared(one: Prompt, other: Prompt) -> int:
    """Counts what two prompts have in common before they part."""
    differ = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _answer_tokens(
    requests: Sequence[Request], workers: Sequence[Mapping[str, Any]]
) -> float | None:
    """Expects answers as long as the workers' were so far, within what the requests allow."""
    tasks = sum(worker["totals"]["tasks"] for worker in workers)
    if not tasks or not requests:
        return None
    usual = sum(worker["totals"]["decoded_tokens"] for worker in workers) / tasks
    return fmean(min(usual, request.budget or usual) for request in requests)


def _seconds(
    distinct_tokens: float,
    answer_tokens: float | None,
    runnable: int,
    workers: Sequence[Mapping[str, Any]],
) -> float | None:
    """Expects the speed that the workers had so far."""

    def speed(tokens: str, seconds: str) -> float:
        totals = [worker["totals"] for worker in workers if worker["totals"][seconds]]
        return float(sum(part[tokens] / part[seconds] for part in totals))

    prefill = speed("prefilled_tokens", "prefill_seconds")
    decode = speed("decoded_tokens", "decode_seconds")
    if answer_tokens is None or not prefill or not decode:
        return None
    return distinct_tokens / prefill + answer_tokens * runnable / decode


def _print(expected: Forecast, unit: str) -> None:
    for refusal in expected.refused:
        click.echo(f"{unit} {refusal.number}: {refusal.code}: {refusal.message}")
    refused = ", ".join(f"{count:,} {code}" for code, count in expected.errors.items())
    click.echo(
        f"{counted(expected.lines, unit)}{', would be refused: ' if refused else ''}{refused}"
    )
    how = "" if expected.counted else ", estimated from characters"
    click.echo(
        f"prompts: about {counted(expected.prompt_tokens, 'token')}{how}; "
        f"{expected.distinct_share:.0%} distinct, the rest is shared and computed once"
    )
    if expected.answer_tokens is None or expected.seconds is None:
        click.echo("time: unknown, no live worker has shown its speed on such jobs yet")
    else:
        click.echo(f"answers: about {expected.answer_tokens:,} tokens")
        click.echo(f"time: about {duration(expected.seconds)}")
