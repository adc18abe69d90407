"""The engine's check of itself: it names what somebody has broken, and nothing else.

Every kind of fault is made on purpose once. Then tasks come, go, are preempted and raise at random,
and the check finds nothing, after any step.
"""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import speaking
from driving import AHEAD_SHARING, finish, greedy, greedy_text, run, task, texts
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import _Poisoned, completion, poisoned
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.interface import IntegrityError
from mlx_rq.engine.kv.prefix_key import key_of
from mlx_rq.engine.scheduling import sequences
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequences import SequenceTable
from mlx_rq.engine.scheduling.state import IllegalTransition, State

PREFIX = [*range(40)]
SLOW_GRAMMAR = {"guided_choice": ["a choice", "that is asked for", "in these tests only"]}


def busy(**options: Any) -> MLXEngine:
    """Four tasks below a prefix that run, the fifth a duplicate of the first; three that wait."""
    _, engine = run(tiny_model("llama"), [], batch_size=4, **options)
    bodies = {str(i): completion([*PREFIX, i, i], max_tokens=40, min_tokens=40) for i in range(7)}
    engine.add([task(name, body) for name, body in {**bodies, "same": bodies["0"]}.items()])
    while engine.totals.decoded_tokens < 4:
        engine.step()
    engine.check()
    assert (engine.running, engine.waiting) == (4, 3)
    return engine


def table_of(engine: MLXEngine) -> SequenceTable:
    return engine._sequences


def one(engine: MLXEngine, state: State) -> TokenSequence:
    """A sequence in a state that answers for no other."""
    everybody = [one for entry in table_of(engine).tasks.values() for one in entry.sequences]
    return next(one for one in reversed(everybody) if one.state is state and not one.duplicates)


def faults(engine: MLXEngine) -> list[str]:
    """What the check says."""
    with pytest.raises(IntegrityError) as raised:
        engine.check()
    return str(raised.value).split("; ")


def forget_the_sequences_of_a_task(engine: MLXEngine) -> str:
    entry = table_of(engine)._tasks["6"]
    table_of(engine).scheduler.remove(entry.sequences[0])
    table_of(engine)._tasks["6"] = entry._replace(sequences=[])
    return "task 6 has no sequences"


def mix_up_two_tasks(engine: MLXEngine) -> str:
    tasks = table_of(engine)._tasks
    tasks["5"], tasks["6"] = tasks["6"], tasks["5"]
    return "task 5 has another's sequences"


def end_a_sequence_without_its_task(engine: MLXEngine) -> str:
    sequence = one(engine, State.WAITING)
    table_of(engine).scheduler.remove(sequence)
    sequence.state = State.DONE
    return f"task {sequence.task_id} waits for nothing, and has not ended"


def lose_one_that_waits(engine: MLXEngine) -> str:
    sequence = one(engine, State.WAITING)
    table_of(engine).scheduler.remove(sequence)
    return f"sequence {sequence.task_id}/0 is waiting, but stands in: nowhere"


def queue_one_twice(engine: MLXEngine) -> str:
    sequence = one(engine, State.WAITING)
    table_of(engine).sequential[sequence] = None
    return f"sequence {sequence.task_id}/0 is waiting, but stands in: waiting and waiting"


def change_a_state_by_the_way(engine: MLXEngine) -> str:
    sequence = next(iter(table_of(engine).running))
    sequence.state = State.WAITING
    return f"sequence {sequence.task_id}/0 is waiting, but stands in: running"


def compile_one_that_runs(engine: MLXEngine) -> str:
    sequence = next(iter(table_of(engine).running))
    table_of(engine).compiling[sequence] = None
    return f"sequence {sequence.task_id}/0 is running, but stands in: compiling and running"


def run_for_nobody(engine: MLXEngine) -> str:
    sequence = next(one for one in table_of(engine).running if not one.duplicates)
    del table_of(engine)._tasks[sequence.task_id]
    return f"sequence {sequence.task_id}/0 is running, and no task asks for it"


def forget_a_duplicate(engine: MLXEngine) -> str:
    (leader,) = [one for one in table_of(engine).running if one.duplicates]
    (duplicate,) = leader.duplicates
    leader.duplicates.clear()
    return f"sequence {duplicate.task_id}/0 is running, but stands in: nowhere"


