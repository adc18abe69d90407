"""How numbers of things, and errors, are said."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """Says how many of something there are: 1 row, 2 rows, 1,024 rows."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def one_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, or its type when it has none."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def in_a_sentence(error: BaseException) -> str:
    """Gives what an error says as a part of a sentence: other libraries' end with a full stop."""
    return str(error).rstrip(".")
