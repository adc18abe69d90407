"""Fills prompts from the columns of a row: `Write a {style} review of {product}`.

Only plain column names stand in braces. Nothing of a row is ever evaluated, looked into or
formatted by instructions of the template.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from mlx_rq.jobs.batch.values import plain_text, utf8
from mlx_rq.jobs.openai.errors import RequestError


class Template:
    """A text with `{column}` in it; `{{` and `}}` stand for braces.

    Raises RequestError where the text cannot be read so. `option` is what errors call it.
    """

    def __init__(self, text: str, option: str) -> None:
        self._option = option
        try:
            self._parts = list(Formatter().parse(text))
        except ValueError as error:
            raise self._invalid(f"{error}") from None
        for _, column, format_spec, conversion in self._parts:
            if column == "":
                raise self._invalid("{} names no column")
            if format_spec or conversion:
                raise self._invalid(f"{{{column}…}} asks for a format; only {{column}} is known")

    def _invalid(self, fault: str) -> RequestError:
        return RequestError(
            f"Invalid '{self._option}': {fault}. Write {{{{ and }}}} where braces are meant.",
            code="invalid_value",
            param=self._option,
        )

    @property
    def columns(self) -> list[str]:
        """The columns that the template names, in its order."""
        return list(dict.fromkeys(column for _, column, _, _ in self._parts if column is not None))

    def check(self, columns: Collection[str], where: str) -> None:
        """Raises RequestError, naming the columns, where the template asks for others."""
        if missing := [column for column in self.columns if column not in columns]:
            known = f"Its columns: {', '.join(map(str, columns))}" if columns else "It has none"
            raise RequestError(
                f"'{self._option}' names {', '.join(map(repr, missing))}, which {where} does not "
                f"have. {known}.",
                code="missing_column",
                param=missing[0],
            )

    def fill(self, row: Mapping[str, Any]) -> str:
        """Puts a row's values in; raises RequestError where the row lacks a column."""
        self.check(row.keys(), "the row")
        return "".join(
            literal + (cell_text(row[column], column) if column is not None else "")
            for literal, column, _, _ in self._parts
        )


@dataclass(frozen=True)
class ChatTemplate:
    """What becomes of a row: a chat of one user turn. `settings` are the body's other fields."""

    prompt: Template
    system: Template | None
    settings: Mapping[str, Any]

    def check(self, columns: Collection[str], where: str) -> None:
        """Raises RequestError where a template names a column that is not among these."""
        for template in (self.system, self.prompt):
            if template is not None:
                template.check(columns, where)

    def body(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the body of a row's chat."""
        messages = [{"role": "user", "content": self.prompt.fill(row)}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system.fill(row)})
        return {"messages": messages, **self.settings}


def cell_text(value: Any, column: str) -> str:
    """Writes a value as a prompt shows it: text as it is, nothing for null, JSON for lists.

    Raises RequestError where that cannot be, as where it is nested too deep, or no text.
    """
    if isinstance(value, float) and value != value:  # how many tables write null
        return ""
    try:
        return plain_text(value, utf8)
    except UnicodeDecodeError as error:
        raise RequestError(
            f"The column {column!r} holds bytes here that are no UTF-8 text: {error}.",
            code="invalid_row",
        ) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"A value cannot be written: {error}.", code="invalid_row") from None
