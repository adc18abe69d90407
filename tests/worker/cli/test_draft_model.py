"""`--draft-model`: whose it is, and what is loaded for it."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from fakes import FakeEngine
from tiny import tiny_model

from mlx_rq.engine.models.load import LoadedModel, ModelError
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.cli.models import AskedModel, asked_models, models_needed, served_models


def test_it_drafts_for_the_one_model_and_a_file_says_it_of_each(tmp_path: Path) -> None:
    assert asked_models(("org/a",), (), None, (), "org/s") == [AskedModel("org/a", draft="org/s")]

    file = tmp_path / "models.toml"
    file.write_text('[models."org/a"]\ndraft = "org/s"\n[models."org/b"]\n')
    asked = asked_models((), (), file)
    assert [one.draft for one in asked] == ["org/s", None]
    assert models_needed(asked) == ["org/a", "org/s", "org/b"]
    with pytest.raises(click.ClickException) as refused:
        asked_models((), (), file, (), "org/s")
    assert refused.value.message == (
        "--draft-model org/s: with several models, say whose it is, in the file of --models-from: "
        'draft = "org/s"'
    )

    file.write_text('[models."org/a"]\ndraft = 3\n')
    with pytest.raises(click.ClickException) as refused:
        asked_models((), (), file)
    assert refused.value.message == (
        f"--models-from {file}: models.org/a.draft is 3; it must be a known name, a folder, or a "
        "hub id"
    )


def test_one_that_is_not_here_is_refused_and_its_weights_count(tmp_path: Path) -> None:
    folders = []
    for name, nbytes in (("model", 1_500_000_000), ("draft", 700_000_000)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(nbytes)  # none of it is on the disk
        folders.append(str(tmp_path / name))
    model, draft = folders

    asked = [AskedModel(model, draft=draft), AskedModel("org/a")]
    served = served_models(asked, lambda asked: FakeEngine(), 2_000_000_000)
    assert [one.too_large for one in served] == [
        "its weights take 2.2 GB, and there is room for 2.0 GB",
        "",
    ]
    with pytest.raises(ModelError, match="not-there"):
        served_models([AskedModel(model, draft="not-there")], lambda asked: FakeEngine())


@pytest.mark.parametrize("draft", ["llama", "lfm2"])
def test_the_worker_loads_it_or_says_why_not(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draft: str
) -> None:
    made: list[LoadedModel | None] = []

    class Engine(FakeEngine):
        def __init__(self, *_: Any, draft: LoadedModel | None, **__: Any) -> None:
            super().__init__()
            made.append(draft)

    class Worker:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def run(self) -> None: ...

    def load(model: str, **_: Any) -> LoadedModel:
        return tiny_model(draft if model == str(tmp_path) else "llama")

    monkeypatch.setattr("mlx_rq.engine.models.load.load", load)
    monkeypatch.setattr("mlx_rq.engine.engine.MLXEngine", Engine)
    monkeypatch.setattr("mlx_rq.worker.worker.MLXWorker", Worker)

    def worker(*arguments: str) -> Result:
        command = ["worker", "--unsupervised", "--model", "org/a", "--data-dir", str(tmp_path)]
        return CliRunner().invoke(main, [*command, "--batch", "4", *arguments])

    assert worker().exit_code == 0
    result = worker("--draft-model", str(tmp_path))

    if draft == "llama":
        assert result.exit_code == 0
        assert made == [None, tiny_model("llama")]
    else:
        assert result.exit_code == 1
        assert "Error: draft model tiny-lfm2: tiny-lfm2 cannot take back tokens" in result.output
