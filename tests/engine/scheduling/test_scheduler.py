"""The order in which sequences are admitted, as they come and go."""

from typing import Any

from driving import task
from effort import at_most
from tiny import tiny_model

from mlx_rq.engine.kv.prefix_key import Key, key_of
from mlx_rq.engine.scheduling.choices import sequences_of
from mlx_rq.engine.scheduling.scheduler import Scheduler
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.structured.output_format import OutputFormats


def sequences(bodies: list[dict[str, Any]], now: float = 0.0) -> list[TokenSequence]:
    model = tiny_model("llama")
    formats = OutputFormats(model)
    return [
        sequence
        for number, body in enumerate(bodies)
        for sequence in sequences_of(task(str(number), body), model, formats, now=now)
    ]


def asking(prefix: int, count: int, *, max_tokens: int = 8) -> list[dict[str, Any]]:
    """Bodies that share a prefix of 40 tokens, and end in a token of their own."""
    return [
        {"prompt": [prefix] * 40 + [100 + own], "max_tokens": max_tokens} for own in range(count)
    ]


def add(waiting: Scheduler, some: list[TokenSequence]) -> None:
    for sequence in some:
        waiting.add(sequence)


def take(waiting: Scheduler, count: int) -> None:
    head = waiting.head(0.0)
    assert head is not None
    for sequence in list(head.sequences)[:count]:
        waiting.take(sequence)


def scheduler() -> Scheduler:
    return Scheduler(batch_size=2, min_prefix_tokens=16, max_wait=30.0)


def test_a_prefix_in_work_is_not_put_aside_for_a_heavier_one_that_comes() -> None:
    waiting = scheduler()
    add(waiting, sequences(asking(7, 4)))
    head = waiting.head(0.0)
    assert head is not None
    assert head.prefixes == (key_of([7] * 40),)
    take(waiting, 2)

    add(waiting, sequences(asking(9, 30, max_tokens=50)))

    head = waiting.head(0.0)
    assert head is not None
    assert head.prefixes == (key_of([7] * 40),)
    take(waiting, 2)
    head = waiting.head(0.0)
    assert head is not None
    assert head.prefixes == (key_of([9] * 40),)


def test_one_that_waited_too_long_goes_before_the_prefix_in_work() -> None:
    waiting = scheduler()
    add(waiting, sequences([{"prompt": [3] * 20, "max_tokens": 8}], now=0.0))
    add(waiting, sequences(asking(7, 4, max_tokens=50), now=20.0))
    head = waiting.head(20.0)
    assert head is not None
    assert head.prefixes == (key_of([7] * 40),)
    take(waiting, 2)

    head = waiting.head(31.0)
    assert head is not None
    assert head.prefixes == ()


def test_the_next_use_of_a_prefix_is_that_of_the_first_batch_on_it_or_below_it() -> None:
    waiting = scheduler()
    system = [{"prompt": [5] * 20 + body["prompt"], "max_tokens": 8} for body in asking(7, 2)]
    add(waiting, sequences([*system, *({**b, "prompt": [5] * 20 + [9, 9]} for b in system[:1])]))
    add(waiting, sequences(asking(8, 2, max_tokens=1)))
    assert waiting.head(0.0) is not None

    uses = waiting.next_use()

    assert uses[key_of([5] * 20)] == min(uses.values()) == 0
    assert uses[key_of([8] * 40)] == max(uses.values())


def lonely(now: float = 0.0) -> list[TokenSequence]:
    return sequences([{"prompt": [3] * 20, "max_tokens": 1}], now=now)


def test_a_lone_sequence_among_many_goes_first_and_puts_no_prefix_aside() -> None:
    waiting = scheduler()
    add(waiting, sequences([*asking(7, 6, max_tokens=8), *asking(9, 6, max_tokens=50)]))
    take(waiting, 2)  # of those on 9, which have more to decode
    add(waiting, lonely())

    head = waiting.head(0.0)
    assert head is not None
    assert head.prefixes == ()
    take(waiting, 1)

    head = waiting.head(0.0)
    assert head is not None
    assert head.prefixes == (key_of([9] * 40),)


def test_a_lone_sequence_goes_before_those_that_waited_too_long_one_of_eight_times() -> None:
    waiting = scheduler()
    add(waiting, sequences([body for prefix in range(5, 15) for body in asking(prefix, 8)]))
    lone: list[bool] = []
    for number in range(32):
        if number == 0 or lone[-1]:  # whenever one was taken, the next one comes
            add(waiting, sequences([{"prompt": [200 + number] * 20, "max_tokens": 1}], now=31.0))
        else:  # another one, and all is planned again
            add(waiting, sequences(asking(5, 1), now=31.0))
        head = waiting.head(31.0)
        assert head is not None
        lone.append(head.sequences[0].tokens[0] >= 200)
        waiting.take(head.sequences[0])
    assert lone == [True, *[False] * 7] * 4


def test_one_that_others_are_to_follow_is_not_lone() -> None:
    waiting = scheduler()
    add(waiting, sequences(asking(7, 12)))
    (first,) = lonely()
    first.others_follow = True
    waiting.add(first)

    head = waiting.head(0.0)
    assert head is not None
    assert head.prefixes == (key_of([7] * 40),)


def test_where_many_are_lone_they_have_no_right_of_way() -> None:
    waiting = scheduler()
    add(waiting, sequences(asking(9, 4, max_tokens=50)))
    add(waiting, lonely())

    head = waiting.head(0.0)
    assert head is not None
    assert head.prefixes == (key_of([9] * 40),)


def test_prompts_that_go_on_from_one_another_are_planned_soon() -> None:
    """As those of a long conversation, whose turns were all submitted."""
    waiting = Scheduler(batch_size=4, min_prefix_tokens=1, max_wait=30.0)
    bodies = [{"prompt": [7] * turn, "max_tokens": 8} for turn in range(1, 1001)]
    add(waiting, sequences(bodies))

    with at_most(12):
        head = waiting.head(0.0)

    assert head is not None
    assert sum(1 for _ in waiting.from_last()) == 1000
    with at_most(20):
        uses = [waiting.next_use() for _ in range(40)][-1]
    expected: dict[Key, float] = {}
    for place, batch in enumerate(waiting._batches):
        for prefix in batch.prefixes:
            expected.setdefault(prefix, place)
    assert uses == expected
