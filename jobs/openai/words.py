"""How numbers of things are said."""


def counted(number: int, one: str, many: str | None = None) -> str:
    """Says how many of something there are: 1 row, 2 rows, 1,024 rows."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
