"""Which models `--model`, `--served-name` and `--models-from` ask for, and their names."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from fakes import FakeEngine

from mlx_rq.engine.interface import Adapter
from mlx_rq.engine.models.load import ModelError
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.models import DEMO_MODEL, AskedModel, asked_models, served_models
from mlx_rq.worker.cli.value_types import Duration


def listed(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return file


def test_without_any_it_is_the_model_of_the_demo() -> None:
    assert asked_models((), ("x",), None) == [AskedModel(DEMO_MODEL, ("x",))]


def test_of_one_model_a_name_may_say_whose_it_is() -> None:
    assert asked_models(("org/a",), ("x=org/a",), None) == [AskedModel("org/a", ("x",))]
    with pytest.raises(click.ClickException) as refused:
        asked_models(("org/a",), ("x=org/b",), None)
    assert refused.value.message == (
        "--served-name x=org/b: the model is 'org/a': --served-name x=org/a"
    )


def test_of_several_models_a_name_says_whose_it_is() -> None:
    asked = asked_models(("org/a", "org/b", "org/a"), ("x=org/b", "y=org/a", "z=org/b"), None)
    assert asked == [AskedModel("org/a", ("y",)), AskedModel("org/b", ("x", "z"))]
    with pytest.raises(click.ClickException) as refused:
        asked_models(("org/a", "org/b"), ("x",), None)
    assert refused.value.message == (
        "--served-name x: with several models, say whose it is: --served-name x=org/a"
    )


def test_a_file_lists_models_with_names_and_how_each_is_run(tmp_path: Path) -> None:
    file = listed(
        tmp_path,
        '[models.fast]\nmodel = "org/a"\nnames = ["small"]\nbatch = 16\nkv_budget = "4GB"\n'
        'adapters = {sql = "a/sql"}\n[models."org/b"]\n',
    )
    assert asked_models((), (), file) == [
        AskedModel("org/a", ("fast", "small"), 16, 4_000_000_000, (("sql", "a/sql"),)),
        AskedModel("org/b", ("org/b",)),
    ]
    assert [one.model for one in asked_models(("org/c",), (), file)] == ["org/c", "org/a", "org/b"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it lists no models, as [models.NAME] with model = …"),
        ("[models.a]\nbach = 1", "models.a.bach is no setting of a model; there are model, names,"),
        ("[models.a]\nbatch = 0", "models.a.batch is 0; it must be a number of sequences, 1 or"),
        ("[models.a]\nbatch = true", "models.a.batch is True; it must be a number of sequences"),
        ('[models.a]\nkv_budget = "many"', "models.a.kv_budget: 'many' is not a number of bytes"),
        ('[models.a]\nnames = "b"', "models.a.names is 'b'; it must be a list of names, as"),
        ("[models.a]\nmodel = 3", "models.a.model is 3; it must be a known name, a folder, or"),
        ('[models.a]\nadapters = ["sql"]', "models.a.adapters is ['sql']; it must be a table of"),
        ('[models.a]\nadapters = {"a:b" = "c"}', "models.a.adapters is {'a:b': 'c'}; it must be"),
        ("[models]\na = 3", "models.a is 3; it must be a table"),
        ("[models", "Expected ']'"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, why: str) -> None:
    file = listed(tmp_path, text)
    with pytest.raises(click.ClickException) as refused:
        asked_models((), (), file)
    assert refused.value.message.startswith(f"--models-from {file}: {why}")


def test_a_model_is_served_under_its_id_as_it_was_given_and_its_own_names(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    engine = FakeEngine()
    first, second = served_models(
        [AskedModel(f"{folder}/", ("x",)), AskedModel("org/b")], lambda asked: engine
    )
    assert first.names == ("tiny", f"{folder}/", "x", "default")
    assert second.names == ("org/b",)
    assert second.load() is engine
    with pytest.raises(click.ClickException) as refused:
        served_models([AskedModel("org/a"), AskedModel("org/b", ("org/a",))], lambda asked: engine)
    assert refused.value.message == (
        "org/a and org/b would both be called 'org/a': jobs could not tell them apart"
    )
    with pytest.raises(ModelError):
        served_models([AskedModel("not-there")], lambda asked: engine)


def test_of_several_models_one_that_is_too_large_is_not_to_be_loaded(tmp_path: Path) -> None:
    asked = []
    for name, nbytes in (("small", 10), ("large", 3_000_000_000)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(nbytes)  # none of it is on the disk
        asked.append(AskedModel(str(tmp_path / name)))
    asked.append(AskedModel("org/not-here-yet"))

    def engine_of(asked: AskedModel) -> FakeEngine:
        return FakeEngine()

    why = "its weights take 3.0 GB, and there is room for 2.0 GB"
    served = served_models(asked, engine_of, 2_000_000_000)
    assert [one.too_large for one in served] == ["", why, ""]
    (alone,) = served_models(asked[1:2], engine_of, 2_000_000_000)  # it is tried all the same
    assert alone.too_large == ""


def test_the_environment_may_name_several_models() -> None:
    command = main.get_command(click.Context(main), "worker")
    assert command is not None
    environment = {"MLX_RQ_MODEL": "org/a,/a folder/b", "MLX_RQ_UNLOAD_AFTER": "10m"}
    with CliRunner().isolation(env=environment):
        context = command.make_context("worker", [])
    assert context.params["model"] == ("org/a", "/a folder/b")
    assert context.params["unload_after"] == 600


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5m", 90), ("2h", 7200), ("600", 600), ("7d", 604_800), ("0", 0)],
)
def test_lengths_of_time(text: str, seconds: int) -> None:
    assert Duration().convert(text, None, None) == seconds


def test_every_length_of_time_may_have_a_unit() -> None:
    command = main.get_command(click.Context(main), "worker")
    assert command is not None
    given = ["--max-wait", "10m", "--grace", "90s", "--lease", "2m", "--stall", "1h"]
    params = command.make_context("worker", given).params
    assert {name: params[name] for name in ("max_wait", "grace", "lease", "stall")} == {
        "max_wait": 600,
        "grace": 90,
        "lease": 120,
        "stall": 3600,
    }
    assert isinstance(params["lease"], int)


@pytest.mark.parametrize(
    ("option", "value", "fault"),
    [
        ("--max-wait", "soon", "'soon' is no length of time, such as 90s, 10m or 2h"),
        ("--stall", "5s", "'5s' is too short: take 60s or more"),
        ("--lease", "2.5", "'2.5' is no whole number of seconds"),
        ("--port", "0", "'0' is no whole number from 1 to 65535"),
        ("--window", "many", "'many' is no whole number of 1 or more"),
    ],
)
def test_a_wrong_number_or_time_is_told_in_plain_words(option: str, value: str, fault: str) -> None:
    refused = CliRunner().invoke(main, ["up", option, value])
    assert refused.exit_code == 2
    assert f"Invalid value for '{option}': {fault}\n" in refused.stderr


@pytest.mark.parametrize(
    ("models", "given", "adapters"),
    [
        (("org/a",), ("sql=x", "c=y=z"), [(("sql", "x"), ("c", "y=z"))]),
        (("org/a",), ("org/a:sql=x",), [(("sql", "x"),)]),
        (("org/a", "/b"), ("/b:sql=x", "org/a:sql=x"), [(("sql", "x"),), (("sql", "x"),)]),
    ],
)
def test_an_adapter_is_of_the_one_model_or_of_that_which_is_named(
    models: tuple[str, ...], given: tuple[str, ...], adapters: list[Any]
) -> None:
    assert [one.adapters for one in asked_models(models, (), None, given)] == adapters


@pytest.mark.parametrize(
    ("models", "given", "why"),
    [
        (
            ("a", "b"),
            ("sql=x",),
            "--adapter sql=x: with several models, say whose it is: --adapter a:sql=x",
        ),
        (
            ("a",),
            ("b:sql=x",),
            "--adapter b:sql=x: there is no model b, say whose it is: --adapter a:sql=x",
        ),
        (("a",), ("sql",), "--adapter sql: say its name and its folder: --adapter sql=FOLDER"),
        (("a",), ("=x",), "--adapter =x: say its name and its folder: --adapter NAME=x"),
        (
            ("a",),
            ("sql=x", "sql=y"),
            "a has 2 adapters 'sql': jobs could not tell them apart",
        ),
    ],
)
def test_an_adapter_that_is_asked_for_wrongly(
    models: tuple[str, ...], given: tuple[str, ...], why: str
) -> None:
    with pytest.raises(click.ClickException) as refused:
        asked_models(models, (), None, given)
    assert refused.value.message == why


def test_a_folder_is_known_by_its_name_before_it_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    asked = AskedModel(str(folder), ("x",))
    assert asked.known_as == ("tiny", str(folder), "x")


def test_an_adapter_is_served_under_the_names_of_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "sql"
    folder.mkdir()
    asked = [AskedModel("org/a", ("x",), adapters=(("sql", str(folder)),))]
    assert asked[0].known_as == ("org/a", "x", "org/a:sql", "x:sql")
    with pytest.raises(ModelError):
        served_models(asked, lambda asked: FakeEngine())
    config = {"num_layers": 4, "lora_parameters": {"rank": 8, "scale": 20.0, "dropout": 0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapters.safetensors").touch()
    base, adapter = served_models(asked, lambda asked: FakeEngine())
    assert adapter.base_id == base.id == base.base_id == "org/a"
    assert adapter.adapter == Adapter("org/a:sql", folder)

    assert adapter.names == (
        *("org/a:sql", "x:sql", "default:sql"),
        *(f"{name}:{folder}" for name in ("org/a", "x", "default")),
    )
    with pytest.raises(click.ClickException) as refused:
        served_models([*asked, AskedModel("org/b", ("org/a:sql",))], lambda asked: FakeEngine())
    assert refused.value.message == (
        "org/a:sql and org/b would both be called 'org/a:sql': jobs could not tell them apart"
    )
