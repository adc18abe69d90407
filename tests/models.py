"""The real model of the tests, where it is got from its package once."""

from functools import cache
from pathlib import Path

from mlx_rq.engine.models.gguf import default_dtype
from mlx_rq.engine.models.load import LoadedModel, load
from mlx_rq.engine.models.pull import pull


@cache
def smollm2_folder() -> Path:
    """The folder of SmolLM2 in float32, in which greedy answers are the same in every batch."""
    return pull("smollm2", dtype="float32")


@cache
def quick_smollm2_folder() -> Path:
    """The folder of SmolLM2 in what computes fastest here, for tests that compare no answers."""
    return pull("smollm2", dtype=default_dtype())


@cache
def smollm2() -> LoadedModel:
    """SmolLM2, loaded once for all tests."""
    return load(str(smollm2_folder()))
