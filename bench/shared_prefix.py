"""What it saves to hold a prefix once for all its sequences, beside copies of it in each sequence.

    LD_PRELOAD=…/libopenblas.so.0 python bench/shared_prefix.py [--prefixes 256 1024 …]
        [--sequences 4 16 …] [--waves 2] [--repeats 2] [--dtype float32] [--tiny] [--json]
        [--plot FILE]

Both ways run in turn, so many `repeats`, by the same engine over the same jobs: `sequences` of them
at once, so many `waves` of them, of different lengths, so that sequences come and go. The quickest
run of each counts, as somebody else may use the machine too. Ratios tell; absolute figures depend
on it. `gate` says whether the engine would share by itself (it is made to here), by what `--batch
auto` measures, and the last line which cells it would let in though they take more of the
processor's time: `cpu` counts that of this process, whatever else the machine does. `--tiny` takes
a small random model. Memory and KV are the most that was held beside the weights. Copies of 4,096
tokens for 32 sequences of SmolLM2 in float32 take up to 15 GB: choose what fits. Before all that it
tells how many operations attention takes in a layer, each of which is a kernel to launch, but for
views of arrays, and what `--kv-bits` would spare and change.
"""

import argparse
import io
import json
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests" / "engine")]

import mlx.core as mx  # noqa: E402
from tiny import tiny_model  # noqa: E402

from mlx_rq.engine.engine import MLXEngine  # noqa: E402
from mlx_rq.engine.interface import Task  # noqa: E402
from mlx_rq.engine.kv.segment import KVSegment  # noqa: E402
from mlx_rq.engine.kv.shared_attention import shared_attention  # noqa: E402
from mlx_rq.engine.kv.shared_cache import BatchSharedKVCache  # noqa: E402
from mlx_rq.engine.kv.sharing import Sharing, SharingCost, quantized, worth  # noqa: E402
from mlx_rq.engine.models.calibrate import measure_share_from  # noqa: E402
from mlx_rq.engine.models.load import LoadedModel, load  # noqa: E402
from mlx_rq.engine.models.pull import pull  # noqa: E402
from mlx_rq.engine.options import EngineOptions  # noqa: E402
from mlx_rq.jobs.openai.requests import CompletionRequest  # noqa: E402

QUESTION = 12
"""Tokens of each job's own."""

ANSWERS = (20, 28, 36)
"""Tokens of the answers, in turn."""


VIEWS = {"Broadcast", "ExpandDims", "Reshape", "Slice", "Squeeze", "Transpose"}
"""Operations that launch no kernel."""


def operations(*arrays: mx.array) -> int:
    """Counts what is launched to compute arrays."""
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    names = re.findall(r'label ="(\w+)", shape=rectangle', graph.getvalue())
    return sum(name not in VIEWS for name in names)


def operations_a_layer(lengths: Sequence[int], dtype: mx.Dtype, *, mixed: bool = False) -> int:
    """Counts those of a decode step in one layer, two sequences on each prefix of these lengths.

    Beside the copy of the queries, which MLX counts as a view. `mixed`, they stand in no order.
    """

    def some(*shape: int) -> mx.array:
        return mx.random.normal(shape).astype(dtype)

    parts = [KVSegment(some(1, 2, tokens, 64), some(1, 2, tokens, 64)) for tokens in lengths]
    on = parts * 2 if mixed else [part for part in parts for _ in range(2)]
    rows = BatchSharedKVCache([(part,) for part in on], [0] * len(on))
    rows.update_and_fetch(some(len(on), 2, 20, 64), some(len(on), 2, 20, 64))
    queries, mask = some(len(on), 8, 1, 64), mx.ones((len(on), 1, 1, 20), mx.bool_)
    keys, values = rows.keys_and_values()  # type: ignore[no-untyped-call]
    first = shared_attention(queries, keys, values, rows, 0.125, mask)
    mx.eval(first, queries, keys, values, *(array for part in parts for array in part.arrays))
    return operations(shared_attention(queries, keys, values, rows, 0.125, mask))


