"""How much is computed twice: prompt tokens, positions and time, beside mlx-lm's own ways.

    LD_PRELOAD=…/libopenblas.so.0 python bench/prefix.py [--work prefixes tree dataset none …]
        [--jobs 64] [--prefix-tokens 1000] [--peers batch server] [--json] [--plot FILE]

Peers, in the same run with the same model: `mlx_lm.batch_generate`, and `mlx_lm.server` with all
requests sent at once. Prints ratios only; absolute times depend on the machine. On Linux the
wheel's own BLAS is slow: preload OpenBLAS, or the peers take an hour.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Task
from mlx_rq.engine.models.load import LoadedModel, load
from mlx_rq.engine.models.pull import pull
from mlx_rq.engine.options import EngineOptions
from mlx_rq.jobs.openai.requests import CompletionRequest
from mlx_rq.worker.cli.bench.peers import Prompt, run_batch_generate, run_server

SEQUENCES = 16
WORDS = [
    "river",
    "stone",
    "lamp",
    "paper",
    "window",
    "garden",
    "letter",
    "market",
    "winter",
    "signal",
    "copper",
    "engine",
    "bridge",
    "island",
    "doctor",
    "mirror",
    "forest",
    "candle",
    "pocket",
    "ladder",
    "thunder",
    "violin",
    "harbor",
    "meadow",
    "castle",
    "needle",
    "orange",
    "pepper",
    "rocket",
    "silver",
    "tunnel",
    "valley",
]


@dataclass(frozen=True)
class Work:
    """Prompts and how long each answer may be."""

    prompts: list[str]
    max_tokens: int


def _text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(WORDS) for _ in range(words))


def prefixes(jobs: int, tokens: int) -> Work:
    """Short questions over four long documents."""
    dice = random.Random(1)
    documents = [_text(dice, tokens) for _ in range(4)]
    prompts = [f"{documents[i % 4]}\nQ{_text(dice, 8)}?" for i in range(jobs)]
    dice.shuffle(prompts)
    return Work(prompts, 16)


def tree(jobs: int, tokens: int) -> Work:
    """Three levels: one system text, four documents, three sections of each, a question."""
    dice = random.Random(2)
    system = _text(dice, tokens // 3)
    documents = [_text(dice, tokens // 3) for _ in range(4)]
    sections = [[_text(dice, tokens // 3) for _ in range(3)] for _ in documents]
    prompts = []
    for _ in range(jobs):
        document = dice.randrange(4)
        parts = [system, documents[document], sections[document][dice.randrange(3)], _text(dice, 8)]
        prompts.append("\n".join(parts))
    return Work(prompts, 16)


def dataset(jobs: int, tokens: int) -> Work:
    """A template, five blocks of examples, and a row of data each."""
    dice = random.Random(3)
    template = _text(dice, tokens // 4)
    examples = [_text(dice, tokens // 4) for _ in range(5)]
    prompts = [
        f"{template}\n{dice.choice(examples)}\nRow: {_text(dice, dice.randrange(10, 30))}\n"
        for _ in range(3 * jobs)
    ]
    return Work(prompts, 8)


def none(jobs: int, tokens: int) -> Work:
    """Nothing in common."""
    dice = random.Random(4)
    prompts = [_text(dice, dice.randrange(tokens // 20, tokens // 5)) for _ in range(jobs)]
    return Work(prompts, 16)


def long(jobs: int, tokens: int) -> Work:
    """One long sequence among short ones."""
    dice = random.Random(5)
    prompts = [_text(dice, dice.randrange(40, 60)) for _ in range(max(8, jobs // 4) - 1)]
    prompts.insert(3, _text(dice, 2 * tokens))
    return Work(prompts, 16)


WORKS: dict[str, Callable[[int, int], Work]] = {
    "prefixes": prefixes,
    "tree": tree,
    "dataset": dataset,
    "none": none,
    "long": long,
}


@dataclass
class Figures:
    """What one kind of work came to. Ratios; `vs_…` says how many times as fast as a peer."""

    work: str
    jobs: int
    prompt_per_distinct: float
    prefilled_per_distinct: float
    positions_per_distinct: float
    peak_kv_per_least: float
    vs_batch_generate: float | None = None
    vs_server: float | None = None
    same_text_as_batch_generate: float | None = None


def run_ours(model: LoadedModel, work: Work) -> tuple[float, list[str], Figures]:
    """Generates with the engine; gives seconds, texts and figures."""
    engine = MLXEngine(model, EngineOptions(batch_size=SEQUENCES))
    tasks = [
        Task(str(i), CompletionRequest(prompt=p, max_tokens=work.max_tokens, temperature=0))
        for i, p in enumerate(work.prompts)
    ]
    texts: dict[str, str] = {}
    peak, least = 0, 1
    started = time.perf_counter()
    engine.add(tasks)
    while len(texts) < len(tasks):
        for outcome in engine.step():
            texts[outcome.id] = outcome.result["choices"][0]["text"]
        used, needed = engine.kv_in_use()
        peak, least = max(peak, used), max(least, needed)
    seconds = time.perf_counter() - started
    totals = engine.totals
    distinct = totals.distinct_tokens
    figures = Figures(
        work="",
        jobs=len(tasks),
        prompt_per_distinct=totals.prompt_tokens / distinct,
        prefilled_per_distinct=totals.prefilled_tokens / distinct,
        positions_per_distinct=totals.positions_computed / distinct,
        peak_kv_per_least=peak / least,
    )
    print(f"  {json.dumps(asdict(totals))}", file=sys.stderr)
    return seconds, [texts[str(i)] for i in range(len(tasks))], figures


def measure(name: str, arguments: argparse.Namespace, folder: Path, model: LoadedModel) -> Figures:
    work = WORKS[name](arguments.jobs, arguments.prefix_tokens)
    print(f"{name}: {len(work.prompts)} jobs", file=sys.stderr)
    seconds, texts, figures = run_ours(model, work)
    figures.work = name
    prompts = [Prompt(prompt, work.max_tokens) for prompt in work.prompts]
    if "batch" in arguments.peers:
        peer_seconds, peer_texts = run_batch_generate(model, prompts, rows=SEQUENCES)
        figures.vs_batch_generate = peer_seconds / seconds
        same = sum(ours == theirs for ours, theirs in zip(texts, peer_texts, strict=True))
        figures.same_text_as_batch_generate = same / len(texts)
        print(f"  {figures.vs_batch_generate:.2f} x batch_generate", file=sys.stderr)
    if "server" in arguments.peers:
        figures.vs_server = run_server(folder, prompts, rows=SEQUENCES) / seconds
        print(f"  {figures.vs_server:.2f} x mlx_lm.server", file=sys.stderr)
    return figures


def show(figures: Sequence[Figures]) -> None:
    columns = [asdict(one) for one in figures]
    for name in columns[0]:
        cells = (column[name] for column in columns)
        print(
            f"{name:28}"
            + "".join(
                f"{cell:>10.2f}" if isinstance(cell, float) else f"{cell!s:>10}" for cell in cells
            )
        )


def plot(figures: Sequence[Figures], file: str) -> None:
    """Draws what is computed for each distinct token, and what would be without sharing."""
    from matplotlib import pyplot

    names = [one.work for one in figures]
    _, axes = pyplot.subplots(figsize=(7, 3.5))
    places = range(len(names))
    axes.bar([p - 0.2 for p in places], [f.prompt_per_distinct for f in figures], 0.4)
    axes.bar([p + 0.2 for p in places], [f.positions_per_distinct for f in figures], 0.4)
    axes.set_xticks(list(places), names)
    axes.set_ylabel("per distinct prompt token")
    axes.legend(["prompt tokens sent", "positions computed"])
    pyplot.tight_layout()
    pyplot.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--prefix-tokens", type=int, default=1000)
    parser.add_argument("--peers", nargs="*", choices=["batch", "server"], default=["batch"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    folder = pull("smollm2", dtype="float32")
    model = load(str(folder))
    figures = [measure(name, arguments, folder, model) for name in arguments.work]
    if arguments.json:
        print(json.dumps([asdict(one) for one in figures], indent=1))
    else:
        show(figures)
    if arguments.plot:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
