"""Random windows of sequences that wait, for the tests of the plan."""

from hypothesis import strategies as st

from mlx_rq.engine.scheduling.prefix_tree import PlannedSequence


@st.composite
def windows(draw: st.DrawFn) -> list[PlannedSequence]:
    """Sequences that branch off those before them, so that the prefix tree has many levels."""
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(0, 16))):
        base = draw(st.sampled_from(prompts)) if prompts else []
        kept = draw(st.sampled_from((len(base), len(base) - 1, len(base) // 2, 3, 0)))
        end = draw(st.lists(st.integers(0, 3), max_size=12)) * draw(st.sampled_from((1, 1, 2, 4)))
        prompts.append(base[: max(kept, 0)] + end or [0])
    return [
        PlannedSequence(
            tokens=prompt,
            max_tokens=draw(st.sampled_from((1, 8, 64, 500))),
            priority=draw(st.sampled_from((0, 0, 0, 1, -2))),
            duplicate_key=draw(st.sampled_from((None, None, "greedy", "seed 1"))),
        )
        for prompt in prompts
    ]