@dataclass(frozen=True)
class Run:
    """What one way took."""

    peak_bytes: int
    kv_bytes: int
    decode_tokens_per_second: float
    wall_seconds: float
    cpu_seconds: float
    texts: list[str]


@dataclass(frozen=True)
class Figures:
    """One prefix, so many sequences: what copies take of what sharing takes, how much slower."""

    prefix: int
    sequences: int
    gate: bool
    peak_ratio: float
    kv_ratio: float
    decode_ratio: float
    wall_ratio: float
    cpu_ratio: float
    same_texts: float
    copied_peak_mb: float
    shared_peak_mb: float
    copied_decode: float
    shared_decode: float


def jobs_of(model: LoadedModel, prefix: int, count: int) -> list[Task]:
    """Completions that have the first `prefix` tokens in common."""
    dice = random.Random(prefix)

    def some(tokens: int) -> list[int]:
        return [dice.randrange(100, min(20_000, model.vocab_size - 10)) for _ in range(tokens)]

    shared = some(prefix)
    return [
        Task(
            str(number),
            CompletionRequest(
                prompt=[*shared, 20 + number, *some(QUESTION - 1)],
                max_tokens=ANSWERS[number % len(ANSWERS)],
                ignore_eos=True,
                temperature=0,
            ),
        )
        for number in range(count)
    ]


def run(model: LoadedModel, prefix: int, sequences: int, waves: int, *, share: bool) -> Run:
    """Generates all jobs with a new engine."""
    options = EngineOptions(
        batch_size=sequences, share_prefixes=share, share_from=0, kv_bytes=2**40
    )
    engine = MLXEngine(model, options)
    if share and "held once" not in engine.prefix_sharing:
        sys.exit(f"prefixes are {engine.prefix_sharing}")
    tasks = jobs_of(model, prefix, sequences * waves)
    mx.clear_cache()
    before, kv_bytes, texts = mx.get_active_memory(), 0, dict[str, str]()
    mx.reset_peak_memory()
    started, cpu_started = time.perf_counter(), time.process_time()
    engine.add(tasks)
    while len(texts) < len(tasks):
        texts.update((one.id, one.result["choices"][0]["text"]) for one in engine.step())
        kv_bytes = max(kv_bytes, engine.kv_in_use()[0])
    totals = engine.totals
    return Run(
        peak_bytes=mx.get_peak_memory() - before,
        kv_bytes=kv_bytes,
        decode_tokens_per_second=totals.decoded_tokens / totals.decode_seconds,
        wall_seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
        texts=[texts[task.id] for task in tasks],
    )


def best(runs: Sequence[Run]) -> Run:
    """The quickest speed and time of a few runs over the same jobs, and the most memory."""
    return Run(
        peak_bytes=max(one.peak_bytes for one in runs),
        kv_bytes=max(one.kv_bytes for one in runs),
        decode_tokens_per_second=max(one.decode_tokens_per_second for one in runs),
        wall_seconds=min(one.wall_seconds for one in runs),
        cpu_seconds=min(one.cpu_seconds for one in runs),
        texts=runs[0].texts,
    )


def measure(
    model: LoadedModel, prefix: int, sequences: int, waves: int, repeats: int, cost: SharingCost
) -> Figures:
    """Runs both ways."""
    runs = [
        [run(model, prefix, sequences, waves, share=share) for share in (False, True)]
        for _ in range(repeats)
    ]
    copied, shared = (best(ways) for ways in zip(*runs, strict=True))
    same = sum(a == b for a, b in zip(copied.texts, shared.texts, strict=True))
    return Figures(
        prefix=prefix,
        sequences=sequences,
        gate=worth([(prefix, sequences)], cost) == 1,
        peak_ratio=copied.peak_bytes / shared.peak_bytes,
        kv_ratio=copied.kv_bytes / shared.kv_bytes,
        decode_ratio=shared.decode_tokens_per_second / copied.decode_tokens_per_second,
        wall_ratio=copied.wall_seconds / shared.wall_seconds,
        cpu_ratio=copied.cpu_seconds / shared.cpu_seconds,
        same_texts=same / len(copied.texts),
        copied_peak_mb=copied.peak_bytes / 1e6,
        shared_peak_mb=shared.peak_bytes / 1e6,
        copied_decode=copied.decode_tokens_per_second,
        shared_decode=shared.decode_tokens_per_second,
    )


