"""What KV is counted with: what the caches hold indeed, windows and slots ahead included."""

import mlx.core as mx
import pytest
from driving import AHEAD, AHEAD_SHARING, run, task
from mlx_lm.models.cache import make_prompt_cache
from scripted_device import ScriptedDevice
from test_engine import completion
from tiny import Nested, tiny_model

from mlx_rq.engine.models.device import weight_bytes
from mlx_rq.engine.scheduling.budget import KVBudget, default_kv_bytes, measure_kv


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "lfm2"])
@pytest.mark.parametrize("tokens", [10, 300])
def test_a_sequence_costs_what_its_caches_hold(family: str, tokens: int) -> None:
    network = tiny_model(family).model
    caches = make_prompt_cache(network)
    network(mx.zeros((1, tokens - 4), mx.int32), cache=caches)
    for _ in range(4):  # a window is cut to its size by decoding
        network(mx.zeros((1, 1), mx.int32), cache=caches)
    mx.eval([cache.state for cache in caches])
    held = 0
    for cache in caches:
        keys = getattr(cache, "keys", None)
        if keys is None:
            held += cache.nbytes
        else:  # the slots that are used, of those that there are
            held += (cache.keys.nbytes + cache.values.nbytes) // keys.shape[2] * cache.size()

    assert measure_kv(network).bytes(1, tokens) == held


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("share_from", [1, 10**9], ids=["shared", "copied"])
def test_a_batch_never_holds_more_than_was_counted(family: str, share_from: int) -> None:
    model = tiny_model(family)
    _, engine = run(model, [], batch_size=4, share_from=share_from)
    bodies = [completion([*range(40), i, *range(5 * i)], max_tokens=30) for i in range(6)]
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    running, ended, most = engine._running, 0, 0.0
    while ended < len(bodies):
        ended += len(engine.step())
        sizes = [(len(one.tokens) + 1, one.shared_tokens) for one in running]
        if sizes and not running._generator.prefilling:
            held = running._generator.prompt_cache_nbytes
            counted = running.memory._needed(sizes)
            assert held <= counted
            most = max(most, held / counted)
    assert most > 0.4  # nor is much more counted than held


def test_room_for_kv_is_what_the_ceiling_leaves_beside_the_weights() -> None:
    network = tiny_model("llama").model
    weights = weight_bytes(network)

    assert default_kv_bytes(network, ScriptedDevice(weights + 10**9)) == 8 * 10**8
    assert default_kv_bytes(network, ScriptedDevice()) == ScriptedDevice.physical // 2 - weights
    assert default_kv_bytes(network, ScriptedDevice(weights)) == 64 * 2**20


def test_long_prompts_fit_where_most_layers_have_windows() -> None:
    model = tiny_model("gemma3_text")
    cost = measure_kv(model.model)
    body = completion([*range(250)] * 4, max_tokens=4)

    (result,), _ = run(model, [body], kv_bytes=cost.bytes(1, 1004))
    assert "error" not in result
    (result,), _ = run(model, [body], kv_bytes=cost.bytes(1, 1000))
    assert result["error"]["code"] == "context_length_exceeded"
    assert cost.bytes(1, 1004) < 0.4 * 1004 * cost.per_token


def test_slots_ahead_are_counted_in_every_layer() -> None:
    budget = KVBudget(Nested(), 1, 1, ScriptedDevice())  # type: ignore[arg-type]

    assert budget._needed([(100, 0)]) == 3 * 32 * (100 + AHEAD)
    shared = 2 * 32 * (100 + AHEAD) + 32 * (40 + AHEAD_SHARING)
    assert budget._needed([(100, 60), (90, 60)]) == 2 * shared
