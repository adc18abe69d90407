"""How numbers of things, and errors, are said."""

from mlx_rq.jobs.openai.words import counted, one_line


def test_one_is_said_as_one() -> None:
    assert [counted(number, "row") for number in (0, 1, 2, 1024)] == [
        "0 rows",
        "1 row",
        "2 rows",
        "1,024 rows",
    ]
    assert counted(1, "job waits", "jobs wait") == "1 job waits"
    assert counted(2, "job waits", "jobs wait") == "2 jobs wait"


def test_an_error_is_said_in_a_line() -> None:
    assert one_line(ValueError("\n  first \nsecond")) == "first"
    assert one_line(MemoryError()) == "MemoryError"
