"""Tries a sample of the jobs, with shared prefixes and without; says what to expect of all."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Task
from mlx_rq.engine.models.device import Device
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.jobs.openai.requests import Request
from mlx_rq.jobs.openai.words import counted
from mlx_rq.worker.cli.bench.report import JobsPerHour, Report, Run, Sample, Work
from mlx_rq.worker.cli.bench.work import Job

SHARED = "mlx-rq"
UNSHARED = "mlx-rq, each prompt by itself"

FEWEST_JOBS = 4
_MOST_BATCHES = 4
"""More jobs than that say little that is new."""

_NO_PREFIX = 2**31
"""No prompt is as long, so no prefix is ever kept."""


@dataclass(frozen=True)
class Chosen:
    """The jobs to try, none of which is answered by more tokens than `answer_limit`."""

    jobs: Sequence[Job]
    answer_limit: int

    @property
    def requests(self) -> list[Request]:
        """As they are run: seeded, so that each way draws the same answers."""
        limit = self.answer_limit
        return [_limited(job.request, limit, seed) for seed, job in enumerate(self.jobs)]

    @property
    def budgets(self) -> list[int]:
        return [request.budget or 0 for request in self.requests]


def choose(jobs: Sequence[Job], report: Report, *, answer_limit: int, seconds: float) -> Chosen:
    """Chooses as many jobs as can be tried twice in so many seconds, by the speeds in the report.

    None are chosen where not even a few can be.
    """
    rows = report.best_batch or 1
    prefill, decode = report.best_speed("prefill"), report.best_speed("decode")
    if not jobs or not prefill or not decode:
        return Chosen((), answer_limit)
    answers = fmean(min(job.request.budget or answer_limit, answer_limit) for job in jobs)
    each = fmean(job.tokens for job in jobs) / prefill + answers / decode
    count = min(len(jobs), _MOST_BATCHES * rows, int(seconds / 2 / each))
    if count < min(FEWEST_JOBS, len(jobs)):
        return Chosen((), answer_limit)
    places = sorted(random.Random(0).sample(range(len(jobs)), count))
    return Chosen([jobs[place] for place in places], answer_limit)


def run_sample(
    chosen: Chosen, report: Report, model: LoadedModel, device: Device, say: Callable[[str], None]
) -> None:
    """Runs the chosen jobs both ways, and puts that into the report."""
    runs: tuple[Run, ...] = ()
    for way in (UNSHARED, SHARED):
        say(f"{counted(len(chosen.jobs), 'job')}: {way}")
        run, cut = _run(chosen, report, model, device, way)
        runs = (run, *runs)
        report.sample = Sample(
            jobs=len(chosen.jobs),
            prompt_tokens=sum(job.tokens for job in chosen.jobs),
            answer_limit=chosen.answer_limit,
            answer_tokens=run.answer_tokens or 0,
            cut=cut,
            runs=runs,
        )
    if report.work is not None and report.sample is not None:
        report.jobs_per_hour = estimate(report.work, report.sample)


def _run(
    chosen: Chosen, report: Report, model: LoadedModel, device: Device, way: str
) -> tuple[Run, int]:
    """Generates all jobs with a new engine; gives what that took, and how many answers were cut."""
    options = EngineOptions(batch_size=report.best_batch or 1)
    if report.share_from is not None:
        options = replace(options, share_from=report.share_from)
    if way == UNSHARED:
        options = replace(options, min_prefix_tokens=_NO_PREFIX)
    engine = MLXEngine(model, options, device=device)
    try:
        tasks = [Task(str(number), request) for number, request in enumerate(chosen.requests)]
        started = time.perf_counter()
        ended = engine.add(tasks)
        while len(ended) < len(tasks):
            ended += engine.step()
        seconds, totals = time.perf_counter() - started, engine.totals
    finally:
        engine.close()
    choices = [choice for one in ended for choice in one.result.get("choices", ())]
    run = Run(
        way=way,
        seconds=seconds,
        computed_tokens=totals.prefilled_tokens,
        answer_tokens=totals.decoded_tokens,
        prefill_seconds=totals.prefill_seconds,
        decode_seconds=totals.decode_seconds,
    )
    return run, sum(choice["finish_reason"] == "length" for choice in choices)


def estimate(work: Work, sample: Sample) -> JobsPerHour | None:
    """Expects of all jobs the speeds and the answers of the sample, and the prompts of the plan."""
    runs = {run.way: run for run in sample.runs}
    if not {SHARED, UNSHARED} <= runs.keys():
        return None

    def rate(run: Run, tokens: int) -> float:
        prefill = run.prefill_seconds or 0.0
        a_token = prefill / max(1, run.computed_tokens or 0)
        each = a_token * tokens / work.jobs + (run.seconds - prefill) / sample.jobs
        return round(3600 / each, 1)

    return JobsPerHour(
        shared=rate(runs[SHARED], work.computed_tokens),
        unshared=rate(runs[UNSHARED], work.prompt_tokens),
    )


def _limited(request: Request, most: int, seed: int) -> Request:
    budget = most if request.budget is None else min(request.budget, most)
    changes = {request.budget_field: budget}
    if request.seed is None:
        changes["seed"] = seed
    limited: Request = request.model_copy(update=changes)
    return limited
