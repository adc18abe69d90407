"""Checks a whole input before anything runs: none of its lines may be bad, no custom_id twice."""

from collections.abc import Iterator

from mlx_rq.jobs.batch.lines import Line, Source, digest
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.words import counted


def checked(source: Source, *, skip_bad_lines: bool) -> Iterator[Line]:
    """Yields the lines of an input, of which 16 bytes are kept.

    Raises RequestError at a custom_id that occurs twice, and at the end where a line is bad or
    there is none.
    """
    seen: set[bytes] = set()
    bad = total = 0
    first_bad: Line | None = None
    for line in source:
        total += 1
        if line.custom_id is not None:
            identity = digest(line.custom_id.encode())
            if identity in seen:
                raise _duplicate(source, line)
            seen.add(identity)
        if line.fault is not None and not skip_bad_lines:
            bad += 1
            first_bad = first_bad or line
        yield line
    if first_bad is not None and first_bad.fault is not None:
        raise _bad(source, first_bad, first_bad.fault, bad - 1)
    if not total:
        raise RequestError(f"{source.name} holds no requests.", code="empty_file")


def _duplicate(source: Source, line: Line) -> RequestError:
    first = next(other for other in source if other.custom_id == line.custom_id)
    unit = source.unit
    return RequestError(
        f"{source.name}, {unit} {line.number}: the custom_id {line.custom_id!r} is that "
        f"of {unit} {first.number} already. Nothing was run. Give every {unit} its own.",
        code="duplicate_custom_id",
        param="custom_id",
    )


def _bad(source: Source, line: Line, fault: RequestError, others: int) -> RequestError:
    unit = source.unit
    more = f" {counted(others, 'other is', 'others are')} wrong, too." if others else ""
    return RequestError(
        f"{source.name}, {unit} {line.number}: {fault}{more} Nothing was run. Correct "
        f"the input, or take --skip-bad-lines to get an error record for such a {unit}.",
        code=fault.code,
        param=fault.param,
    )
