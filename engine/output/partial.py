"""What stands of an answer that is still being written: what its end will not take back.

The counterpart of `engine/formats/parser.py` and `OutputFormat.read` for a text that is not whole.
Every part told here is a beginning of the same part of the finished answer, so that it can be shown
at once.
"""

from collections.abc import Collection, Mapping, Sequence

from mlx_rq.engine.interface import Partial
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequences import SequenceTable
from mlx_rq.engine.structured.output_format import OutputFormat
from mlx_rq.engine.text.detokenizer import held_back


def partials(task_ids: Collection[str], table: SequenceTable) -> dict[str, list[Partial]]:
    """Tells what tasks have said so far, but for those that said nothing yet or ended."""
    leaders = {
        duplicate: sequence for sequence in table.running for duplicate in sequence.duplicates
    }
    said = {
        task_id: _of_choices(entry.sequences, leaders)
        for task_id in task_ids
        if (entry := table.tasks.get(task_id)) is not None
    }
    return {task_id: told for task_id, told in said.items() if told}


def _of_choices(
    sequences: Sequence[TokenSequence], leaders: Mapping[TokenSequence, TokenSequence]
) -> list[Partial]:
    """Tells what the choices of a task have said so far; those that have said nothing are left out.

    `leaders` has the sequences that speak for their duplicates. With `best_of`, which sequences
    will be answered with is known at the end only, so nothing is told.
    """
    request = sequences[0].output_format.request
    if request.generated != request.returned:
        return []
    told = [_partial(sequence, leaders.get(sequence, sequence)) for sequence in sequences]
    return [partial for partial in told if partial.reasoning or partial.content]


def _partial(sequence: TokenSequence, leader: TokenSequence) -> Partial:
    if not leader.begun:
        return Partial(sequence.index)
    reasoning, content = partial(leader.text.partial(), sequence.output_format)
    return Partial(sequence.index, reasoning, sequence.echoed + content)


def partial(text: str, output_format: OutputFormat) -> tuple[str, str]:
    """Takes a text that goes on apart: what stands of its reasoning, and of its content."""
    model_format = output_format.model_format
    start, end = model_format.think_start, model_format.think_end
    if start is None or end is None:
        return "", _content(text, output_format)
    if output_format.reasoning is not True:
        stripped = text.lstrip()
        if start.startswith(stripped):
            return "", ""  # whether it reasons is not said yet
        if not stripped.startswith(start):
            return "", _content(text, output_format)
        text = stripped[len(start) :]
    reasoning, ended, rest = text.partition(end)
    if not ended:
        return _clean(held_back(reasoning, [end]).strip(), output_format), ""
    return output_format.without_specials(reasoning.strip()), _content(rest.lstrip(), output_format)


def _content(text: str, output_format: OutputFormat) -> str:
    if not output_format.tools.usable:
        return _clean(text, output_format)
    call_start = output_format.model_format.call_start
    before, called, _ = text.partition(call_start)
    if called:
        return output_format.without_specials(before).strip()
    content = _clean(held_back(text, [call_start]), output_format)
    # White space around it is dropped where a call follows, and kept where none does.
    return "" if content[:1].isspace() else content.rstrip()


def _clean(text: str, output_format: OutputFormat) -> str:
    """Takes the special tokens out of a text, and what may be the beginning of one."""
    if not output_format.shows_marks:
        return text
    hidden = output_format.model_format.hidden
    # Twice: where one is taken out, the text around it may come to look like another.
    return held_back(output_format.without_specials(held_back(text, hidden)), hidden)
