"""An engine that is closed gives back what it took."""

import gc
import threading

import mlx.core as mx
import pytest
from driving import finish, task
from fakes import eventually
from mlx_lm.models import llama
from tiny import COMMON, FAMILIES, random_model

from mlx_rq.engine import engine as engine_module
from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.kv import sharing
from mlx_rq.engine.kv.shared_attention import shared_attention
from mlx_rq.engine.kv.trial import ASSUMED
from mlx_rq.engine.options import EngineOptions

SAME = "All of them begin with these words, and "
BODIES = [{"prompt": f"{SAME}{word}", "max_tokens": 3} for word in ("one", "two", "three")]


@pytest.fixture(autouse=True)
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials are not made here: those that tests share remember the models.

    Engines of other tests that nobody uses any more go now, and not while something is counted.
    """
    gc.collect()
    monkeypatch.setattr(engine_module, "verdict_on", lambda model: ASSUMED)
    monkeypatch.setattr(sharing, "_disagreement", lambda *tried: 0.0)


def used(family: str) -> MLXEngine:
    """An engine that has answered, and holds a prefix and an unfinished sequence."""
    model = random_model(family, {**COMMON, **FAMILIES[family]})
    engine = MLXEngine(model, EngineOptions(batch_size=4, share_from=1))
    assert engine.add([task(str(number), body) for number, body in enumerate(BODIES)]) == []
    finish(engine, len(BODIES))
    engine.add([task("more", {"prompt": "Once", "max_tokens": 50})])
    engine.step()
    return engine


def compiler_threads() -> int:
    return sum(thread.name == "mlx-rq-compiler" for thread in threading.enumerate())


def test_memory_is_flat_over_ten_changes() -> None:
    threads, left = compiler_threads(), []
    for number in range(10):
        engine = used(("llama", "gemma3_text")[number % 2])
        assert engine.totals.tasks == 4
        in_use = mx.get_active_memory()
        engine.close()
        left.append(mx.get_active_memory())
        assert in_use - left[-1] > 90_000  # weights, a prefix, a sequence
        assert mx.get_cache_memory() == 0
    assert max(left[1:]) - min(left[1:]) < 1_000, "something stays with each change"
    eventually(lambda: compiler_threads() <= threads, "the end of the threads")


def test_mlx_lms_own_attention_is_back_after_the_last_engine() -> None:
    before = llama.scaled_dot_product_attention  # ours, where another test has an engine still
    engine = used("llama")
    assert llama.scaled_dot_product_attention is shared_attention
    engine.close()
    assert llama.scaled_dot_product_attention is before
