"""The command `demo`: the whole way of a few jobs, on real parts, in one terminal."""

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from mlx_rq.jobs.client.job import Job, as_completed
from mlx_rq.jobs.client.submit import submit_many
from mlx_rq.jobs.openai.errors import ResultTimeout
from mlx_rq.jobs.queue.connection import connect, without_password
from mlx_rq.jobs.queue.workers import live_workers
from mlx_rq.worker.cli.model import ensure_model
from mlx_rq.worker.cli.models import MODEL_OPTIONS, asked_models, models_needed
from mlx_rq.worker.cli.processes import child_process
from mlx_rq.worker.cli.signals import stopped_by_signals
from mlx_rq.worker.cli.valkey import embedded_valkey
from mlx_rq.worker.cli.worker_options import worker_options

DEMO_SYSTEM = (
    "You are a helpful assistant. You answer every question truthfully, in one short and plain "
    "sentence. You do not add lists, examples or explanations that nobody asked for."
)
DEMO_QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "Who wrote Hamlet?",
    "How many legs does a spider have?",
    "What do bees make?",
    "Which planet is the largest?",
    "What is water made of?",
    "Where do penguins live?",
)


@click.command()
@worker_options
def demo(**options: Any) -> None:
    """Show the whole way: a queue, a worker, questions, answers. Leaves nothing behind."""
    asked = asked_models(**{name: options[name] for name in MODEL_OPTIONS})
    for name in models_needed(asked):
        ensure_model(name)
    with (
        stopped_by_signals(),
        tempfile.TemporaryDirectory(prefix="mlx-rq-demo-") as folder,
        embedded_valkey(Path(folder), port=None) as url,
        # Nobody waits for what is unfinished at the end: its queue goes, too.
        child_process("worker", url, {**options, "grace": 0.0}, log_level="warning") as process,
    ):
        jobs = {
            job: question
            for question, job in zip(
                DEMO_QUESTIONS,
                submit_many(map(_demo_body, DEMO_QUESTIONS), redis_url=url),
                strict=True,
            )
        }
        click.echo(
            f"{len(jobs)} jobs submitted to {without_password(url)}; "
            f"a worker is loading {asked[0].model}\n"
        )
        for job in _while_alive(process, jobs):
            response = job.result()
            click.secho(jobs[job], bold=True)
            click.echo(f"  {response['choices'][0]['message']['content'].strip()}\n")
        (record,) = live_workers(connect(url))
        prompt, computed = (record["totals"][k] for k in ("prompt_tokens", "prefilled_tokens"))
        click.echo(
            f"{len(jobs)} answers. Their prompts have {prompt:,} tokens; {computed:,} of them were "
            "computed, since what they share was computed once."
        )


def _demo_body(question: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": DEMO_SYSTEM}, {"role": "user", "content": question}]
    return {"messages": messages, "max_completion_tokens": 40, "temperature": 0}


def _while_alive(process: subprocess.Popen[bytes], jobs: Iterable[Job]) -> Iterator[Job]:
    """Yields jobs as they end; raises where the worker died before."""
    waiting = set(jobs)
    while waiting:
        try:
            for job in as_completed(waiting, timeout=2.0):
                waiting.discard(job)
                yield job
        except ResultTimeout:
            if process.poll() is not None:
                raise click.ClickException(
                    f"the worker ended with code {process.returncode}"
                ) from None


COMMANDS = (demo,)
