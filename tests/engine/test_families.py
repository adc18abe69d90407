"""docs/families.md: what the engine does with every model of the installed mlx-lm, and rightly so.

Here are those families tried whose ways differ; `make families` tries them all.
"""

from importlib.metadata import version

import pytest
from families import NOTES, TABLE, UNTRIED, by_type, families, row, written

from mlx_rq.engine.models.families import Family, family_of


def test_the_table_is_of_the_installed_mlx_lm() -> None:
    assert f"mlx-lm {version('mlx-lm')}." in TABLE.read_text(), "run `make families`"
    assert [*written()] == [*families()]


def test_every_model_that_was_tried_answers_as_alone() -> None:
    answers = {family: line.split(" | ")[3] for family, line in written().items()}
    other = {family for family, said in answers.items() if said != "16 of 16"}
    assert other == {*UNTRIED, *NOTES}


def test_what_is_shipped_says_the_same_by_the_types_of_configs() -> None:
    said = by_type(written())
    assert {name: family_of(name) for name in said} == {
        name: Family(*found) for name, found in said.items()
    }
    assert family_of("llama") == family_of("mistral") == Family("any", "all")
    assert family_of("gpt_oss") == Family("any", "some")
    assert family_of("mamba") == Family("equal", "none")
    assert family_of("gemma2") == Family("alone", "none")
    assert family_of("deepseek_v32") == Family("any", "none"), "copies are quicker"
    assert family_of("bitnet") is family_of("nobody's") is None


@pytest.mark.parametrize(
    "family",
    [
        *("baichuan_m1", "bailing_moe_linear", "longcat_flash_ngram", "nemotron_h", "rwkv7"),
        *("minimax_m3_vl", "deepseek_v32", "glm4_moe_lite", "kimi_linear"),
    ],
)
def test_a_family_is_as_the_table_says(family: str) -> None:
    assert str(row(family)) == written()[family]
