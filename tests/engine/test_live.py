"""What an engine tells of tasks on their way: tokens so far, and when each step was taken."""

from collections.abc import Iterator
from itertools import count

from driving import task
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import Outcome, Steps
from mlx_rq.engine.options import EngineOptions


def clock() -> Iterator[float]:
    """Goes on by a second whenever somebody looks at it."""
    return map(float, count())


def test_tokens_so_far_and_steps_are_those_of_each_task() -> None:
    ticks = clock()
    engine = MLXEngine(tiny_model("llama"), EngineOptions(batch_size=2), clock=lambda: next(ticks))
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}
    others = {**body, "prompt": [9, 8]}
    engine.add([task("one", body), task("same", body), task("other", others)])
    assert engine.generated() == {}
    seen, ended = [], list[Outcome]()
    while len(ended) < 3:
        ended += engine.step()
        seen.append(dict(engine.generated()))
    assert {"one": 1, "same": 1, "other": 1} in seen
    assert {"one": 3, "same": 3, "other": 3} in seen
    assert seen[-1] == {}
    steps = {outcome.id: outcome.steps for outcome in ended}
    for one in steps.values():
        assert isinstance(one, Steps)
        assert (one.preempted, one.failed) == (0, 0)
        assert one.rendered is not None
        assert one.admitted is not None
        assert one.first_token is not None
        assert one.rendered > one.admitted > one.first_token > 0
    asked_first = {task_id: one.first_with for task_id, one in steps.items() if one}
    assert asked_first == {"one": "", "same": "one", "other": ""}


def test_steps_name_the_task_whose_prefix_was_shared() -> None:
    engine = MLXEngine(tiny_model("llama"), EngineOptions(min_prefix_tokens=8))
    body = {"max_tokens": 2, "temperature": 0}
    prompts = {"one": [*range(40), 1], "other": [*range(40), 2], "apart": [3, 4]}
    engine.add([task(name, {**body, "prompt": prompt}) for name, prompt in prompts.items()])
    ended = list[Outcome]()
    while len(ended) < 3:
        ended += engine.step()
    shared = {outcome.id: outcome.steps.first_with for outcome in ended if outcome.steps}
    assert shared == {"one": "", "other": "one", "apart": ""}
