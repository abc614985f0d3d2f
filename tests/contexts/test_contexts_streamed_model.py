"""Models around streamed weights equal those of `from_pretrained`; unusual folders are left to Transformers."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lazily import lazily

from stoker.contexts.folders import snapshot_folder
from stoker.contexts.snapshot import load_parts

torch, transformers, streamed_model = lazily("torch", "transformers", "stoker.contexts.streamed_model")

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
GROUPED = {**SMALL, "num_key_value_heads": 2}
MODELS: dict[str, Any] = {
    "llama tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=False)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4)
    ),
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "classifier": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**GROUPED, num_local_experts=4)),
    "t5": lambda: transformers.T5Model(
        transformers.T5Config(vocab_size=99, d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4)
    ),
    "masked": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)),
}
KINDS = {"bert": "AutoModel", "masked": "AutoModel", "t5": "AutoModel"}
KINDS["classifier"] = "AutoModelForSequenceClassification"


@pytest.fixture(autouse=True)
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have weights streamed to a CPU too."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("stoker.contexts.streamed_model.streams_to", lambda device: True)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [each.name for each in threading.enumerate() if each.name.startswith("stoker-weights")] == []


def save(name: str, folder: Path, *, dtype: str = "float32", **options: Any) -> Path:
    torch.manual_seed(7)
    MODELS[name]().to(getattr(torch, dtype)).save_pretrained(folder, **options)
    return folder


def kind_of(name: str) -> Any:
    return getattr(transformers, KINDS.get(name, "AutoModelForCausalLM"))


def both(name: str, folder: Path, *, dtype: Any, device: str = "cpu") -> tuple[Any, Any, str]:
    """The model around a stream, Transformers' own, and how the first one's weights came."""
    with streamed_model.StreamedWeights(str(folder), dtype=dtype, device=device) as weights:
        found = weights.model(kind_of(name))
    expected = kind_of(name).from_pretrained(folder, dtype=dtype, device_map={"": device})
    return found, expected, weights.told


def assert_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    for what in ("state_dict", "named_parameters", "named_buffers"):
        ours, theirs = dict_of(found, what), dict_of(expected, what)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert ours[name].dtype == tensor.dtype, name
            assert ours[name].device == tensor.device, name
            assert torch.equal(ours[name], tensor), name
    assert found.config.to_dict() == expected.config.to_dict()
    assert found.name_or_path == expected.name_or_path
    assert found.training == expected.training
    if expected.can_generate():
        assert found.generation_config.to_dict() == expected.generation_config.to_dict()


def dict_of(model: Any, what: str) -> dict[str, Any]:
    return dict(getattr(model, what)()) if what != "state_dict" else model.state_dict()


@pytest.mark.parametrize("wanted", ["auto", "bfloat16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama tied", "llama", "qwen2", "gpt2", "bert", "classifier"])
def test_model_equals_that_of_from_pretrained(tmp_path: Path, name: str, stored: str, wanted: str) -> None:
    save(name, tmp_path, dtype=stored)
    dtype = wanted if wanted == "auto" else getattr(torch, wanted)

    found, expected, told = both(name, tmp_path, dtype=dtype)

    assert told.endswith("GB/s")
    assert_same(found, expected)


def test_model_in_shards_equals_that_of_from_pretrained(tmp_path: Path) -> None:
    save("llama", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2

    found, expected, told = both("llama", tmp_path, dtype=torch.float32)

    assert told.endswith("GB/s")
    assert_same(found, expected)


def test_tied_weights_share_their_memory(tmp_path: Path) -> None:
    found, _, _ = both("llama tied", save("llama tied", tmp_path), dtype=torch.float32)

    assert found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()


def test_generation_config_of_the_folder_is_kept(tmp_path: Path) -> None:
    save("llama", tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [5, 7], "max_new_tokens": 17}))

    found, expected, _ = both("llama", tmp_path, dtype=torch.float32)

    assert (found.generation_config.eos_token_id, found.generation_config.max_new_tokens) == ([5, 7], 17)
    assert_same(found, expected)


def test_folder_without_generation_config_gets_that_of_the_model(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "generation_config.json").unlink()

    found, expected, _ = both("llama", tmp_path, dtype=torch.float32)

    assert_same(found, expected)


def test_weights_that_transformers_joins_are_right(tmp_path: Path) -> None:
    found, expected, told = both("mixtral", save("mixtral", tmp_path), dtype=torch.float32)

    assert told.endswith("GB/s")
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["mixtral", "t5"])
def test_weights_that_would_lose_digits_are_left_to_transformers(tmp_path: Path, name: str) -> None:
    found, expected, told = both(name, save(name, tmp_path), dtype=torch.float16)

    assert told.startswith("weights by Transformers: ")
    assert_same(found, expected)


def test_missing_weights_are_left_to_transformers(tmp_path: Path) -> None:
    found, _, told = both("masked", save("masked", tmp_path), dtype=torch.float32)

    assert told == "weights by Transformers: missing_keys: pooler.dense.bias, pooler.dense.weight"
    assert type(found) is transformers.BertModel


@pytest.mark.parametrize("key", ["auto_map", "pickled"])
def test_unusual_folders_are_left_to_transformers(tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture) -> None:
    save("llama", tmp_path)
    if key == "auto_map":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, key: {"AutoModelForCausalLM": "mine.Model"}}))
    else:
        (tmp_path / "model.safetensors").unlink()
        torch.save(MODELS["llama"]().state_dict(), tmp_path / "pytorch_model.bin")

    with caplog.at_level(logging.DEBUG, logger="stoker.contexts.streamed_model"):
        found, expected, told = both("llama", tmp_path, dtype=torch.float32)

    assert told.startswith("weights by Transformers: ")
    assert "are not streamed" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert_same(found, expected)


def test_folder_with_an_adapter_is_left_to_transformers(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")

    with streamed_model.StreamedWeights(str(tmp_path), dtype=torch.float32, device="cpu") as weights:
        assert weights.told == "weights by Transformers: it has an adapter"


def test_damaged_weights_raise_what_transformers_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save("llama", tmp_path)
    os.truncate(tmp_path / "model.safetensors", 30_000)

    with pytest.raises(Exception, match="incomplete metadata"):
        both("llama", tmp_path, dtype=torch.float32)

    assert "it is damaged" in caplog.text


def test_damaged_snapshot_is_set_aside_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_SNAPSHOTS", str(tmp_path / "snapshots"))
    source = pickled(tmp_path / "pickled")
    first, how = load_parts(str(source), dtype=torch.float32, device="cpu")
    assert "just made" in how
    assert first.weights.endswith("GB/s")
    (place,) = [path for path in snapshot_folder().iterdir() if path.is_dir()]
    os.truncate(place / "model.safetensors", 30_000)

    again, how = load_parts(str(source), dtype=torch.float32, device="cpu")

    assert "just made" in how
    assert again.weights.endswith("GB/s")
    assert_same(again.model, first.model)
    assert [path for path in snapshot_folder().iterdir() if "damaged" in path.name]


def pickled(folder: Path) -> Path:
    """A model in the old format, of which a snapshot is made."""
    save("llama", folder)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(7)
    torch.save(MODELS["llama"]().state_dict(), folder / "pytorch_model.bin")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "true"]))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def test_a_cpu_maps_its_weights_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found, expected, told = both("llama", save("llama", tmp_path), dtype=torch.float32)

    assert told == ""
    assert_same(found, expected)


# ---- on a GPU


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return "cuda:0"


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", ["llama tied", "llama", "qwen2", "bert", "classifier"])
def test_model_on_a_gpu_equals_that_of_from_pretrained(tmp_path: Path, cuda: str, name: str, wanted: str) -> None:
    dtype = wanted if wanted == "auto" else getattr(torch, wanted)

    found, expected, told = both(name, save(name, tmp_path), dtype=dtype, device=cuda)

    assert told.endswith("GB/s")
    assert_same(found, expected)


@pytest.mark.gpu
def test_damaged_weights_leave_no_memory_on_a_gpu(tmp_path: Path, cuda: str) -> None:
    save("llama", tmp_path)
    os.truncate(tmp_path / "model.safetensors", 30_000)
    before = torch.cuda.memory_allocated(cuda)

    with pytest.raises(Exception, match="incomplete metadata"):
        both("llama", tmp_path, dtype=torch.float32, device=cuda)

    assert torch.cuda.memory_allocated(cuda) == before
