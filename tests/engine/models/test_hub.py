"""Models of the hub, with the hub's client replaced where it would ask the network."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from click.testing import CliRunner

from mlx_rq.engine.models.hub import HubModel
from mlx_rq.engine.models.load import ModelError, PullError, load, locate
from mlx_rq.engine.models.pull import pull_from_hub
from mlx_rq.worker.cli.main import main

COMMIT = "c0ffee" + 34 * "0"


class Hub:
    """What the hub has of org/tiny; notes what it is asked for."""

    def __init__(self, folder: Path) -> None:
        self.snapshot = folder / "snapshots" / COMMIT
        self.config: dict[str, Any] = {"model_type": "llama"}
        self.weights = b"weights"
        self.asked: list[tuple[str, str, str | None]] = []

    def hf_hub_download(self, repository: str, name: str, revision: str | None) -> str:
        self.asked.append((name, repository, revision))
        self.snapshot.mkdir(parents=True, exist_ok=True)
        (self.snapshot / name).write_text(json.dumps(self.config))
        return str(self.snapshot / name)

    def snapshot_download(
        self, repository: str, revision: str | None, allow_patterns: list[str]
    ) -> str:
        self.asked.append(("*", repository, revision))
        blob = self.snapshot.parent.parent / "blobs" / "b10b"
        blob.parent.mkdir(exist_ok=True)
        blob.write_bytes(self.weights)
        (self.snapshot / "model.safetensors").symlink_to(blob)
        return str(self.snapshot)

    def verify_repo_checksums(self, repository: str, revision: str) -> Any:
        self.asked.append(("checksums", repository, revision))
        said = hashlib.sha256((self.snapshot / "model.safetensors").read_bytes()).hexdigest()
        is_right = said == hashlib.sha256(b"weights").hexdigest()
        wrong = [] if is_right else [{"path": "model.safetensors"}]
        return SimpleNamespace(mismatches=wrong, checked_count=2)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(huggingface_hub, name, getattr(hub, name))
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: False)
    return hub


@pytest.mark.parametrize(
    ("model", "revision"),
    [("org/tiny", None), ("org/tiny@v1", "v1"), ("org/tiny@refs/pr/1", "refs/pr/1")],
)
def test_a_model_is_fetched_and_checked(hub: Hub, model: str, revision: str | None) -> None:
    assert pull_from_hub(model) == HubModel(hub.snapshot, COMMIT, 2)
    assert hub.asked == [
        ("config.json", "org/tiny", revision),
        ("*", "org/tiny", revision),
        ("checksums", "org/tiny", COMMIT),
    ]


def test_what_is_damaged_is_removed_so_that_it_is_fetched_again(hub: Hub) -> None:
    hub.weights = b"others"
    with pytest.raises(PullError) as refused:
        pull_from_hub("org/tiny")
    assert str(refused.value) == (
        "model org/tiny: model.safetensors: not as the hub has it, and was removed: pull again"
    )
    left = [path.name for path in hub.snapshot.parent.parent.rglob("*") if not path.is_dir()]
    assert left == ["config.json"]


def test_what_would_not_load_is_not_downloaded(hub: Hub) -> None:
    hub.config = {"model_type": "bert"}
    with pytest.raises(ModelError):
        pull_from_hub("org/tiny")
    assert [asked[0] for asked in hub.asked] == ["config.json"]


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(ModelError, match=r"^a model without a name: give a folder, a hub id, or"):
        locate("")


def test_without_the_hub_it_says_which_files_are_missing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def incomplete(*args: Any, **options: Any) -> None:
        raise huggingface_hub.errors.IncompleteSnapshotError(
            "The cached snapshot for 'org/tiny' (revision 'main', commit abc) is incomplete: 1 "
            "file(s) are missing (model-00002-of-00002.safetensors). Outgoing traffic is disabled",
            snapshot_path="x",
        )

    monkeypatch.setattr(huggingface_hub, "snapshot_download", incomplete)
    with pytest.raises(ModelError) as refused:
        load("org/tiny")
    assert str(refused.value) == (
        "model org/tiny: no such folder here, and the hub cannot be reached, or HF_HUB_OFFLINE is "
        "set; missing here: model-00002-of-00002.safetensors. Check the network, then pull it once "
        "more"
    )


def test_what_is_whole_does_not_need_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    assert pull_from_hub("org/tiny") == HubModel(hub.snapshot, COMMIT, 0)


def test_the_command(hub: Hub) -> None:
    done = CliRunner().invoke(main, ["model", "pull", "org/tiny@v1", "--json"])
    assert json.loads(done.output) == {
        "name": "org/tiny@v1",
        "path": str(hub.snapshot),
        "revision": COMMIT,
        "checked": 2,
    }
    refused = CliRunner().invoke(main, ["model", "pull", "org/tiny", "--dtype", "4bit"])
    assert refused.exit_code == 1
    assert "--dtype 4bit: org/tiny comes as it is; mlx_lm.convert makes others" in refused.output
