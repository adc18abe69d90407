"""A job that runs alone, with a draft model and without, in one run.

    python bench/draft.py [--tokens 300] [--jobs 1] [--model FOLDER --draft FOLDER] [--json]

Prints tokens a second and forward passes of the model: step by step; with a draft that mostly
agrees, a fifth as large; and with one that never does, which costs what the trials of it take.
How much is gained depends on what a pass of a few tokens takes beside one of a single token: about
as much on a GPU, several times as much on a CPU; the last line says it.

Without --model, random models: the large one is the small one with layers that hardly change
anything, so that the small one agrees as a good draft does. The answers are compared. On a CPU,
seconds are those of the processor: it may have other things to do.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / part) for part in ("", "engine")]

import mlx.core as mx  # noqa: E402
from driving import finish, task, texts  # noqa: E402
from mlx.utils import tree_flatten, tree_unflatten  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from tiny import COMMON, random_model  # noqa: E402

from mlx_rq.engine.engine import MLXEngine  # noqa: E402
from mlx_rq.engine.models.draft import check_draft  # noqa: E402
from mlx_rq.engine.models.load import LoadedModel, load  # noqa: E402
from mlx_rq.engine.options import EngineOptions  # noqa: E402

SIZE = {"hidden_size": 384, "intermediate_size": 1152, "num_attention_heads": 6, "head_dim": 64}
LAYERS, DRAFT_LAYERS = 10, 2
HARDLY = 0.01
"""How much of what they were the layers change that the draft has not."""

AT_ONCE = 5
"""Tokens of the pass that is compared with one of a single token."""

clock = time.process_time if mx.default_device() == mx.cpu else time.perf_counter


@dataclass
class Result:
    """What one way took."""

    way: str
    seconds: float = 0.0
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    answers: Sequence[str] = ()


def random_llama(layers: int, seed: int) -> LoadedModel:
    return random_model("llama", {**COMMON, **SIZE, "num_hidden_layers": layers}, seed)


def random_pair() -> tuple[LoadedModel, LoadedModel]:
    """A model, and a draft of its first layers that mostly agrees with it."""
    large, small = random_llama(LAYERS, seed=0), random_llama(DRAFT_LAYERS, seed=1)
    weights: dict[str, mx.array] = dict(tree_flatten(large.model.parameters()))
    for name, value in weights.items():
        layer = name.split(".")[2] if ".layers." in name else "0"
        if int(layer) >= DRAFT_LAYERS and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = HARDLY * value
    large.model.update(tree_unflatten(list(weights.items())))
    kept: Any = tree_flatten(small.model.parameters())
    small.model.update(tree_unflatten([(name, weights[name]) for name, _ in kept]))
    mx.eval(large.model.parameters(), small.model.parameters())
    return large, small


def measured(
    way: str, model: LoadedModel, draft: LoadedModel | None, jobs: int, tokens: int
) -> Result:
    """Has jobs done one after the other; tells what that took."""
    engine = MLXEngine(model, EngineOptions(), draft=draft, clock=clock)
    bodies = [
        {"prompt": [65 + number, *range(40, 104)], "temperature": 0, "ignore_eos": True}
        for number in range(jobs + 1)
    ]
    answers = []
    before, started = engine.totals, 0.0
    for number, body in enumerate(bodies):
        if number == 1:  # the first one warms up
            before, started = engine.totals, clock()
        engine.add([task(str(number), {**body, "max_tokens": tokens if number else 8})])
        (result,) = finish(engine, 1).values()
        answers += texts(result) if number else []
    after = engine.totals
    return Result(
        way,
        clock() - started,
        after.decoded_tokens - before.decoded_tokens,
        after.decode_steps - before.decode_steps,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
        answers,
    )


def cost_of_a_pass(model: LoadedModel, tokens: int, times: int = 10) -> float:
    """Says how long a pass of so many tokens takes that one sequence goes on by."""
    caches = make_prompt_cache(model.model)
    inputs = mx.array([[65] * tokens])
    mx.eval(model.model(inputs, cache=caches))
    started = clock()
    for _ in range(times):
        mx.eval(model.model(inputs, cache=caches))
    return (clock() - started) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    drafts: dict[str, LoadedModel | None] = {"step by step": None}
    if options.model:
        model, draft = load(options.model), load(options.draft)
        check_draft(model, draft)
        drafts["with the draft"] = draft
    else:
        model, draft = random_pair()
        drafts["with a good draft"] = draft
        drafts["with a bad draft"] = random_llama(DRAFT_LAYERS, seed=2)
    results = [
        measured(way, model, one, options.jobs, options.tokens) for way, one in drafts.items()
    ]
    plain = results[0]
    if options.json:
        print(json.dumps([asdict(result) for result in results]))
        return
    for result in results:
        speed = result.tokens / result.seconds
        gain = plain.seconds / result.seconds
        same = "the same answers" if result.answers == plain.answers else "OTHER ANSWERS"
        print(
            f"{result.way:18} {speed:7.1f} tokens/s ({gain:.2f} x)  {result.passes:5} passes for "
            f"{result.tokens} tokens, {result.accepted} of {result.drafted} accepted, {same}"
        )
    wide = cost_of_a_pass(model, AT_ONCE) / cost_of_a_pass(model, 1)
    print(f"a pass of {AT_ONCE} tokens takes {wide:.1f} times as long as one of a single token")


if __name__ == "__main__":
    main()