def answer_for_one_that_was_cancelled(engine: MLXEngine) -> str:
    (leader,) = [one for one in table_of(engine).running if one.duplicates]
    (duplicate,) = leader.duplicates
    del table_of(engine)._tasks[duplicate.task_id]
    return f"sequence {leader.task_id}/0 answers for a duplicate that no task asks for"


def wait_with_a_duplicate(engine: MLXEngine) -> str:
    leader, follower = one(engine, State.WAITING), one(engine, State.RUNNING)
    leader.duplicates = [follower]
    return f"sequence {leader.task_id}/0 is waiting, and has duplicates"


def drop_one_from_the_plan(engine: MLXEngine) -> str:
    table_of(engine).scheduler.head(0.0)
    sequence = table_of(engine).scheduler._batches[0].sequences.popleft()
    return f"sequence {sequence.task_id}/0 waits, but is planned 0 times"


def score_a_prompt_for_nobody(engine: MLXEngine) -> str:
    sequence = one(engine, State.WAITING)
    table_of(engine).prompt_logprobs._sequences += [sequence, sequence]
    return f"the prompt of sequence {sequence.task_id}/0 is to be scored for nobody"


def leave_one_in_the_generator(engine: MLXEngine) -> str:
    running = table_of(engine).running
    uid, sequence = next(iter(running._sequences.items()))
    del running._sequences[uid]
    sequence.shared = None
    return f"the batch is {running.uids}, the generator's {running.generator_uids}"


def hold_the_kv_of_one_too_many(engine: MLXEngine) -> str:
    batch = table_of(engine).running._generator._generation_batch  # type: ignore[union-attr]
    batch.uids = batch.uids[1:]
    return "the caches hold {4} sequences, the generator 3"


def evict_what_a_sequence_refers_to(engine: MLXEngine) -> str:
    held = table_of(engine).running.prefix_cache._held
    prefix = held.pop(next(iter(held)))
    sequence = next(one for one in table_of(engine).running if one.shared is prefix)
    return f"sequence {sequence.task_id}/0 refers to a prefix that was evicted"


def refer_to_a_prefix_of_another_adapter(engine: MLXEngine) -> str:
    sequence = table_of(engine).running.newest
    sequence.prompt_key = key_of(sequence.prompt, adapter=1)
    what = "a prefix of other tokens, or of another adapter"
    return f"sequence {sequence.task_id}/0 refers to {what}"


def hold_a_prefix_while_waiting(engine: MLXEngine) -> str:
    sequence = one(engine, State.WAITING)
    sequence.shared = next(iter(table_of(engine).running.prefix_cache))
    return f"sequence {sequence.task_id}/0 is waiting, and holds KV of a prefix"


def write_to_a_prefix(engine: MLXEngine) -> str:
    (prefix,) = table_of(engine).running.prefix_cache
    suffix = prefix.caches[0].suffix
    suffix.update_and_fetch(mx.zeros((1, 2, 1, 16)), mx.zeros((1, 2, 1, 16)))
    more = prefix.nbytes + suffix.nbytes
    return f"a prefix of 40 tokens takes {more} bytes, not {prefix.nbytes}"


def lose_a_prefix_uncounted(engine: MLXEngine) -> str:
    table_of(engine).running.prefix_cache._held.clear()
    return "1 prefixes were built and 0 evicted, but 0 are held"


def hold_a_prefix_under_anothers_name(engine: MLXEngine) -> str:
    held = table_of(engine).running.prefix_cache._held
    held[b"wrong"] = held.pop(next(iter(held)))
    return "a prefix of 40 tokens is held under another's name"


def miscount_the_tasks(engine: MLXEngine) -> str:
    engine._totals.tasks = 3
    return "3 tasks ever, but 8 now"


BREAKS = [
    forget_the_sequences_of_a_task,
    mix_up_two_tasks,
    end_a_sequence_without_its_task,
    lose_one_that_waits,
    queue_one_twice,
    change_a_state_by_the_way,
    compile_one_that_runs,
    run_for_nobody,
    forget_a_duplicate,
    answer_for_one_that_was_cancelled,
    wait_with_a_duplicate,
    drop_one_from_the_plan,
    score_a_prompt_for_nobody,
    leave_one_in_the_generator,
    hold_the_kv_of_one_too_many,
    evict_what_a_sequence_refers_to,
    refer_to_a_prefix_of_another_adapter,
    hold_a_prefix_while_waiting,
    write_to_a_prefix,
    lose_a_prefix_uncounted,
    hold_a_prefix_under_anothers_name,
    miscount_the_tasks,
]


