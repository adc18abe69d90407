"""Rows of different adapters in one step, beside one adapter for all and a step for each adapter.

    python bench/adapters.py [--model NAME] [--adapters 3] [--rank 8] [--jobs 32] [--json]

In one run: a linear layer of three sizes; a decode step of a whole model; jobs for a model and its
adapters, in the order in which they come, computed together and adapter after adapter; and the
memory that the adapters take beside the model. Of times, the shortest of several rounds that take
turns.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / part) for part in ("", "engine")]

import mlx.core as mx  # noqa: E402
from driving import finish, task  # noqa: E402
from mlx.nn.layers.linear import Linear  # noqa: E402
from mlx.utils import tree_flatten  # noqa: E402
from mlx_lm.tuner.utils import linear_to_lora_layers  # noqa: E402

from mlx_rq.engine.engine import MLXEngine  # noqa: E402
from mlx_rq.engine.interface import Adapter  # noqa: E402
from mlx_rq.engine.kv.adapter_rows import adapter_rows  # noqa: E402
from mlx_rq.engine.models.device import weight_bytes  # noqa: E402
from mlx_rq.engine.models.load import load  # noqa: E402
from mlx_rq.engine.models.mixed import MixedLinear, Part  # noqa: E402
from mlx_rq.engine.options import EngineOptions  # noqa: E402

LAYERS = {"tiny": (64, 96), "135M": (576, 1536), "1B": (2048, 8192)}
ROWS = 16
ROUNDS = 5
KEYS = ["self_attn.q_proj", "self_attn.v_proj"]
ANSWER_TOKENS = 16

Ratios = dict[str, float]


def in_turn(ways: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, float]:
    """Times each way; the first round is to warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1 + rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            mx.eval(way())
            times[name].append(time.perf_counter() - started)
    return {name: min(seconds[1:]) for name, seconds in times.items()}


def ways_of(
    plain: Callable[[mx.array], mx.array],
    adapted: Callable[[mx.array], mx.array],
    inputs: mx.array,
    kinds: int,
) -> dict[str, Callable[[], Any]]:
    """The same rows without adapters, with one, each with one of several, and those apart."""
    numbers = [row % kinds for row in range(len(inputs))]

    def computed(rows: mx.array, adapters: Sequence[int]) -> mx.array:
        with adapter_rows(adapters):
            return adapted(rows)

    apart = [(inputs[:count], [number] * count) for number, count in Counter(numbers).items()]
    return {
        "plain": lambda: plain(inputs),
        "one": lambda: computed(inputs, [1] * len(inputs)),
        "mixed": lambda: computed(inputs, numbers),
        "apart": lambda: [computed(rows, adapters) for rows, adapters in apart],
    }


def layers(kinds: int, rank: int) -> dict[str, Ratios]:
    """A layer for each row's token, and where that does not take long, for prompts."""
    draw = mx.random.normal
    found = {}
    for dtype in (mx.float32, mx.bfloat16):
        for name, (inputs, outputs) in LAYERS.items():
            plain: Any = Linear(inputs, outputs, bias=False)
            plain.set_dtype(dtype)
            parts = [Part(draw((inputs, rank)), draw((rank, outputs))) for _ in range(kinds - 1)]
            layer = MixedLinear(plain, parts)
            for tokens in (1, 128) if name == "tiny" else (1,):
                x = draw((ROWS, tokens, inputs)).astype(dtype)
                mx.eval(x, layer.lora_a, layer.lora_b, plain.weight)
                said = f"{str(dtype).rpartition('.')[2]} {name} [{ROWS}, {tokens}]"
                found[said] = in_turn(ways_of(plain, layer, x, kinds))
    return found


def write_adapter(folder: Path, model: str, seed: int, rank: int) -> Adapter:
    """Writes a random adapter of a model, as training would leave it."""
    network = load(model).model
    parameters = {"rank": rank, "scale": 2.0, "dropout": 0.0, "keys": KEYS}
    network.freeze()
    linear_to_lora_layers(network, -1, parameters)
    mx.random.seed(seed)
    trained: Any = tree_flatten(network.trainable_parameters())
    weights = {name: value + 0.02 * mx.random.normal(value.shape) for name, value in trained}
    config = {"fine_tune_type": "lora", "num_layers": -1, "lora_parameters": parameters}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return Adapter(f"{model}:{folder.name}", folder)


def steps_and_jobs(model: str, adapters: dict[str, Adapter], jobs: int) -> dict[str, Ratios]:
    """Times a decode step of a model, then jobs that ask for it and its adapters in turn.

    Gives bytes of both, too.
    """
    options: Any = {"batch_size": ROWS, "kv_bytes": 2**30}
    network = load(model).model
    engine = MLXEngine(load(model), EngineOptions(**options, mix_adapters=True))
    assert len(engine.mix(adapters)) == len(adapters)
    tokens = mx.zeros((ROWS, 1), dtype=mx.int32)
    adapted: Any = engine._adapted.model.model
    step = in_turn(ways_of(network, adapted, tokens, 1 + len(adapters)))

    names = [model, *adapters]
    bodies = [
        {
            "prompt": f"Question {number}: what comes after {number * 7}? In a word or two.",
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "model": names[number % len(names)],
        }
        for number in range(jobs)
    ]

    def together() -> None:
        engine.add([task(str(number), body) for number, body in enumerate(bodies)])
        finish(engine, jobs, limit=10**9)

    by_itself = MLXEngine(load(model), EngineOptions(**options, mix_adapters=False))

    def apart() -> None:
        for name in names:
            by_itself.adapt(adapters.get(name))
            its = [body for body in bodies if body["model"] == name]
            by_itself.add([task(str(number), body) for number, body in enumerate(its)])
            finish(by_itself, len(its), limit=10**9)

    return {
        "step": step,
        "jobs": in_turn({"together": together, "apart": apart}, rounds=1),
        "bytes": {"model": weight_bytes(network), "adapters": engine._adapted.mixed_bytes},
    }


def show(found: dict[str, Ratios], of_model: dict[str, Ratios], jobs: int) -> None:
    step, of_jobs, nbytes = (of_model[what] for what in ("step", "jobs", "bytes"))
    print(f"times beside those without an adapter; {mx.default_device()}, {os.cpu_count()} CPUs")
    for name, times in {**found, f"a decode step [{ROWS}, 1]": step}.items():
        beside = "   ".join(f"{way} {times[way] / times['plain']:.2f}" for way in times)
        print(f"{name:28} {1000 * times['plain']:9.2f} ms   {beside}")
    ratio = of_jobs["apart"] / of_jobs["together"]
    print(f"{jobs} jobs: {of_jobs['together']:.1f} s; adapter after adapter {ratio:.2f} times that")
    share = nbytes["adapters"] / nbytes["model"]
    print(f"adapters beside the model: {nbytes['adapters'] / 1e6:.1f} MB, {share:.3f} of its own")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapters", type=int, default=3)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    found = layers(1 + options.adapters, options.rank)
    with TemporaryDirectory() as name:
        made = [
            write_adapter(Path(name) / str(seed), options.model, seed, options.rank)
            for seed in range(options.adapters)
        ]
        adapters = {adapter.model_id: adapter for adapter in made}
        of_model = steps_and_jobs(options.model, adapters, options.jobs)
    if options.json:
        print(json.dumps({"layers": found, **of_model}))
    else:
        show(found, of_model, options.jobs)


if __name__ == "__main__":
    main()
