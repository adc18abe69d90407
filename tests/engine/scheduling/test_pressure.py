"""What is done where MLX holds nearly all that it may, and where there is nothing to do."""

import pytest
from driving import finish, greedy_text, task, texts
from scripted_device import ScriptedDevice
from test_engine import completion
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.options import EngineOptions

CEILING = 1_000_000_000
LOW, HIGH = CEILING // 2, CEILING - 1


def start(now: float = 0.0, **options: int) -> tuple[MLXEngine, ScriptedDevice]:
    device = ScriptedDevice(CEILING, LOW)
    engine = MLXEngine(
        tiny_model("llama"),
        EngineOptions(**{"batch_size": 8, "share_from": 1, **options}),
        device=device,
        clock=lambda: now,
    )
    return engine, device


def with_prefix_and_others(engine: MLXEngine) -> list[str]:
    """Has a prefix that nobody needs any more, and four sequences that run; gives their answers."""
    bodies = [completion([*range(40), i], max_tokens=2) for i in range(3)]
    engine.add([task(f"gone{i}", body) for i, body in enumerate(bodies)])
    finish(engine, 3)
    assert engine.totals.prefixes_held == 1
    bodies = [completion([i, i, 7], max_tokens=60) for i in range(4)]
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    while engine.running < 4:
        engine.step()
    return [greedy_text(tiny_model("llama"), body) for body in bodies]


def test_prefixes_go_first_then_steps_shrink_then_sequences_wait() -> None:
    engine, device = start()
    expected = with_prefix_and_others(engine)

    device.active = HIGH
    seen = []
    for _ in range(6):
        engine.step()
        seen.append((engine.totals.prefixes_held, engine.capacity, engine.running))
    device.active = LOW

    assert seen == [(0, 8, 4), (0, 2, 4), (0, 2, 3), (0, 2, 2), (0, 1, 2), (0, 1, 1)]
    results = finish(engine, 4)
    assert [texts(results[str(i)])[0] for i in range(4)] == expected
    assert engine.totals.sequences_preempted == 3


def test_who_is_alone_goes_on_under_pressure() -> None:
    engine, device = start(chunk=64)
    device.active = HIGH
    body = completion([5] * 200, max_tokens=20)
    engine.add([task("one", body)])

    assert texts(finish(engine, 1)["one"]) == [greedy_text(tiny_model("llama"), body)]


def test_batches_grow_again_once_there_is_room() -> None:
    engine, device = start()
    bodies = [completion([i, i, 7], max_tokens=90) for i in range(8)]
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    while engine.running < 8:
        engine.step()
    device.active = HIGH
    while engine.capacity > 2:
        engine.step()
    device.active = LOW

    results = finish(engine, 8)

    assert engine.capacity == 8
    assert texts(results["7"]) == [greedy_text(tiny_model("llama"), bodies[7])]


def test_free_buffers_are_given_back_before_anything_else() -> None:
    engine, device = start()
    expected = with_prefix_and_others(engine)
    read = device.memory
    device.memory = lambda: type(read())(LOW, HIGH - LOW, LOW)  # type: ignore[method-assign]
    cleared = device.cleared
    engine.step()

    assert device.cleared == cleared + 1
    assert (engine.totals.prefixes_held, engine.capacity, engine.running) == (1, 8, 4)
    assert len(expected) == len(finish(engine, 4))


def test_an_idle_engine_keeps_its_prefixes_for_a_while() -> None:
    now = 0.0
    device = ScriptedDevice()
    engine = MLXEngine(tiny_model("llama"), device=device, clock=lambda: now)
    bodies = [completion([*range(40), i], max_tokens=2) for i in range(3)]
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    finish(engine, 3)
    cleared = device.cleared
    engine.step()
    now = 599.0
    engine.step()
    assert (engine.totals.prefixes_held, device.cleared) == (1, cleared)

    now = 600.0
    engine.step()
    engine.step()

    assert (engine.totals.prefixes_held, device.cleared) == (0, cleared + 1)
    engine.check()


def test_an_idle_engine_keeps_no_prefix_that_was_left_half_done() -> None:
    now = 0.0
    engine = MLXEngine(
        tiny_model("llama"), EngineOptions(chunk=32), device=ScriptedDevice(), clock=lambda: now
    )
    engine.add([task(str(i), completion([*range(200), i])) for i in range(3)])
    engine.step()
    prefix_cache = engine._running.prefix_cache
    assert prefix_cache.bytes_in_work > 0
    for i in range(3):
        engine.cancel(str(i))
    engine.step()
    now = 600.0
    engine.step()

    assert prefix_cache.bytes_in_work == 0


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_throttled_engine_grows_no_further_than_it_may(share: float) -> None:
    engine, _ = start()
    engine.throttle(share)
    assert engine.capacity == 8 * share
    engine.add([task(str(i), completion([i, 7], max_tokens=40)) for i in range(8)])
    finish(engine, 8)
    assert engine.capacity == 8 * share
    engine.throttle(1.0)
    assert engine.capacity == 8
