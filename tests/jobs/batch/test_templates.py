"""Templates over rows: what is put in, and what is refused."""

import json

import pytest

from mlx_rq import RequestError
from mlx_rq.jobs.batch.templates import ChatTemplate, Template


def fill(text: str, **row: object) -> str:
    return Template(text, "--prompt").fill(row)


class TestFilling:
    def test_columns_are_put_in_where_they_are_named(self) -> None:
        text = fill("Write a {style} review of {product}, {style}!", style="short", product="tea")
        assert text == "Write a short review of tea, short!"

    def test_a_column_may_have_any_name(self) -> None:
        row = {"product name": "tea", "a.b": 1, "größe": 2}
        text = "{product name} {a.b} {größe}"
        assert Template(text, "--prompt").fill(row) == "tea 1 2"

    def test_double_braces_are_braces(self) -> None:
        assert fill('Answer as {{"name": "{name}"}}', name="x") == 'Answer as {"name": "x"}'

    def test_braces_in_values_stay_as_they_are(self) -> None:
        assert fill("{a}", a="{b} {{c}}") == "{b} {{c}}"

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("x", "x"),
            (None, ""),
            (float("nan"), ""),
            (3, "3"),
            (2.5, "2.5"),
            (True, "true"),
            ({"a": ["ü"]}, '{"a": ["ü"]}'),
        ],
    )
    def test_values_are_written_as_a_reader_expects(self, value: object, text: str) -> None:
        assert fill("{a}", a=value) == text


class TestRefusing:
    @pytest.mark.parametrize(
        "text", ["{", "}", "{a", "{}", "{a!r}", "{a:>10}", "{a:{b}}", '{"name": 1}']
    )
    def test_what_is_no_plain_column_says_how_braces_are_written(self, text: str) -> None:
        with pytest.raises(RequestError, match=r"'--prompt'.*\{\{ and \}\}"):
            Template(text, "--prompt")

    def test_attributes_are_not_looked_into(self) -> None:
        with pytest.raises(RequestError, match=r"a\.__class__") as refused:
            fill("{a.__class__}", a="x")
        assert refused.value.code == "missing_column"

    def test_missing_columns_are_named_together_with_those_that_there_are(self) -> None:
        template = ChatTemplate(Template("{stlye} {of} {product}", "--prompt"), None, {})
        with pytest.raises(RequestError) as refused:
            template.check(["style", "product"], "rows.csv")
        assert str(refused.value) == (
            "'--prompt' names 'stlye', 'of', which rows.csv does not have. "
            "Its columns: style, product."
        )

    def test_columns_of_any_name_can_be_told(self) -> None:
        template = ChatTemplate(Template("{\ud800}", "--prompt"), None, {})
        with pytest.raises(RequestError) as refused:
            template.body({"\ud801": 1, 7: 2})  # type: ignore[dict-item]
        json.dumps(refused.value.error, ensure_ascii=False).encode()
        assert r"\ud801, 7." in str(refused.value)


class TestTheBody:
    def test_the_constants_come_first(self) -> None:
        template = ChatTemplate(
            Template("Review {product}", "--prompt"),
            Template("Be brief.", "--system"),
            {"seed": 1},
        )
        assert template.body({"product": "tea"}) == {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Review tea"},
            ],
            "seed": 1,
        }
