"""JSON that stays on its line, whoever reads it."""

import json

from mlx_rq.jobs.openai.json_line import json_line


def test_nothing_in_it_ends_a_line_and_nothing_is_lost() -> None:
    value = {"text": "".join(map(chr, range(0x3000))).encode(errors="ignore").decode(), "é": 1}
    line = json_line(value)
    assert line.splitlines() == [line]
    assert json.loads(line) == value
    assert "é" in line
