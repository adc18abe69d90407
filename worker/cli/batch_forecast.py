"""What a batch would take, told before it runs: `mlx-rq batch --dry-run`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import click

from mlx_rq.jobs.batch.lines import Source, read_request
from mlx_rq.jobs.openai.errors import RedisUnavailable, RequestError
from mlx_rq.jobs.openai.requests import ANY_MODEL, Request
from mlx_rq.jobs.queue.connection import connect, reachable
from mlx_rq.jobs.queue.workers import workers_for
from mlx_rq.worker.cli.batch_progress import duration
from mlx_rq.worker.cli.common import print_json
from mlx_rq.worker.cli.distinct_text import DistinctText

SAMPLE = 1000
"""Lines that are counted in tokens; the others are taken to be like them."""

_SHOWN_PROMPTS = 3
_CHARACTERS_PER_TOKEN = 4

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Forecast:
    """What is to be expected. Tokens are `counted`, or estimated from characters.

    `distinct_share` is the part of all prompt tokens that is left when every shared beginning is
    computed once; of more lines than are counted, it is that of their text. `answer_tokens` and
    `seconds` are None where no worker has shown its speed.
    """

    lines: int
    errors: dict[str, int]
    prompt_tokens: int
    distinct_share: float
    counted: bool
    answer_tokens: int | None
    seconds: float | None


def forecast(source: Source, *, redis_url: str | None, as_json: bool) -> None:
    """Prints the first prompts, the tokens, the share that is distinct, and the time expected."""
    requests: list[Request] = []
    numbers: list[int] = []
    errors: Counter[str] = Counter()
    text = DistinctText()
    lines = 0
    for line in source:
        lines += 1
        try:
            request = read_request(line)
        except RequestError as error:
            errors[error.code or "invalid_request_error"] += 1
            continue
        generated_from = request.generated_from()
        text.add(generated_from.plain_text)
        if len(requests) < SAMPLE:
            requests.append(generated_from)
            numbers.append(line.number)
    workers = _workers(requests, redis_url)
    expected = _expect(lines, dict(errors.most_common()), requests, text, workers)
    if as_json:
        print_json(asdict(expected))
        return
    for number, request in zip(numbers[:_SHOWN_PROMPTS], requests, strict=False):
        click.echo(f"--- {source.unit} {number} ---\n{request.plain_text}\n")
    _print(expected, source.unit)


def _workers(requests: Sequence[Request], redis_url: str | None) -> list[dict[str, Any]]:
    """Finds the live workers that would take the first request; none where there is no Redis."""
    model = (requests[0].model if requests else None) or ANY_MODEL
    connection = connect(redis_url)
    try:
        with reachable(connection):
            return workers_for(connection, model)
    except RedisUnavailable:
        return []


def _expect(
    lines: int,
    errors: dict[str, int],
    requests: Sequence[Request],
    text: DistinctText,
    workers: Sequence[Mapping[str, Any]],
) -> Forecast:
    models = [request.model for request in requests[:1] if request.model not in (None, ANY_MODEL)]
    models += [worker["model"] for worker in workers]
    tokenizer = _tokenizer(models[0]) if models else None
    prompts = [prompt for request in requests for prompt in _prompts(request, tokenizer)]
    per_token = 1 if tokenizer is not None else _CHARACTERS_PER_TOKEN
    length, distinct = count_distinct(prompts)
    runnable = lines - sum(errors.values())
    prompt_tokens = round(length / per_token * runnable / max(1, len(requests)))
    share = distinct / length if length and runnable <= SAMPLE else text.share
    answer = _answer_tokens(requests, workers)
    return Forecast(
        lines=lines,
        errors=errors,
        prompt_tokens=prompt_tokens,
        distinct_share=share,
        counted=tokenizer is not None,
        answer_tokens=None if answer is None else round(answer * runnable),
        seconds=_seconds(prompt_tokens * share, answer, runnable, workers),
    )


def _tokenizer(model: str) -> Any:
    """Loads the tokenizer of a model that lies on this machine; None without it or the engine."""
    try:
        from huggingface_hub import snapshot_download
        from mlx_lm.utils import load_tokenizer

        from mlx_rq.engine.models.load import KNOWN_MODELS, find_pulled
    except ModuleNotFoundError:
        return None
    try:
        path = find_pulled(model) if model in KNOWN_MODELS else Path(model)
        if path is not None and not path.is_dir():
            path = Path(snapshot_download(model, local_files_only=True))
        return None if path is None else load_tokenizer(path)
    except (OSError, ValueError):  # not here, or not a model; the hub's errors are among these
        return None


def _prompts(request: Request, tokenizer: Any) -> Sequence[Prompt]:
    """Gives the prompts of a request as tokens, or without a tokenizer as text."""
    if tokenizer is None:
        return [request.plain_text]
    from mlx_rq.engine.formats.model_format import model_format_of
    from mlx_rq.engine.prompts.render import render

    try:
        # All of its tokens: `vocab_size` leaves out those that templates write.
        return render(request, tokenizer, len(tokenizer), model_format_of(tokenizer))
    except RequestError:
        return []  # the worker will say so


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
    refused = ", ".join(f"{count:,} {code}" for code, count in expected.errors.items())
    click.echo(f"{expected.lines:,} {unit}s{', would be refused: ' if refused else ''}{refused}")
    how = "" if expected.counted else ", estimated from characters"
    click.echo(
        f"prompts: about {expected.prompt_tokens:,} tokens{how}; {expected.distinct_share:.0%} "
        "distinct, the rest is shared and computed once"
    )
    if expected.answer_tokens is None or expected.seconds is None:
        click.echo("time: unknown, no live worker has shown its speed on such jobs yet")
    else:
        click.echo(f"answers: about {expected.answer_tokens:,} tokens")
        click.echo(f"time: about {duration(expected.seconds)}")
