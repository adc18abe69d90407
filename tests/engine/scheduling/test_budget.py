"""What KV is counted with: what the caches hold indeed, windows and slots ahead included."""

import mlx.core as mx
import pytest
import speaking
from driving import AHEAD, AHEAD_SHARING, Body, run, task
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
    engine.add([task("first", completion([7, 7], max_tokens=40, ignore_eos=True))])
    for _ in range(10):  # it has slots ahead by now, more than beside sequences on a prefix
        engine.step()
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    running, ended, most = engine._running, 0, 0.0
    while ended < 1 + len(bodies):
        ended += len(engine.step())
        sizes = [(len(one.tokens) + 1, one.shared_tokens) for one in running]
        if sizes and not running._generator.prefilling:
            held = running._generator.prompt_cache_nbytes
            counted = running.memory._needed(sizes)
            assert held <= counted
            most = max(most, held / counted)
    assert most > 0.4  # nor is much more counted than held


def test_slots_are_counted_that_sequences_may_lag_behind_others_by_their_grammars() -> None:
    """One takes in what its grammar decides, many tokens in a step; the longest has no grammar."""
    model = speaking.model()
    decided = {"guided_regex": "[ab]" + "".join(f"{i} decided words [ab]" for i in range(9))}
    longest: Body = {"prompt": "a" * 236, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    _, engine = run(model, [], batch_size=4, share_prefixes=True)
    engine.add([task("long", longest)])
    while not engine.running:
        engine.step()
    engine.add([task(str(i), {"prompt": "b" * i, "max_tokens": 140, **decided}) for i in (1, 2)])
    running, lag, over = engine._running, 0, 0
    while engine.task_ids:
        engine.step()
        if len(running) > 1 and not running._generator.prefilling:
            lag = max(lag, *running._generator.caches[0].lag)
            held = running._generator.prompt_cache_nbytes
            sizes = [(len(one.tokens) + 1, one.shared_tokens) for one in running]
            assert held <= running.memory._needed(sizes, running.memory._lag(list(running)))
            over = max(over, held - running.memory._needed(sizes))
    assert lag > 8
    assert over > 0  # else there would be nothing to count


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


def test_a_prefix_is_computed_once_there_is_room_for_it_beside_those_that_run() -> None:
    """What is held stays within the bytes, those of the prefix in work counted in."""
    model = tiny_model("llama")
    token = measure_kv(model.model).per_token
    _, engine = run(model, [], batch_size=16, chunk=512, reserve=64, kv_bytes=2100 * token)
    bodies = [completion([i] * 40, max_tokens=200, ignore_eos=True) for i in range(8)]
    bodies += [completion([*range(250)] * 4 + [i], max_tokens=5) for i in range(4)]
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    running, ended, most = engine._running, 0, 0
    while ended < len(bodies):
        ended += len(engine.step())
        built = running.prefix_cache._building
        in_work = 0 if built is None else sum(cache.nbytes for cache in built.caches)
        most = max(most, running.kv_in_use()[0] + in_work)

    assert 0.5 * 2100 * token < most <= 2100 * token
    assert engine.totals.prefixes_held == 1


def test_a_prefix_that_was_put_aside_half_done_is_counted() -> None:
    """As where somebody comes who is more urgent, and stands on none."""
    model = tiny_model("llama")
    token = measure_kv(model.model).per_token
    _, engine = run(model, [], batch_size=8, chunk=512, reserve=64, kv_bytes=4200 * token)
    late = [completion([*range(250)] * 4 + [i], max_tokens=5) for i in range(3)]
    engine.add([task(f"late{i}", body) for i, body in enumerate(late)])
    engine.step()
    running = engine._running
    assert running.prefix_cache.bytes_in_work > 500 * token
    urgent = [completion([i] * 200, max_tokens=60, ignore_eos=True) for i in range(8)]
    engine.add([task(str(i), body, rank=0) for i, body in enumerate(urgent)])
    ended, most = 0, 0
    while ended < len(late) + len(urgent):
        most = max(most, running.kv_in_use()[0] + running.prefix_cache.bytes_in_work)
        ended += len(engine.step())

    assert 0.5 * 4200 * token < most <= 4200 * token
