"""What must hold of an engine between two steps, and a check that says what does not.

- Every task has sequences, each in exactly one state, and in the one index that goes with it.
- A duplicate is answered by one sequence that lives.
- Every byte of KV has an owner: a held prefix, or a sequence that is RUNNING.
- What is counted agrees with what is there.
"""

from collections import Counter
from collections.abc import Iterator

from mlx_rq.engine.interface import IntegrityError, Totals
from mlx_rq.engine.kv.sharing import own_bytes
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequences import SequenceTable
from mlx_rq.engine.scheduling.state import State


def check(table: SequenceTable, totals: Totals) -> None:
    """Raises IntegrityError, which says all that is wrong, where something does not hold."""
    faults = [
        *_tasks(table),
        *_indexes(table),
        *_plan(table),
        *_prompts(table),
        *_batch(table),
        *_prefixes(table),
        *_counters(table, totals),
    ]
    if faults:
        raise IntegrityError("; ".join(faults))


def _tasks(table: SequenceTable) -> Iterator[str]:
    """Every task has sequences, its own, and waits for one of them at least."""
    scored = set(table.prompt_logprobs)
    for task_id, (task, sequences) in table.tasks.items():
        if not sequences:
            yield f"task {task_id} has no sequences"
        elif task.id != task_id or any(one.task_id != task_id for one in sequences):
            yield f"task {task_id} has another's sequences"
        elif all(one.state is State.DONE and one not in scored for one in sequences):
            yield f"task {task_id} waits for nothing, and has not ended"


def _indexes(table: SequenceTable) -> Iterator[str]:
    """Each sequence is where its state says, once; who is of no task answers for somebody."""
    asked_for = {one for _, sequences in table.tasks.values() for one in sequences}
    places: dict[TokenSequence, list[State]] = {one: [] for one in asked_for}
    for state, index in (
        (State.COMPILING, table.compiling),
        (State.WAITING, table.scheduler),
        (State.WAITING, table.sequential),
        (State.RUNNING, table.running),
        (State.RUNNING, [one for leader in table.running for one in leader.duplicates]),
    ):
        for sequence in index:
            places.setdefault(sequence, []).append(state)
    for sequence, found in places.items():
        expected = [] if sequence.state is State.DONE else [sequence.state]
        if found != expected:
            where = " and ".join(state.value for state in found) or "nowhere"
            yield f"{_name(sequence)} is {sequence.state.value}, but stands in: {where}"
        leads = asked_for.intersection(sequence.duplicates)
        if sequence not in asked_for and not leads:
            yield f"{_name(sequence)} is {sequence.state.value}, and no task asks for it"
        if sequence.duplicates and sequence.state is not State.RUNNING:
            yield f"{_name(sequence)} is {sequence.state.value}, and has duplicates"
        if len(leads) != len(sequence.duplicates):
            yield f"{_name(sequence)} answers for a duplicate that no task asks for"


def _plan(table: SequenceTable) -> Iterator[str]:
    """Each sequence that waits is planned once, itself or as a duplicate of one that waits."""
    planned = table.scheduler.planned
    if planned is None:
        return  # some came or went: it is planned again before it is read
    waiting = Counter(table.scheduler)
    for sequence in waiting | planned:
        if planned[sequence] != waiting[sequence]:
            yield f"{_name(sequence)} waits, but is planned {planned[sequence]} times"


def _prompts(table: SequenceTable) -> Iterator[str]:
    """Whose prompt is to be scored stands in line for it, and nobody without a task does."""
    scored = Counter(table.prompt_logprobs)
    asked_for = {one for _, sequences in table.tasks.values() for one in sequences}
    for sequence in asked_for:
        if sequence.score is not None and not sequence.score.done and not scored[sequence]:
            yield f"the prompt of {_name(sequence)} is never scored"
    for sequence, times in scored.items():
        if times > 1 or sequence not in asked_for:
            yield f"the prompt of {_name(sequence)} is to be scored for nobody"


def _batch(table: SequenceTable) -> Iterator[str]:
    """The generator holds KV of the sequences of the batch, and of no others."""
    running = table.running
    if sorted(running.uids) != sorted(running.generator_uids):
        yield f"the batch is {sorted(running.uids)}, the generator's {running.generator_uids}"
    if (cached := running.cached_sequences) != {len(running.generator_uids)}:
        yield f"the caches hold {cached} sequences, the generator {len(running.generator_uids)}"
    held, batch = set(running.prefix_cache), set(running)
    for sequence in batch:
        if sequence.shared is not None and not held.issuperset(sequence.shared.chain):
            yield f"{_name(sequence)} refers to a prefix that was evicted"
        if sequence.shared is not None and not sequence.key.startswith(sequence.shared.key):
            yield f"{_name(sequence)} refers to a prefix of other tokens, or of another adapter"
    everybody = (one for _, sequences in table.tasks.values() for one in sequences)
    for sequence in everybody:
        if sequence.shared is not None and sequence not in batch:
            yield f"{_name(sequence)} is {sequence.state.value}, and holds KV of a prefix"


def _prefixes(table: SequenceTable) -> Iterator[str]:
    """A held prefix takes the bytes that it says, and what it refers to is held, too."""
    prefix_cache = table.running.prefix_cache
    held = set(prefix_cache)
    for prefix in held:
        nbytes = own_bytes(prefix.caches)
        if prefix.nbytes != nbytes:
            yield f"a prefix of {prefix.depth} tokens takes {nbytes} bytes, not {prefix.nbytes}"
        if not held.issuperset(prefix.chain):
            yield f"a prefix of {prefix.depth} tokens refers to one that was evicted"
        if not prefix_cache.holds(prefix.key):
            yield f"a prefix of {prefix.depth} tokens is held under another's name"
    if prefix_cache.built - prefix_cache.evicted != len(held):
        yield (
            f"{prefix_cache.built} prefixes were built and {prefix_cache.evicted} evicted, "
            f"but {len(held)} are held"
        )


def _counters(table: SequenceTable, totals: Totals) -> Iterator[str]:
    """The totals are those of what is there."""
    prefixes = list(table.running.prefix_cache)
    for what, said, found in (
        ("prefixes held", totals.prefixes_held, len(prefixes)),
        ("bytes of prefixes", totals.prefix_bytes, sum(prefix.nbytes for prefix in prefixes)),
        ("sequences running", len(table.running), len(list(table.running))),
        ("sequences waiting", len(table.scheduler), len(list(table.scheduler))),
    ):
        if said != found:
            yield f"{what}: {said} by the count, {found} there"
    if totals.tasks < len(table.tasks):
        yield f"{totals.tasks} tasks ever, but {len(table.tasks)} now"


def _name(sequence: TokenSequence) -> str:
    return f"sequence {sequence.task_id}/{sequence.index}"
