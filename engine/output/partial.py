"""What stands of an answer that is still being written: what its end will not take back.

The counterpart of `engine/formats/parser.py` and `Form.read` for a text that is not whole. Every
part told here is a beginning of the same part of the finished answer, so that it can be shown at
once.
"""

from collections.abc import Mapping, Sequence

from mlx_rq.engine.interface import Partial
from mlx_rq.engine.scheduling.sequence import Row
from mlx_rq.engine.structured.output_format import Form
from mlx_rq.engine.text.detokenizer import held_back
from mlx_rq.jobs.openai.requests import ChatRequest, CompletionRequest, JobRequest


def partials(request: JobRequest, rows: Sequence[Row], leaders: Mapping[Row, Row]) -> list[Partial]:
    """Tells what the choices of a task have said so far; those that have said nothing are left out.

    `leaders` has the rows that speak for their twins. With `best_of`, which rows will be answered
    with is known at the end only, so nothing is told.
    """
    if isinstance(request, CompletionRequest) and request.generated != (request.n or 1):
        return []
    told = [_partial(request, row, leaders.get(row, row)) for row in rows]
    return [partial for partial in told if partial.reasoning or partial.content]


def _partial(request: JobRequest, row: Row, leader: Row) -> Partial:
    if not leader.text.tokens:
        return Partial(row.index)
    reasoning, content = standing(leader.text.standing(), row.form)
    if isinstance(request, CompletionRequest) and request.echo:
        content = row.prompt_text(request) + content
    return Partial(row.index, reasoning, content)


def standing(text: str, form: Form) -> tuple[str, str]:
    """Takes a text that goes on apart: what stands of its reasoning, and of its content."""
    if not isinstance(form.request, ChatRequest):
        return "", text
    dialect = form.dialect
    start, end = dialect.think_start, dialect.think_end
    if start is None or end is None:
        return "", _content(text, form)
    if form.reasoning is not True:
        stripped = text.lstrip()
        if start.startswith(stripped):
            return "", ""  # whether it reasons is not said yet
        if not stripped.startswith(start):
            return "", _content(text, form)
        text = stripped[len(start) :]
    reasoning, ended, rest = text.partition(end)
    if not ended:
        return _clean(held_back(reasoning, [end]).strip(), form), ""
    return form.without_specials(reasoning.strip()), _content(rest.lstrip(), form)


def _content(text: str, form: Form) -> str:
    if not form.tools.usable:
        return _clean(text, form)
    call_start = form.dialect.call_start
    before, called, _ = text.partition(call_start)
    if called:
        return form.without_specials(before).strip()
    content = _clean(held_back(text, [call_start]), form)
    # White space around it is dropped where a call follows, and kept where none does.
    return "" if content[:1].isspace() else content.rstrip()


def _clean(text: str, form: Form) -> str:
    """Takes the special tokens out of a text, and what may be the beginning of one."""
    if not form.shows_marks:
        return text
    hidden = form.dialect.hidden
    # Twice: where one is taken out, the text around it may come to look like another.
    return held_back(form.without_specials(held_back(text, hidden)), hidden)
