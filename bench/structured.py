"""What constraints cost: tokens a second beside free sequences, and the time to compile a schema.

    python bench/structured.py [--model smollm2] [--batch-size 16] [--tokens 64]
        [--schemas FOLDER [--strict]] [--json]

Prints ratios of one run, in which free and constrained batches take turns step by step; absolute
times depend on the machine. `--schemas` compiles a folder of real schemas (*.json) instead: how
many are accepted, how many refused and why, and whether the shortest text for one is ever invalid.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.formats.model_format import model_format_of
from mlx_rq.engine.interface import Task
from mlx_rq.engine.models.load import LoadedModel, load
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.structured.constraint import GrammarFault
from mlx_rq.engine.structured.grammar import grammar_of
from mlx_rq.engine.structured.llguidance_backend import CompiledGrammar, Guidance
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.requests import ChatRequest
from mlx_rq.jobs.openai.validation import validate

_PEOPLE = {
    "type": "object",
    "properties": {
        "people": {
            "type": "array",
            "minItems": 50,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "role": {"enum": ["engineer", "doctor", "teacher"]},
                },
                "required": ["name", "age", "role"],
            },
        }
    },
    "required": ["people"],
}
_INVOICE = {
    "type": "object",
    "properties": {
        "invoice_lines": {
            "type": "array",
            "minItems": 50,
            "items": {
                "type": "object",
                "properties": {
                    "article_description": {"type": "string", "maxLength": 20},
                    "quantity_ordered": {"type": "integer", "minimum": 1, "maximum": 99},
                    "price_without_tax": {"type": "number"},
                    "delivery_status": {"enum": ["delivered", "on its way", "not available"]},
                },
                "required": [
                    "article_description",
                    "quantity_ordered",
                    "price_without_tax",
                    "delivery_status",
                ],
            },
        }
    },
    "required": ["invoice_lines"],
}
SCHEMAS = {"short keys": _PEOPLE, "long keys": _INVOICE}
Body = dict[str, Any]


def body(index: int, tokens: int, schema: Any = None, strict: bool = True) -> Body:
    asked: Body = {
        "messages": [{"role": "user", "content": f"List people of town {index} as JSON."}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": schema is None,
    }
    if schema is not None:
        wanted = {"name": "X", "schema": schema, "strict": strict}
        asked["response_format"] = {"type": "json_schema", "json_schema": wanted}
    return asked


def admitted(model: LoadedModel, bodies: Sequence[Body]) -> MLXEngine:
    """An engine with all the bodies in its batch, about to decode."""
    engine = MLXEngine(model, EngineOptions(batch_size=len(bodies), chunk=512))
    engine.add([Task(str(i), validate("chat", body)) for i, body in enumerate(bodies)])
    while engine.running < len(bodies) or engine.totals.decoded_tokens == 0:
        engine.step()
    return engine


def speed(model: LoadedModel, sequences: int, tokens: int) -> dict[str, float]:
    """Steps free batches, constrained ones, and one with a single constrained sequence, in turns.

    So they share whatever else the machine does. Counted are all tokens, over all of the time, for
    as long as every sequence of every batch runs.
    """
    free = [body(i, tokens) for i in range(sequences)]
    bodies = {"free": free}
    for name, schema in SCHEMAS.items():
        bodies[name] = [body(i, tokens, schema) for i in range(sequences)]
        bodies[f"one of {name}"] = [bodies[name][0], *free[1:]]
    engines = {name: admitted(model, asked) for name, asked in bodies.items()}
    before = {name: engine.totals.decoded_tokens for name, engine in engines.items()}
    seconds, steps = dict.fromkeys(engines, 0.0), 0
    while all(engine.running == sequences for engine in engines.values()):
        steps += 1
        for name, engine in engines.items():
            start = time.perf_counter()
            engine.step()
            stream: Any = engine._running._generator.stream
            mx.synchronize(stream)  # else the next one would be charged with what this one began
            seconds[name] += time.perf_counter() - start
    rate = {
        name: (engine.totals.decoded_tokens - before[name]) / seconds[name]
        for name, engine in engines.items()
    }
    found = {"steps measured": float(steps)}
    for name in SCHEMAS:
        each = (engines[name].totals.decoded_tokens - before[name]) / (steps * sequences)
        found[f"{name}: tokens a step and sequence"] = each
        found[f"{name}: constrained / free, tokens a second"] = rate[name] / rate["free"]
        found[f"{name}: one among free ones / free"] = rate[f"one of {name}"] / rate["free"]
    return found


def compile_schema(
    guidance: Guidance, model: LoadedModel, schema: Any, strict: bool
) -> CompiledGrammar:
    """Compiles a schema; raises RequestError or GrammarFault."""
    request = validate("chat", body(0, 10, schema, strict))
    assert isinstance(request, ChatRequest)
    grammar = grammar_of(request, model_format_of(model.tokenizer), False)
    assert grammar is not None
    return guidance.compile(grammar)


def schemas_in(folder: str) -> Iterator[Any]:
    """Reads the schemas in a folder; what is no schema is passed by."""
    for path in sorted(Path(folder).rglob("*.json")):
        try:
            content = json.loads(path.read_text())
        except ValueError:
            continue
        if isinstance(content, dict) and ("$schema" in content or "type" in content):
            yield content


def real_schemas(model: LoadedModel, folder: str, strict: bool) -> dict[str, Any]:
    """Compiles every schema, and writes a short text to each that compiles, to see it validate."""
    guidance = Guidance(model)
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    times = []
    for schema in schemas_in(folder):
        start = time.perf_counter()
        try:
            compiled = compile_schema(guidance, model, schema, strict)
        except (RequestError, GrammarFault) as refused:
            counts["refused"] += 1
            reasons[str(refused).partition(": ")[2][:60] or str(refused)[:60]] += 1
            continue
        finally:
            times.append(time.perf_counter() - start)
        counts["accepted"] += 1
        counts[ending(compiled, model)] += 1
    return {
        **counts,
        "compile p50 ms": 1000 * statistics.median(times),
        "compile p99 ms": 1000 * statistics.quantiles(times, n=100)[98],
        "reasons": reasons.most_common(8),
    }


def ending(compiled: CompiledGrammar, model: LoadedModel) -> str:
    """Reads the shortest text that was found: valid, invalid, or none ("open")."""
    if not compiled.shortest:
        return "open"
    text = model.tokenizer.decode(list(compiled.shortest), skip_special_tokens=True)
    (check,) = compiled.checks
    assert check is not None
    return "invalid" if check.fault(json.loads(text)) else "valid"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--schemas", metavar="FOLDER")
    parser.add_argument("--strict", action="store_true", help="for --schemas: refuse, not warn")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    model = load(options.model)
    if options.schemas:
        found = real_schemas(model, options.schemas, options.strict)
    else:
        found = speed(model, options.batch_size, options.tokens)
    for name, value in found.items():
        if not options.json:
            print(f"{name:50} {value:.3f}" if isinstance(value, float) else f"{name:50} {value}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