@pytest.mark.parametrize("breaks", BREAKS, ids=lambda breaks: breaks.__name__)
def test_the_check_names_what_was_broken(breaks: Callable[[MLXEngine], str]) -> None:
    engine = busy()
    wrong = breaks(engine)
    assert wrong in faults(engine)


def test_the_check_names_a_prefix_whose_ground_was_evicted() -> None:
    nested = [completion([*PREFIX, *[200 + i // 2] * 20, i], max_tokens=2) for i in range(4)]
    _, engine = run(tiny_model("llama"), nested)
    prefix_cache = table_of(engine).running.prefix_cache
    (short,) = [prefix for prefix in prefix_cache if prefix.depth == 40]
    del prefix_cache._held[short.key]
    prefix_cache.evicted += 1
    assert faults(engine) == ["a prefix of 60 tokens refers to one that was evicted"] * 2


def test_the_check_names_a_prompt_that_is_never_scored() -> None:
    _, engine = run(tiny_model("llama"), [], chunk=4)
    engine.add([task("a", completion([*range(20)], echo=True, logprobs=1, max_tokens=30))])
    engine.check()
    (sequence,) = table_of(engine).prompt_logprobs
    table_of(engine).prompt_logprobs.remove([sequence])
    assert faults(engine) == ["the prompt of sequence a/0 is never scored"]


def test_a_sequence_cannot_become_what_it_cannot_become_from_where_it_is() -> None:
    engine = busy()
    running, waiting = next(iter(table_of(engine).running)), one(engine, State.WAITING)
    with pytest.raises(IllegalTransition, match="from running to running"):
        table_of(engine)._become(running, State.RUNNING)
    with pytest.raises(IllegalTransition, match="from waiting to waiting"):
        table_of(engine).compiled(waiting)
    engine.cancel(waiting.task_id)
    with pytest.raises(IllegalTransition, match="from done to running"):
        table_of(engine)._become(waiting, State.RUNNING)


def test_nobody_but_the_table_writes_where_a_sequence_stands() -> None:
    fields = {"state", "depth", "shared", "cached_tokens", "duplicates", "finish_reason"}
    folder = Path(sequences.__file__).parent
    writers = {
        module.name
        for module in [*folder.glob("*.py"), *folder.parent.glob("*.py")]
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in fields
    }
    assert writers == {"sequence.py", "sequences.py"}


def test_every_sequence_goes_its_way_through_the_states() -> None:
    """Also those of a task whose grammar takes its time, and one that generates nothing."""
    engine = MLXEngine(speaking.model())
    body = {"prompt": "Say: ", "max_tokens": 30, "temperature": 0}
    engine.add([task("free", body), task("bound", {**body, **SLOW_GRAMMAR})])
    engine.add([task("scored", {**body, "max_tokens": 0, "echo": True, "logprobs": 1})])
    seen: dict[str, list[State]] = {"free": [], "bound": [], "scored": []}
    asked_for = {name: table_of(engine).tasks[name].sequences[0] for name in seen}
    ended: set[str] = set()
    while True:
        for name, sequence in asked_for.items():
            if sequence.state not in seen[name]:
                seen[name].append(sequence.state)
        engine.check()
        if ended == set(seen):
            break
        ended |= {outcome.id for outcome in engine.step()}
    assert seen["free"] == [State.WAITING, State.RUNNING, State.DONE]
    assert seen["bound"][-3:] == [State.WAITING, State.RUNNING, State.DONE]
    assert seen["scored"] == [State.DONE]


def test_sequences_stay_where_they_were_when_an_admission_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    bodies = [completion([i, 7, i], max_tokens=6) for i in range(3)]
    _, engine = run(model, [])
    generator = table_of(engine).running._generator
    insert = generator.insert_sequences

    def raises(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(generator, "insert_sequences", insert)
        raise MemoryError("no room for copies")

    monkeypatch.setattr(generator, "insert_sequences", raises)
    engine.add([task(str(i), body) for i, body in enumerate(bodies)])

    assert engine.step() == []
    engine.check()
    results = finish(engine, 3)

    for index, body in enumerate(bodies):
        assert texts(results[str(index)]) == [greedy_text(model, body)]


class _Raising(_Poisoned):
    """A model that raises once when it is told to."""

    raise_now = False

    def __call__(self, inputs: mx.array, cache: Any = None) -> Any:
        if _Raising.raise_now:
            _Raising.raise_now = False
            raise RuntimeError("once")
        return super().__call__(inputs, cache=cache)


LONGEST = 31
MOVES = [*["step"] * 6, *["add"] * 3, "cancel", "preempt", "preempt", "raise", "poison"]


@pytest.mark.slow
@settings(max_examples=15)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(MOVES), st.integers(0, 2**16)), min_size=20, max_size=60
    ),
    share_from=st.sampled_from([1, 10**9]),
    kv_tokens=st.sampled_from([150 + 4 * AHEAD_SHARING, 10_000]),
)
def test_nothing_is_lost_track_of_whatever_happens(
    moves: list[tuple[str, int]], share_from: int, kv_tokens: int
) -> None:
    engine = chaotic_engine(share_from, kv_tokens)
    bodies: dict[str, Any] = {}
    results: dict[str, Any] = {}
    cancelled: set[str] = set()
    for number, (move, dice) in enumerate([*moves, *[("step", 0)] * 2000]):
        table = table_of(engine)
        if move in ("add", "poison"):
            body = random_body(dice, poison=move == "poison")
            new = {f"{move}{number}-{i}": body for i in range(1 + dice % 3)}
            bodies |= new
            assert engine.add([task(name, body, rank=dice % 3) for name, body in new.items()]) == []
        elif move == "cancel" and (open_tasks := sorted(table.tasks)):
            name = open_tasks[dice % len(open_tasks)]
            engine.cancel(name)
            cancelled.add(name)
        elif move == "preempt" and (running := list(table.running)):
            table.preempt(running[dice % len(running)])
        elif move == "raise":
            _Raising.raise_now = True
        elif move == "step":
            for outcome in engine.step():
                assert outcome.id not in results
                results[outcome.id] = outcome.result
        engine.check()
        if number >= len(moves) and not table.tasks and not table.running:
            break
    _Raising.raise_now = False
    assert results.keys() == bodies.keys() - cancelled
    assert (engine.running, engine.waiting, list(engine.task_ids)) == (0, 0, [])
    raised = sum(move == "raise" for move, _ in moves)
    failed = [name for name, result in results.items() if "error" in result]
    assert sum(not name.startswith("poison") for name in failed) <= raised
    for name, result in results.items():
        if name not in failed:
            assert texts(result) == [expected(bodies[name])] * bodies[name]["n"]


def expected(body: dict[str, Any]) -> str:
    said = longest(tuple(body["prompt"]))[: body["max_tokens"]]
    tokens = [*body["prompt"], *said] if body.get("echo") else said
    return str(tiny_model("llama").tokenizer.decode(tokens, skip_special_tokens=True))


@cache
def longest(prompt: tuple[int, ...]) -> list[int]:
    return greedy(tiny_model("llama"), prompt, LONGEST)


def chaotic_engine(share_from: int, kv_tokens: int) -> MLXEngine:
    model = poisoned(tiny_model("llama"))
    fields = {name: getattr(model, name) for name in model.__dataclass_fields__}
    raising = type(model)(**{**fields, "model": _Raising(tiny_model("llama").model)})
    budget = {"kv_bytes": 768 * kv_tokens, "reserve": 1}
    _, engine = run(raising, [], share_from=share_from, chunk=16, **budget)
    return engine


def random_body(dice: int, *, poison: bool) -> dict[str, Any]:
    """One of few prompts, so that duplicates and shared prefixes are common; some are scored."""
    prompt = [*PREFIX[: 20 * (dice % 3)], *([_Poisoned.POISON] if poison else []), dice % 5, 1]
    scored = {"echo": True, "logprobs": 1} if dice % 7 == 0 else {}
    return completion(prompt, max_tokens=1 + dice % LONGEST, n=1 + dice % 2, **scored)
