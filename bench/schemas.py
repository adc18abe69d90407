"""How much of real JSON schemas is accepted and kept, over a folder of them.

    python bench/schemas.py FOLDER [--tokenizer DIRECTORY] [--most 100] [--seed 1] [--json]
        [--reasons]

FOLDER holds a folder for each split, of files in the shape of MaskBench (`schema` and `tests`,
which have `data` and `valid`) or of JSON-Schema-Test-Suite (lists of such). Each schema is compiled
strictly and leniently, as a job's is; each instance is walked through the constraint and then
validated, as an answer is. A table by split:

    strict, lenient   schemas that are accepted, of all, in percent
    exact             schemas accepted strictly of which everything is enforced, in percent
    right             valid instances that can be written leniently, of those of accepted schemas
    invalid           invalid instances that are accepted, strictly or leniently: must be 0
    masked            invalid instances that the constraint alone keeps out, in percent
    whole             schemas accepted leniently with all of their instances right (MaskBench's way)
    p50, p99          milliseconds of CPU to compile one, strictly

Only a tokenizer is needed, no model: by default smollm2's, where it was pulled.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_rq.engine.formats.model_format import model_format_of
from mlx_rq.engine.structured.constraint import GrammarFault
from mlx_rq.engine.structured.grammar import grammar_of
from mlx_rq.engine.structured.llguidance_backend import CompiledGrammar, Guidance
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.openai.validation import validate

TOKENIZER = Path.home() / ".cache/mlx-rq/models/smollm2-4bit"


@dataclass
class Split:
    """What was counted of one split."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    def share(self, part: str, whole: str) -> float:
        return 100 * self.counts[part] / max(1, self.counts[whole])

    def row(self) -> dict[str, float]:
        times = sorted(self.seconds) or [0.0]
        return {
            "schemas": self.counts["schemas"],
            "strict": self.share("strict", "schemas"),
            "exact": self.share("exact", "schemas"),
            "lenient": self.share("lenient", "schemas"),
            "right": self.share("right", "valid"),
            "invalid": self.counts["invalid accepted"],
            "masked": self.share("masked", "tried"),
            "whole": self.share("whole", "schemas"),
            "p50": 1000 * statistics.median(times),
            "p99": 1000 * times[min(len(times) - 1, int(len(times) * 0.99))],
        }


class Bench:
    """Compiles schemas and walks instances for one tokenizer."""

    def __init__(self, directory: Path) -> None:
        tokenizer = load_tokenizer(directory)
        model: Any = SimpleNamespace(
            tokenizer=tokenizer,
            vocab_size=len(tokenizer),
            eos_token_ids=set(tokenizer.eos_token_ids),
        )
        self.tokenizer = tokenizer
        self.model_format = model_format_of(tokenizer)
        self.guidance = Guidance(model)
        self.guidance.set_up()

    def compile(self, schema: Any, strict: bool) -> CompiledGrammar:
        """Compiles a schema as a job's; raises RequestError or GrammarFault."""
        wanted = {"name": "X", "schema": schema, "strict": strict}
        form = {"type": "json_schema", "json_schema": wanted}
        messages = [{"role": "user", "content": "x"}]
        request = validate("chat", {"messages": messages, "response_format": form})
        assert isinstance(request, ChatRequest)
        grammar = grammar_of(request, self.model_format, False)
        assert grammar is not None
        return self.guidance.compile(grammar)

    def writes(self, compiled: CompiledGrammar, value: Any) -> bool:
        """Whether the constraint lets a value through, in the order that its keys have."""
        constraint = compiled.start(1_000_000, close=False)
        assert constraint is not None
        text = json.dumps(value, ensure_ascii=False)
        for token in self.tokenizer.encode(text, add_special_tokens=False):
            if constraint.done:
                return False
            constraint.accept(token)
            if constraint.fault is not None:
                return False
        return constraint.complete


def files_of(folder: Path, most: int | None, seed: int) -> Iterator[tuple[str, list[Path]]]:
    """Yields the splits in a folder, each with its files, or some of them."""
    for split in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(split.rglob("*.json"))
        if most is not None and len(files) > most:
            files = sorted(random.Random(seed).sample(files, most))
        yield split.name, files


def cases_in(path: Path) -> list[Any]:
    """Reads the schemas with tests in a file; none where it holds something else."""
    content = json.loads(path.read_text())
    cases = content if isinstance(content, list) else [content]
    return [
        case for case in cases if isinstance(case, dict) and isinstance(case.get("schema"), dict)
    ]


def measure(bench: Bench, case: dict[str, Any], split: Split, reasons: Counter[str]) -> None:
    """Compiles one schema both ways, and judges its instances."""
    split.counts["schemas"] += 1
    compiled = {}
    for strict in (True, False):
        begun = time.thread_time()
        try:
            compiled[strict] = bench.compile(case["schema"], strict)
        except (RequestError, GrammarFault) as refused:
            if strict:
                reasons[str(refused).rpartition("': ")[2][:70]] += 1
            continue
        finally:
            if strict:
                split.seconds.append(time.thread_time() - begun)
        split.counts["strict" if strict else "lenient"] += 1
    split.counts["exact"] += True in compiled and not compiled[True].warnings
    whole = False in compiled
    for test in case.get("tests", ()):
        for strict, grammar in compiled.items():
            whole &= judge(bench, grammar, test, strict, split)
    split.counts["whole"] += whole


def judge(
    bench: Bench, grammar: CompiledGrammar, test: dict[str, Any], strict: bool, split: Split
) -> bool:
    """Says whether an instance is treated as it should be, and counts it."""
    writes = bench.writes(grammar, test["data"])
    (check,) = grammar.checks
    assert check is not None
    accepted = writes and check.fault(test["data"]) is None
    if test["valid"]:
        if not strict:
            split.counts["valid"] += 1
            split.counts["right"] += accepted
        return accepted or strict
    split.counts["tried"] += 1
    split.counts["masked"] += not writes
    split.counts["invalid accepted"] += accepted
    return not accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, default=TOKENIZER, metavar="DIRECTORY")
    parser.add_argument("--most", type=int, help="files of each split, drawn by chance")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--reasons", action="store_true", help="why schemas were refused strictly")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    bench = Bench(options.tokenizer)
    splits: defaultdict[str, Split] = defaultdict(Split)
    reasons: Counter[str] = Counter()
    for name, files in files_of(options.folder, options.most, options.seed):
        for path in files:
            for case in cases_in(path):
                measure(bench, case, splits[name], reasons)
    everything = Split()
    for split in splits.values():
        everything.counts.update(split.counts)
        everything.seconds += split.seconds
    rows = {name: split.row() for name, split in splits.items()} | {"all": everything.row()}
    if options.json:
        print(json.dumps({"splits": rows, "reasons": reasons}))
        return
    print(f"{'':18}" + "".join(f"{column:>9}" for column in next(iter(rows.values()))))
    for name, row in rows.items():
        print(f"{name:18}" + "".join(f"{value:9.4g}" for value in row.values()))
    for reason, count in reasons.most_common(40 if options.reasons else 0):
        print(f"{count:5} {reason}")


if __name__ == "__main__":
    main()
