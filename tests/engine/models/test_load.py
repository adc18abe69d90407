"""Loading models: the demo model and its tokenizer, and what is refused and how."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import mlx_lm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_rq.engine.models.load import DEFAULT_CONTEXT, LoadedModel, ModelError, load
from mlx_rq.engine.models.pull import pull

TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49_200,  # wider than the tokenizer's 49,152, as padded models are
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def smollm2_path(cache: Path) -> Path:
    return pull("smollm2", cache_dir=cache)


@pytest.fixture(scope="session")
def smollm2(cache: Path, smollm2_path: Path) -> LoadedModel:
    return load("smollm2", cache_dir=cache)


@pytest.fixture
def tiny(tmp_path: Path, smollm2_path: Path) -> Path:
    """A whole model folder with a random one-layer network and the real tokenizer."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2_path / name, folder)
    network = llama.Model(llama.ModelArgs.from_dict(TINY))
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    edit(folder / "config.json", TINY)
    return folder


def edit(file: Path, changes: dict[str, Any]) -> None:
    """Change entries of a JSON file; None removes one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    merged = {**content, **changes}
    file.write_text(json.dumps({k: v for k, v in merged.items() if v is not None}))


def refusal(model: str | Path, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load(str(model), **options)
    message = str(caught.value)
    assert message.startswith("model ")
    assert "\n" not in message
    return message


# The demo model


def test_what_is_known_of_the_demo_model(smollm2: LoadedModel, smollm2_path: Path) -> None:
    assert smollm2.model_id == "smollm2"
    assert smollm2.path == smollm2_path
    assert smollm2.context_length == 8192
    assert smollm2.vocab_size == 49_152
    ends = {smollm2.tokenizer.decode([token]) for token in smollm2.eos_token_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>"}


def test_it_answers_sensibly(smollm2: LoadedModel) -> None:
    prompt = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name the primary colours"}], add_generation_prompt=True
    )
    answer = mlx_lm.generate(smollm2.model, smollm2.tokenizer, prompt, max_tokens=10)
    assert "primary colours" in answer
    assert "Red" in answer


# Its tokenizer. The vocabulary has no token for six control bytes, nor for the first byte of the
# unassigned planes from U+40000 on: such characters cannot round-trip, everything else must.
ENCODABLE = st.characters(
    exclude_categories=["Cs"],
    exclude_characters="\x04\x06\x13\x14\x16\x1d",
    max_codepoint=0x3FFFF,
)


@given(st.text(ENCODABLE))
@settings(max_examples=300)
def test_any_text_survives_the_tokenizer(smollm2: LoadedModel, text: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  leading, trailing  ",
        "a , b . c ! don't you 've",  # what tokenizers like to tidy up
        "tabs\tand\r\nline\n\n\nends",
        "def f(x):\n    return x[1:] ** 2  # ok\n",
        "Übermäßig naïve façade, 日本語 العربية हिन्दी",
        "👍🏽 👩‍👩‍👧 🏳️‍🌈",
        "³²¼ ٣ 1,234.5e-6",
        "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    ],
)
def test_this_text_survives_the_tokenizer(smollm2: LoadedModel, text: str) -> None:
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


def test_a_byte_without_a_token_vanishes(smollm2: LoadedModel) -> None:
    assert smollm2.tokenizer.encode("a\x04b") == smollm2.tokenizer.encode("a") + (
        smollm2.tokenizer.encode("b")
    )


def test_how_it_splits(smollm2: LoadedModel) -> None:
    def tokens(text: str) -> list[str]:
        found: list[str] = smollm2.tokenizer.convert_ids_to_tokens(smollm2.tokenizer.encode(text))
        return found

    assert tokens("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]  # each digit stands alone
    assert tokens("Hello world") == ["Hello", "Ġworld"]  # no token in front, no token behind
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<empty_output>"]
    assert tokens("".join(special)) == special
    assert smollm2.tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert smollm2.tokenizer.pad_token_id == 2


def test_the_chat_template_is_that_of_the_file(smollm2: LoadedModel) -> None:
    def rendered(*messages: dict[str, str], **options: Any) -> str:
        text = smollm2.tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
        return str(text)

    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hi"}
    assert rendered(system, user) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    assert rendered(user, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


# Other models


def test_a_local_folder_loads_under_its_base_name(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(str(tiny))
    assert loaded.model_id == "tiny"
    assert loaded.context_length == 512
    assert loaded.vocab_size == 49_200
    assert loaded.eos_token_ids == {2}

    monkeypatch.chdir(tiny)
    assert load(".").model_id == "tiny"


@pytest.mark.parametrize(
    ("changes", "context_length"),
    [
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 2048}}, 2048),
        ({}, DEFAULT_CONTEXT),
    ],
)
def test_the_context_length_has_many_names(
    tiny: Path, changes: dict[str, Any], context_length: int
) -> None:
    edit(tiny / "config.json", {"max_position_embeddings": None, **changes})
    assert load(str(tiny)).context_length == context_length


def test_the_fingerprint_follows_the_files(tiny: Path) -> None:
    first = load(str(tiny)).fingerprint
    assert first.startswith("fp_")
    assert load(str(tiny)).fingerprint == first

    edit(tiny / "config.json", {"rope_theta": 20_000})
    assert load(str(tiny)).fingerprint != first


def test_code_for_the_network_runs_only_when_trusted(tiny: Path) -> None:
    ran = tiny / "it-ran"
    code = f"open({str(ran)!r}, 'w').close()\nfrom mlx_lm.models.llama import Model, ModelArgs\n"
    (tiny / "own_model.py").write_text(code)
    edit(tiny / "config.json", {"model_file": "own_model.py"})

    message = refusal(tiny)
    assert "own_model.py" in message
    assert "--trust-remote-code" in message
    assert not ran.exists()

    load(str(tiny), trust_remote_code=True)
    assert ran.exists()


def test_code_for_the_tokenizer_runs_only_when_trusted(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tiny / "it-ran"
    (tiny / "own_tokenizer.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast): pass\n"
    )
    edit(
        tiny / "tokenizer_config.json",
        {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]},
        },
    )
    # A type that mlx-lm runs as a llama and transformers does not know: it has no tokenizer for it.
    edit(tiny / "config.json", {"model_type": "xverse"})
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tiny.parent / "modules")
    )

    assert "--trust-remote-code" in refusal(tiny)
    assert not ran.exists()

    load(str(tiny), trust_remote_code=True)
    assert ran.exists()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": None}, "names no model_type"),
        ({"model_type": "bert"}, "of type 'bert', which mlx-lm"),
        ({"model_type": "whisper"}, "of type 'whisper', which mlx-lm"),
        ({"model_type": "../../../evil"}, "cannot run as a text model"),
        ({"architectures": ["LlamaModel"]}, "makes embeddings or scores"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "makes embeddings or scores"),
        ({"hidden_size": None}, "mlx-lm cannot load"),
        ({"hidden_size": 16}, "mlx-lm cannot load"),
    ],
)
def test_a_config_of_no_text_model_is_refused(
    tiny: Path, changes: dict[str, Any], complaint: str
) -> None:
    edit(tiny / "config.json", changes)
    assert complaint in refusal(tiny)


def test_a_folder_of_no_text_model_is_refused(tiny: Path) -> None:
    (tiny / "modules.json").write_text("[]")
    assert "embedding model" in refusal(tiny)
    (tiny / "modules.json").unlink()
    (tiny / "model.safetensors").write_bytes(b"cut off")
    assert "mlx-lm cannot load" in refusal(tiny)
    (tiny / "model.safetensors").unlink()
    assert "no model*.safetensors" in refusal(tiny)
    (tiny / "config.json").write_text("{")
    assert "cannot read" in refusal(tiny)
    (tiny / "config.json").unlink()
    assert "no config.json" in refusal(tiny)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    assert "run `mlx-rq model pull smollm2`" in refusal("smollm2", cache_dir=tmp_path)
    assert "there is no such folder" in refusal(tmp_path / "nothing")
    assert "there is no such folder" in refusal("smolm2")
    (tmp_path / "model.gguf").touch()
    assert "is a file" in refusal(tmp_path / "model.gguf")


def test_a_hub_id_without_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "the hub cannot be reached" in refusal("nobody/has-this-model")


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (huggingface_hub.errors.RepositoryNotFoundError, "no such repository"),
        (huggingface_hub.errors.RemoteEntryNotFoundError, "has no config.json"),
        (huggingface_hub.errors.RevisionNotFoundError, "the hub has no such revision of it"),
        (huggingface_hub.errors.HfHubHTTPError, "the hub did not give it"),
    ],
)
def test_what_the_hub_refuses_is_told(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], complaint: str
) -> None:
    def fail(*args: str, **options: Any) -> None:
        raise error.__new__(error, "first line\nsecond line")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    assert complaint in refusal("somebody/some-model")
