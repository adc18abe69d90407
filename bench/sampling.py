"""What choosing tokens costs: 16 sequences with 16 different samplers beside 16 greedy sequences.

    LD_PRELOAD=…/libopenblas.so.0 python bench/sampling.py [--model smollm2] [--tokens 64]
        [--rounds 5] [--logprobs] [--json]

Both kinds of batch take turns in one process, so that the ratio of their decoded tokens a second
does not depend on the machine's mood. On Linux the wheel's own BLAS is slow, which hides what
sampling costs: preload OpenBLAS.
"""

import argparse
import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Task
from mlx_rq.engine.models.load import load
from mlx_rq.engine.models.pull import pull
from mlx_rq.engine.options import EngineOptions
from mlx_rq.jobs.openai.requests import CompletionRequest

SEQUENCES = 16
GOAL = 0.9

SAMPLERS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0.3},
    {"temperature": 1.5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.9, "top_p": 0.5},
    {"temperature": 1, "top_k": 40},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.95},
    {"temperature": 1, "min_p": 0.05},
    {"temperature": 1.2, "min_p": 0.02, "top_p": 0.98},
    {"temperature": 0.7, "presence_penalty": 0.5},
    {"temperature": 0.7, "frequency_penalty": 0.5},
    {"temperature": 0.7, "repetition_penalty": 1.1},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 1},
    {"temperature": 0.7, "logit_bias": {"100": 5, "200": -5}},
    {"temperature": 0.6, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.2},
]


class Bench:
    """One engine, which decodes a full batch at a time."""

    def __init__(self, model: str, tokens: int) -> None:
        pull(model)
        self._engine = MLXEngine(load(model), EngineOptions(batch_size=SEQUENCES))
        self._tokens = tokens
        self._tasks = 0

    def tokens_a_second(self, samplers: Sequence[dict[str, Any]]) -> float:
        """Decodes one batch, a sequence for each sampler."""
        tasks = []
        for number, sampler in enumerate(samplers):
            request = CompletionRequest(
                prompt=f"Chapter {number}. It was", max_tokens=self._tokens, ignore_eos=True,
                seed=number, **sampler,
            )  # fmt: skip
            self._tasks += 1
            tasks.append(Task(str(self._tasks), request))
        before = self._engine.totals
        assert self._engine.add(tasks) == []
        ended = 0
        while ended < len(tasks):
            ended += len(self._engine.step())
        after = self._engine.totals
        tokens = after.decoded_tokens - before.decoded_tokens
        return tokens / (after.decode_seconds - before.decode_seconds)


def main() -> None:
    """Prints the ratio; fails below the goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--logprobs", action="store_true", help="every sequence asks for 5 logprobs"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    bench = Bench(options.model, options.tokens)
    more = {"logprobs": 5} if options.logprobs else {}
    mixed = [{**sampler, **more} for sampler in SAMPLERS]
    # Greedy sequences of one prompt would be generated once; these differ in their prompts.
    greedy = [{"temperature": 0}] * SEQUENCES
    for batch in (mixed, greedy):  # warm up
        bench.tokens_a_second(batch)
    pairs = [
        (bench.tokens_a_second(greedy), bench.tokens_a_second(mixed)) for _ in range(options.rounds)
    ]
    ratios = [sampled / plain for plain, sampled in pairs]
    result = {
        "ratio": round(median(ratios), 3),
        "least": round(min(ratios), 3),
        "most": round(max(ratios), 3),
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"16 samplers / 16 greedy sequences, tokens a second: {result['ratio']} "
            f"(median of {options.rounds} rounds, {result['least']} to {result['most']})"
        )
    raise SystemExit(result["ratio"] < GOAL)


if __name__ == "__main__":
    main()
