"""How much is prefilled in a step: by the time that steps took, and so that decode goes on."""

from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from driving import Body, finish, greedy_text, task, texts
from scripted_device import ScriptedDevice, watched
from test_engine import completion
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.pace import Pace
from mlx_rq.engine.scheduling.step_size import StepSize

DECODE, TOKEN = 0.05, 0.001  # seconds


def learnt(decode: float = DECODE, token: float = TOKEN) -> Pace:
    pace = Pace()
    pace.took(512 * token, prefilled=512, decoded=False)
    pace.took(decode, prefilled=0, decoded=True)
    return pace


@pytest.mark.parametrize(
    ("token", "decoding", "tokens"),
    [
        (0.001, True, 100),  # two decode steps
        (0.0001, True, 512),  # never more than a chunk
        (0.1, True, 32),  # a slow machine still gets on
        (0.001, False, 2048),
        (0.02, False, 500),  # ten seconds
    ],
)
def test_a_step_prefills_what_its_time_allows(token: float, decoding: bool, tokens: int) -> None:
    assert learnt(token=token).tokens(StepSize(16, 512), decoding=decoding) == tokens


def test_nothing_is_known_yet_and_little_is_risked() -> None:
    assert Pace().tokens(StepSize(16, 512), decoding=False) == 512
    assert Pace().tokens(StepSize(16, 512), decoding=True) == 32


def test_steps_that_did_both_tell_what_a_token_takes() -> None:
    pace = learnt()
    for _ in range(30):  # contexts grew
        pace.took(DECODE + 100 * 2 * TOKEN, prefilled=100, decoded=True)
    assert pace.tokens(StepSize(16, 512), decoding=True) == 50

    pace = Pace()  # never a step that only decoded
    pace.took(512 * TOKEN, prefilled=512, decoded=False)
    pace.took(DECODE + 100 * TOKEN, prefilled=100, decoded=True)
    assert pace.tokens(StepSize(16, 512), decoding=True) == pytest.approx(100, abs=1)


def test_a_few_tokens_tell_nothing() -> None:
    pace = learnt()
    pace.took(DECODE + 1.0, prefilled=3, decoded=True)
    assert pace.tokens(StepSize(16, 512), decoding=True) == 100


@pytest.mark.parametrize("share_from", [1, 10**9], ids=["shared", "copied"])
def test_sequences_go_on_decoding_beside_long_prompts(share_from: int) -> None:
    """Counted in work: a pass takes its tokens' time, a decode step that of many tokens."""
    model = tiny_model("llama")
    now = 0.0
    device = ScriptedDevice()
    scripted, network = watched(model, device)
    options = EngineOptions(batch_size=16, chunk=512, share_from=share_from)
    engine = MLXEngine(scripted, options, device=device, clock=lambda: now)

    def takes(rows: int, held: int, before: int) -> bool:
        nonlocal now
        now += (
            40 + rows * network.passes[-1][1]
        ) / 1000  # weights are read, whatever is computed with them
        return False

    network.fails = takes
    engine.add([task("first", completion([1, 2, 3], max_tokens=8))])
    finish(engine, 1)
    short = [completion([i, i + 1], max_tokens=90) for i in range(4)]
    engine.add([task(f"short{i}", body) for i, body in enumerate(short)])
    for _ in range(10):
        engine.step()
    # Eight of unlike beginnings, prefilled together, and two that share a prefix.
    long = [completion([i, *range(100)], max_tokens=3) for i in range(20, 28)]
    long += [completion([*range(250), *range(50), i], max_tokens=3) for i in range(2)]
    scored: Body = {"echo": True, "logprobs": 1}
    long += [completion([*range(200), i], max_tokens=3, **scored) for i in range(2)]
    engine.add([task(f"long{i}", body) for i, body in enumerate(long)])
    results: dict[str, Any] = {}
    decoded, at = engine.totals.decode_steps, [now]
    while len(results) < len(short) + len(long):
        results.update((outcome.id, outcome.result) for outcome in engine.step())
        if engine.totals.decode_steps > decoded:
            decoded = engine.totals.decode_steps
            at.append(now)

    gaps = [later - earlier for earlier, later in pairwise(at)]
    step = (40 + len(short)) / 1000  # without prefill
    assert min(gaps) == pytest.approx(0.041, abs=0.003)
    assert max(gaps) > 2 * step  # prompts were prefilled between decode steps
    assert max(gaps) <= 4 * min(step, median(gaps))
    for name, bodies in (("short", short), ("long", long)):
        for index, body in enumerate(bodies):
            said = model.tokenizer.decode(body["prompt"]) if "echo" in body else ""
            assert texts(results[f"{name}{index}"]) == [said + greedy_text(model, body)]


def test_progress_is_told_after_each_pass_of_a_long_prompt() -> None:
    model = tiny_model("llama")
    device = ScriptedDevice()
    scripted, network = watched(model, device)
    engine = MLXEngine(scripted, EngineOptions(batch_size=8, chunk=64), device=device)
    network.passes.clear()
    told: list[int] = []
    engine.on_progress = lambda: told.append(len(network.passes))
    bodies = [completion([*range(200), *range(100), i], max_tokens=2) for i in range(4)]
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    finish(engine, 4)

    long = [index for index, (rows, tokens) in enumerate(network.passes) if rows * tokens > 32]
    assert len(long) >= 2
    assert all(index + 1 in told for index in long)  # before the next one begins
    assert max(rows * tokens for rows, tokens in network.passes) <= 4 * 64


def test_a_prefix_that_takes_all_of_a_step_leaves_nothing_for_the_next_one() -> None:
    model = tiny_model("llama")
    device = ScriptedDevice()
    scripted, network = watched(model, device)
    engine = MLXEngine(scripted, EngineOptions(batch_size=4, chunk=32), device=device)
    system, documents = [*range(32)], [[7] * 100, [8] * 100]
    bodies = [completion([*system, *documents[i % 2], i], max_tokens=2) for i in range(6)]
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])
    network.passes.clear()

    engine.step()

    assert network.passes == [(1, 32)]
    results = finish(engine, 6)
    assert [texts(results[str(i)]) for i in range(6)] == [[greedy_text(model, b)] for b in bodies]
