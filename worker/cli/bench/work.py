"""The jobs of a benchmark: those of a file, or made-up ones, and what the engine plans for them."""

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mlx_rq.engine.interface import Task
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.scheduling.choices import sequences_of
from mlx_rq.engine.scheduling.prefix_plan import Plan, depth_of, plan
from mlx_rq.engine.scheduling.scheduler import as_planned
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.structured.output_format import OutputFormats
from mlx_rq.jobs.batch.check import checked
from mlx_rq.jobs.batch.compression import open_input
from mlx_rq.jobs.batch.lines import BatchFile, read_request
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import CompletionRequest, Request
from mlx_rq.worker.cli.bench.report import SharedPrefix, Work

EXAMPLE = "made-up questions over four documents"
_EXAMPLE_DOCUMENTS = 4
_EXAMPLE_JOBS = 200
_EXAMPLE_WORDS = 200
_WORDS = (
    *("river", "stone", "lamp", "paper", "window", "garden", "letter", "market", "winter"),
    *("signal", "copper", "engine", "bridge", "island", "doctor", "mirror", "forest", "candle"),
)

MOST_JOBS = 10_000
"""That are planned; the beginning of a longer file stands for all of it."""

_PREFIXES = 3
_BEGINS_CHARACTERS = 60


@dataclass(frozen=True)
class Job:
    """A job that can be tried: what is generated for it, and its prompts."""

    request: Request
    prompts: Sequence[list[int]]

    @property
    def tokens(self) -> int:
        """Of all its prompts."""
        return sum(map(len, self.prompts))


def read_work(file: Path | None, model: LoadedModel) -> tuple[Work, list[Job]]:
    """Reads and plans the jobs of a file; made-up ones where there is none.

    Raises RequestError where none of its lines is a request that the model can answer.
    """
    requests = _example() if file is None else _requests(file)
    jobs: list[Job] = []
    sequences: list[TokenSequence] = []
    refused = 0
    first: RequestError | None = None
    with closing(OutputFormats(model)) as output_formats:
        for request in islice(requests, MOST_JOBS):
            try:
                if isinstance(request, RequestError):
                    raise request
                task = Task(str(len(jobs)), request)
                made = sequences_of(task, model, output_formats, now=0.0)
            except RequestError as error:
                refused, first = refused + 1, first or error
                continue
            sequences += made
            jobs.append(Job(request, _prompts(made)))
    if not jobs and first is not None:
        raise first
    planned = plan([as_planned(one) for one in sequences])
    work = Work(
        source=EXAMPLE if file is None else str(file),
        jobs=len(jobs),
        refused=refused,
        left_out=sum(1 for _ in requests),
        prompts=len(sequences),
        duplicates=len(planned.duplicates),
        prompt_tokens=planned.prompt_tokens,
        distinct_tokens=planned.distinct_tokens,
        computed_tokens=planned.prefilled_tokens,
        prefixes=tuple(_prefixes(planned, sequences, model)),
    )
    return work, jobs


def _requests(file: Path) -> Iterator[Request | RequestError]:
    """Yields what is generated for each line, or why nothing is."""
    source = BatchFile(file, str(file), {}, open_input)
    for line in checked(source, skip_bad_lines=True):
        try:
            yield read_request(line).generated_from()
        except RequestError as error:
            yield error


def _example() -> Iterator[Request]:
    """Yields questions over a few documents, in no order."""
    dice = random.Random(1)

    def words(count: int) -> str:
        return " ".join(dice.choice(_WORDS) for _ in range(count))

    documents = [words(_EXAMPLE_WORDS) for _ in range(_EXAMPLE_DOCUMENTS)]
    for _ in range(_EXAMPLE_JOBS):
        prompt = f"{dice.choice(documents)}\nQuestion: {words(8)}?\nAnswer:"
        yield CompletionRequest(prompt=prompt, max_tokens=32, temperature=0, ignore_eos=True)


def _prompts(sequences: Sequence[TokenSequence]) -> list[list[int]]:
    """Gives each prompt of a job once, whatever the number of choices."""
    return list({one.prompt_index: one.prompt for one in sequences}.values())


def _prefixes(
    planned: Plan, sequences: Sequence[TokenSequence], model: LoadedModel
) -> list[SharedPrefix]:
    """Gives the prefixes that save most."""
    prefixes = []
    for prefix in planned.prefixes:
        parent = depth_of(planned.prefixes, prefix.parent)
        tokens = sequences[prefix.sequence].tokens[parent : prefix.depth]
        begins = model.tokenizer.decode(tokens[:_BEGINS_CHARACTERS])[:_BEGINS_CHARACTERS]
        prefixes.append(SharedPrefix(len(tokens), prefix.sequences_below, begins))
    prefixes.sort(key=lambda prefix: prefix.saved_tokens, reverse=True)
    return prefixes[:_PREFIXES]
