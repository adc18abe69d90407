"""Writes docs/families.md: what the engine does with every model of mlx-lm, tried tiny.

And what `mlx-rq model list` says of it, by the types that configs name (`families.json`).

    make families

Each model file of the installed mlx-lm is made tiny and random (`family_configs.json`), tried as at
the start of a worker, and its answers in batches are compared with those that each prompt has
alone. A new mlx-lm changes the table, to be read in the diff.
"""

import json
import pkgutil
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import mlx_lm.models
from driving import greedy_text, run, texts
from mlx_lm.utils import MODEL_REMAPPING
from test_same_answers import branching
from tiny import COMMON, FAMILIES, SEQUENTIAL_FAMILIES, random_model

from mlx_rq.engine.kv.trial import Batching, verdict_on
from mlx_rq.engine.models import families as shipped
from mlx_rq.engine.models.load import LoadedModel

TABLE = Path(__file__).parents[2] / "docs" / "families.md"
HEAD = f"""# Families

What a worker does with each model of mlx-lm {version("mlx-lm")}. `make families` writes this page: each model
is made tiny, with random weights in float32, and asked in batches what it was asked alone before.

- **Batches**: *any*, sequences of any lengths; *equal*, prompts are prefilled together only where
  what is left of them beyond their prefix is of equal length; *alone*, one sequence at a time.
- **Prefixes**: in how many layers they are held once for all their sequences; in the others they are
  copied into each. Where copies are quicker, they are copied as long as there is memory.
- **Same answers**: how many of {{jobs}} greedy answers were those that the prompts have alone.

| model file | batches | prefixes | same answers | why |
|---|---|---|---|---|
"""  # noqa: E501
JOBS = 16
UNTRIED = {
    "bitnet": "it needs Metal",
    "muse_spark": "it needs Metal",
    "olmo": "it needs a package of its own",
    "phi3small": "with a cache, its second token is no number, alone too",
    "prism_hadamard_qwen35": "it is made of packed weights only",
}
NOTES = {
    "plamo3": "beyond its window, what mlx-lm answers depends on how the prompt is cut, alone too",
}
_SHORT = {Batching.ANY: "any", Batching.EQUAL: "equal", Batching.ALONE: "alone"}


class Row(NamedTuple):
    """What is said of a model file."""

    family: str
    batches: str
    prefixes: str
    same: str
    why: str

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"


def families() -> Iterator[str]:
    """Gives the modules of the installed mlx-lm that hold a model."""
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        source = Path(mlx_lm.models.__path__[0], f"{module.name}.py").read_text()
        if re.search(r"^class Model\b", source, re.M) and "class ModelArgs" in source:
            yield module.name


def tiny_family(family: str) -> LoadedModel:
    """Makes a tiny model of one of `families`."""
    configs = json.loads(Path(__file__).with_name("family_configs.json").read_text())
    known = {**FAMILIES, **SEQUENTIAL_FAMILIES}
    sizes = COMMON if family in known else configs["every model"]
    own = known.get(family, configs.get(family, {}))
    if "text_config" in own:
        own = {"text_config": {**sizes, **own["text_config"]}}
    return random_model(family, {**sizes, **own})


def row(family: str) -> Row:
    """Tries a model, and compares its answers."""
    if family in UNTRIED:
        return Row(family, "?", "?", "?", f"not tried: {UNTRIED[family]}")
    model = tiny_family(family)
    batching, why, _ = verdict_on(model.model)
    bodies = [{**one, "max_tokens": min(one["max_tokens"], 12)} for one in branching(1, JOBS)]
    results, engine = run(model, bodies, batch_size=8, min_prefix_tokens=1)
    same = sum(
        texts(result) == [greedy_text(model, body)]
        for result, body in zip(results, bodies, strict=True)
    )
    sharing = engine._running.sharing
    held = sharing.why if sharing.on else "copied"
    held = f"copied, or {held}" if sharing.slow else held
    reasons = (why, "" if sharing.on or batching is Batching.ALONE else sharing.why)
    told = [_short(one) for one in (*reasons, NOTES.get(family, "")) if one]
    return Row(family, _SHORT[batching], held, f"{same} of {JOBS}", "; ".join(told))


def _short(reason: str) -> str:
    """A reason on one line, without figures that say nothing to readers."""
    reason = re.sub(r", \S+ times what rounding may", "", " ".join(reason.split()))
    reason = re.sub(r"\([\d,]+\)", "(…)", reason)
    return reason if len(reason) < 90 else f"{reason[:90]} …"


def written() -> dict[str, str]:
    """Reads the table: a line for each family."""
    lines = TABLE.read_text().partition("|---|---|---|---|---|\n")[2].splitlines()
    return {line.split()[1]: line for line in lines}


def by_type(rows: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What the table says of each type of model: how it batches, in which layers it shares."""
    found = {}
    for family, line in rows.items():
        _, batches, prefixes, *_ = line.strip("| ").split(" | ")
        if batches != "?":
            found[family] = batches, _layers(prefixes)
    also = {name: found[family] for name, family in MODEL_REMAPPING.items() if family in found}
    return dict(sorted({**also, **found}.items()))


def _layers(prefixes: str) -> str:
    held, _, layers = prefixes.removesuffix(" layers").partition(" of ")
    return "none" if prefixes.startswith("copied") else "all" if held == layers else "some"


def main() -> None:
    rows = []
    for family in families():
        rows.append(row(family))
        print(rows[-1], flush=True)
    TABLE.write_text(HEAD.format(jobs=JOBS) + "".join(f"{one}\n" for one in rows))
    entries = (f"{json.dumps(name)}: {json.dumps(one)}" for name, one in by_type(written()).items())
    shipped.TABLE.write_text("{\n" + ",\n".join(entries) + "\n}\n")


if __name__ == "__main__":
    main()
