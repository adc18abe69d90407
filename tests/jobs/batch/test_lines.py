"""How lines are read from files as people send them, and what is said of those that are none."""

import json
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import CHAT, batch_line, refusal, write_jsonl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_rq.jobs.batch import lines as batch_lines
from mlx_rq.jobs.batch.lines import BatchFile, Line


def lines_of(path: Path, **overrides: Any) -> list[Line]:
    return list(BatchFile(path, path.name, overrides))


def read(tmp_path: Path, content: bytes, **overrides: Any) -> list[Line]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return lines_of(path, **overrides)


def encoded(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


class TestWhereALineEnds:
    @pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
    def test_only_at_a_newline_not_at_what_python_takes_for_one(
        self, tmp_path: Path, mark: str
    ) -> None:
        text = json.dumps(batch_line("a", f"one{mark}two"), ensure_ascii=False)
        (line,) = read(tmp_path, text.encode() + b"\n")
        if mark >= " ":  # control characters are not JSON, but still no end of the line
            assert line.body["messages"][0]["content"] == f"one{mark}two"

    def test_a_byte_order_mark_is_not_part_of_the_first(self, tmp_path: Path) -> None:
        lines = read(tmp_path, b"\xef\xbb\xbf" + encoded(batch_line("a"), batch_line("b")))
        assert [(line.custom_id, line.fault) for line in lines] == [("a", None), ("b", None)]

    def test_crlf_blank_lines_and_a_missing_last_newline(self, tmp_path: Path) -> None:
        one, two = (json.dumps(batch_line(name)).encode() for name in "ab")
        lines = read(tmp_path, b"\r\n" + one + b"\r\n\r\n  \n" + two)
        assert [(line.custom_id, line.number) for line in lines] == [("a", 2), ("b", 5)]

    @given(contents=st.lists(st.text(), min_size=1, max_size=5))
    @settings(
        max_examples=50,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    def test_any_text_arrives_as_it_was(self, tmp_path: Path, contents: list[str]) -> None:
        records = [batch_line(f"r{number}", text) for number, text in enumerate(contents)]
        lines = lines_of(write_jsonl(tmp_path / "in.jsonl", records))
        assert [line.body["messages"][0]["content"] for line in lines] == contents


GOOD = batch_line("x")


def without(field: str) -> dict[str, Any]:
    return {name: value for name, value in GOOD.items() if name != field}


class TestABadLine:
    @pytest.mark.parametrize(
        ("raw", "code", "param"),
        [
            (b'{"custom_id": "x", ', "invalid_json_line", None),
            (b"[]", "invalid_json_line", None),
            (b'"text"', "invalid_json_line", None),
            (b"\xff\xfe{\x00", "invalid_json_line", None),
            (b"[" * 100_000, "invalid_json_line", None),
            (b'{"custom_id": "x", "custom_id": "y"}', "invalid_json_line", None),
            (b'{"custom_id": "x", "body": {"a": 1, "b": 2, "a": 1}}', "invalid_json_line", None),
            (encoded(without("custom_id")), "missing_required_parameter", "custom_id"),
            (encoded(without("method")), "missing_required_parameter", "method"),
            (encoded(without("url")), "missing_required_parameter", "url"),
            (encoded(without("body")), "missing_required_parameter", "body"),
            (encoded({**GOOD, "body": None}), "missing_required_parameter", "body"),
            (encoded({**GOOD, "body": "x"}), "invalid_type", "body"),
            (encoded({**GOOD, "body": []}), "invalid_type", "body"),
            (encoded({**GOOD, "custom_id": 7}), "invalid_type", "custom_id"),
            (encoded({**GOOD, "custom_id": ""}), "invalid_value", "custom_id"),
            (encoded({**GOOD, "custom_id": "\ud800"}), "invalid_value", "custom_id"),
            (encoded({**GOOD, "method": "GET"}), "invalid_value", "method"),
            (encoded({**GOOD, "url": "/v1/embeddings"}), "invalid_url", "url"),
        ],
    )
    def test_says_what_is_wrong_and_leaves_the_others_alone(
        self, tmp_path: Path, raw: bytes, code: str, param: str | None
    ) -> None:
        before, bad, after = read(
            tmp_path, encoded(GOOD) + raw.strip() + b"\n" + encoded(batch_line("y"))
        )
        assert bad.fault is not None
        assert (bad.number, bad.fault.code, bad.fault.param) == (2, code, param)
        assert refusal(bad) is bad.fault
        assert before.fault is None
        assert after.fault is None

    def test_a_line_without_end_is_not_read_into_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(batch_lines, "MAX_LINE_BYTES", 1000)
        endless = encoded(batch_line("a", "x" * 5000))
        bad, good = read(tmp_path, endless + encoded(batch_line("b")))
        assert bad.fault is not None
        assert (bad.fault.code, bad.number) == ("request_too_large", 1)
        assert (good.custom_id, good.number) == ("b", 2)

    def test_one_nested_as_deep_as_can_be_read_is_no_end_of_the_others(
        self, tmp_path: Path
    ) -> None:
        deep = b"".join(
            b'{"custom_id": "a%d", "method": "POST", "url": "%s", "body": {"x": %s1%s}}\n'
            % (depth, CHAT.encode(), b"[" * depth, b"]" * depth)
            for depth in range(900, 1000)
        )
        for line in read(tmp_path, deep + encoded({**GOOD, "body": [[1]] * 1000})):
            assert refusal(line) is not None

    def test_two_equal_bad_lines_are_two(self, tmp_path: Path) -> None:
        one, two = read(tmp_path, b"oops\noops\n")
        assert one.fingerprint != two.fingerprint


class TestTheFingerprint:
    def test_changes_with_all_that_shapes_the_answer(self, tmp_path: Path) -> None:
        plain = batch_line("a")
        variants = [
            read(tmp_path, encoded(plain)),
            read(tmp_path, encoded(batch_line("b"))),
            read(tmp_path, encoded(batch_line("a", "Say ho."))),
            read(tmp_path, encoded(batch_line("a", seed=1))),
            read(tmp_path, encoded({**plain, "url": "/v1/completions"})),
            read(tmp_path, encoded(plain), model="other"),
            read(tmp_path, encoded(plain), temperature=0),
        ]
        assert len({line.fingerprint for (line,) in variants}) == len(variants)

    def test_does_not_change_with_place_and_spacing(self, tmp_path: Path) -> None:
        compact = json.dumps(batch_line("a"), separators=(",", ":")).encode()
        (one,) = read(tmp_path, encoded(batch_line("a")))
        (two,) = read(tmp_path, b"\n\n" + compact)
        assert one.fingerprint == two.fingerprint


class TestRefusal:
    def test_settings_win_over_the_line(self, tmp_path: Path) -> None:
        (line,) = read(tmp_path, encoded(batch_line("a", model="gpt", seed=1)), model="smollm2")
        assert (line.body["model"], line.body["seed"]) == ("smollm2", 1)
        assert refusal(line) is None

    def test_a_body_is_judged_as_its_url_says(self, tmp_path: Path) -> None:
        (line,) = read(tmp_path, encoded({**GOOD, "body": {"prompt": "Once"}, "url": CHAT}))
        error = refusal(line)
        assert error is not None
        assert (error.code, error.param) == ("missing_required_parameter", "messages")

    def test_responses_are_taken(self, tmp_path: Path) -> None:
        (line,) = read(tmp_path, encoded({**GOOD, "url": "/v1/responses", "body": {"input": "x"}}))
        assert refusal(line) is None