HEADING = (
    "prefix sequences gate   peak    KV  decode   wall    cpu   same  MB copied → shared   tokens/s"
)


def line(one: Figures) -> str:
    """A row of the table."""
    return (
        f"{one.prefix:6} {one.sequences:9} {'in' if one.gate else 'out':>4} {one.peak_ratio:6.1f}"
        f" {one.kv_ratio:5.1f} {one.decode_ratio:7.2f} {one.wall_ratio:6.2f} {one.cpu_ratio:6.2f}"
        f" {one.same_texts:6.0%}  {one.copied_peak_mb:8.0f} → {one.shared_peak_mb:<6.0f}"
        f" {one.copied_decode:6.1f} → {one.shared_decode:.1f}"
    )


def plot(figures: Sequence[Figures], file: str) -> None:
    """Draws how many times less memory, and how many times faster, over the prefix's length."""
    from matplotlib import pyplot

    _, (memory, speed) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    for sequences in sorted({one.sequences for one in figures}):
        points = [one for one in figures if one.sequences == sequences]
        lengths = [one.prefix for one in points]
        memory.plot(
            lengths, [one.peak_ratio for one in points], "o-", label=f"{sequences} sequences"
        )
        speed.plot(
            lengths, [one.decode_ratio for one in points], "o-", label=f"{sequences} sequences"
        )
    memory.set_ylabel("peak memory, copied ÷ shared")
    speed.set_ylabel("decode tokens/s, shared ÷ copied")
    speed.axhline(1, color="grey", linewidth=0.8)
    for axes in (memory, speed):
        axes.set_xlabel("prefix, tokens")
        axes.set_xscale("log", base=2)
        axes.legend()
    pyplot.tight_layout()
    pyplot.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[256, 1024, 2048, 4096])
    parser.add_argument("--sequences", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--waves", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "4bit"], default="float32")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    model = tiny_model("llama") if tiny else load(str(pull("smollm2", dtype=arguments.dtype)))
    for title, dtype in (("float32", mx.float32), ("16 bits", mx.bfloat16)):
        one, eight, mixed, uneven = (
            operations_a_layer(lengths, dtype, mixed=mixed)
            for lengths, mixed in (
                ([64], False),
                ([64] * 8, False),
                ([64] * 8, True),
                (range(64, 72), False),
            )
        )
        print(
            f"operations a layer, {title}: {one} with one prefix; with eight {eight}, "
            f"{mixed} out of order, {uneven} of eight lengths",
            file=sys.stderr,
        )
    sharing = Sharing(model.model)
    for bits in (8, 4) if sharing.on else ():
        part, drift = quantized(model.model, bits)
        print(
            f"in {bits} bits: {part:.0%} of a prefix's bytes, "
            f"log-probabilities drift by {drift:.2g}",
            file=sys.stderr,
        )
    sharing.remove()
    share_from, waves = measure_share_from(model.model), (arguments.waves, arguments.repeats)
    cost = SharingCost.of(share_from)
    print(f"prefixes pay where they spare {share_from} tokens a step", file=sys.stderr)
    print(HEADING, file=sys.stderr)
    figures = []
    for prefix in arguments.prefixes:
        for sequences in arguments.sequences:
            figures.append(measure(model, prefix, sequences, *waves, cost))
            print(line(figures[-1]), file=sys.stderr, flush=True)
    slower = [
        f"{one.sequences} on {one.prefix}" for one in figures if one.gate and one.cpu_ratio < 1
    ]
    print(f"slower, though let in: {', '.join(slower) or 'none'}", file=sys.stderr)
    if arguments.json:
        print(json.dumps([asdict(one) for one in figures], indent=1))
    if arguments.plot:
        plot(figures, arguments.plot)


if __name__ == "__main__":
    main()
