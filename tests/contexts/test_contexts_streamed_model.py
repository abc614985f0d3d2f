from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import lazily

torch, transformers, safetensors_torch, streamed_model = lazily(
    "torch", "transformers", "safetensors.torch", "stoker.contexts.streamed_model"
)

FLOATING = ("float32", "bfloat16", "float16", "float64")
DTYPES = (*FLOATING, "int64", "int32", "uint8", "bool")

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple) | st.integers(0, 3000).map(lambda length: (length,))
tensors = st.dictionaries(
    st.text("abc.", min_size=1, max_size=6), st.tuples(st.sampled_from(DTYPES), shapes, st.integers(0, 99)), max_size=8
)


def made(spec):
    def one(name, shape, seed):
        dtype = getattr(torch, name)
        drawn = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))
        return (drawn % 2 if dtype == torch.bool else drawn / 7 if dtype.is_floating_point else drawn).to(dtype)

    return {name: one(*each) for name, each in spec.items()}


def streamed(folder: Path, **options):
    with streamed_model.WeightStream(streamed_model.stored_tensors(folder), **{"device": "cpu", **options}) as stream:
        return stream.wait_for_tensors()


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].cpu(), tensor), name


def open_files() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]


def converted(weights, dtype):
    """Convert floating-point weights to `dtype`; change nothing if `dtype` is None."""
    return {
        name: each.to(dtype) if dtype is not None and each.is_floating_point() else each
        for name, each in weights.items()
    }


@settings(deadline=None, max_examples=60)
@given(
    spec=tensors, buffer_bytes=st.sampled_from([16, 64, 1024, 1 << 16]), readers=st.integers(1, 4),
    wanted=st.none() | st.sampled_from(FLOATING),
)  # fmt: skip
def test_tensors_are_read_bit_for_bit_or_converted(tmp_path_factory, spec, buffer_bytes, readers, wanted):
    folder, dtype = tmp_path_factory.mktemp("any"), getattr(torch, wanted) if wanted else None
    safetensors_torch.save_file(made(spec), folder / "model.safetensors")
    found = streamed(folder, buffer_bytes=buffer_bytes, readers=readers, dtype=dtype)
    assert_same(found, converted(made(spec), dtype))


def test_header_of_odd_length_is_read(tmp_path):
    weights = {"a": torch.arange(37.0), "b": torch.arange(5, dtype=torch.bfloat16)}
    safetensors_torch.save_file(weights, tmp_path / "plain.safetensors")
    plain = (tmp_path / "plain.safetensors").read_bytes()
    length = int.from_bytes(plain[:8], "little")
    head = plain[8 : 8 + length].rstrip() + b" " * 3
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + plain[8 + length :])
    assert_same(streamed(tmp_path, buffer_bytes=32), weights)


@pytest.mark.parametrize("how", ["truncated", "longer", "no header", "overlap", "unknown dtype", "wrong size"])
def test_damaged_file_is_refused_by_its_header(tmp_path, how):
    file = tmp_path / "model.safetensors"
    safetensors_torch.save_file({"a": torch.zeros(100), "b": torch.zeros(100)}, file)
    data = file.read_bytes()
    changes = {
        "truncated": data[:-10],
        "longer": data + b"\0" * 8,
        "no header": b"\xff" * 200,
        "overlap": data.replace(b"[400,800]", b"[0,400]  "),
        "unknown dtype": data.replace(b'"F32"', b'"F33"'),
        "wrong size": data.replace(b"[100]", b"[101]"),
    }
    assert changes[how] != data
    file.write_bytes(changes[how])
    with pytest.raises(ValueError, match=r"damaged|not streamed|no safetensors"):
        streamed_model.stored_tensors(tmp_path)


def test_file_truncated_during_reading_raises_and_is_closed(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors_torch.save_file({"a": torch.zeros(100_000), "b": torch.ones(100_000)}, file)
    stored = streamed_model.stored_tensors(tmp_path)
    os.truncate(file, 500_000)
    with (
        pytest.raises(OSError, match=r"ends at byte 500,000"),
        streamed_model.WeightStream(stored, device="cpu", buffer_bytes=4096, readers=4) as stream,
    ):
        stream.wait_for_tensors()
    assert str(file) not in open_files()


def test_read_beyond_the_end_names_the_end_of_the_file(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(1000))
    with open(file, "rb") as opened, pytest.raises(OSError, match=r"ends at byte 1,000, within"):
        streamed_model.read_exactly(opened.fileno(), memoryview(bytearray(10)), 5000, name=str(file))


def test_out_of_memory_raises_an_error_and_leaves_no_thread(tmp_path):
    safetensors_torch.save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    (stored,) = streamed_model.stored_tensors(tmp_path)
    with (  # the fixture `no_thread_is_left` also checks for threads afterwards
        pytest.raises(RuntimeError, match="memory"),
        streamed_model.WeightStream([stored._replace(shape=(1 << 60,))], device="cpu") as stream,
    ):
        stream.wait_for_tensors()


def test_stream_left_early_ends_its_threads(tmp_path):
    safetensors_torch.save_file({"a": torch.zeros(1_000_000)}, tmp_path / "model.safetensors")
    with (
        pytest.raises(KeyError),
        streamed_model.WeightStream(streamed_model.stored_tensors(tmp_path), device="cpu", buffer_bytes=64),
    ):
        raise KeyError("the tokenizer is missing")


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return "cuda:0"


@pytest.mark.gpu
@pytest.mark.parametrize("buffer_bytes", [64, 4096, 1 << 20])
@pytest.mark.parametrize("wanted", [None, "float16"])
def test_tensors_on_a_gpu_are_bit_equal(tmp_path, cuda, buffer_bytes, wanted):
    spec = {f"w{number}": (dtype, (number, 37, 5), number) for number, dtype in enumerate(DTYPES * 3)}
    safetensors_torch.save_file(made(spec), tmp_path / "model.safetensors")
    dtype = getattr(torch, wanted) if wanted else None
    found = streamed(tmp_path, device=cuda, buffer_bytes=buffer_bytes, readers=3, dtype=dtype)
    assert {tensor.device for tensor in found.values()} == {torch.device(cuda)}
    assert_same(found, converted(made(spec), dtype))


@pytest.mark.gpu
def test_out_of_memory_on_a_gpu_raises_and_frees_its_memory(tmp_path, cuda):
    safetensors_torch.save_file({"a": torch.zeros(10), "b": torch.zeros(10)}, tmp_path / "model.safetensors")
    first, second = streamed_model.stored_tensors(tmp_path)
    before = torch.cuda.memory_allocated(cuda)
    with (
        pytest.raises(torch.OutOfMemoryError),
        streamed_model.WeightStream([first, second._replace(shape=(1 << 45,))], device=cuda) as stream,
    ):
        stream.wait_for_tensors()
    assert torch.cuda.memory_allocated(cuda) == before


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
    """Enable streaming of weights to a CPU."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr("stoker.contexts.streamed_model.is_streaming_target", lambda device: True)


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
    """Return the streamed model, the model of Transformers, and how the streamed weights arrived."""
    with streamed_model.StreamedWeights(str(folder), dtype=dtype, devices=(device,)) as weights:
        found = weights.build_model(kind_of(name))
    expected = kind_of(name).from_pretrained(folder, dtype=dtype, device_map={"": device})
    return found, expected, weights.told


def assert_same_models(found: Any, expected: Any) -> None:
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


@pytest.mark.parametrize(
    ("name", "stored", "wanted"),
    [
        ("llama tied", "float32", "auto"), ("llama", "bfloat16", "auto"), ("qwen2", "float32", "bfloat16"),
        ("gpt2", "bfloat16", "auto"), ("bert", "float32", "bfloat16"), ("classifier", "float32", "auto"),
    ],
)  # fmt: skip
def test_model_equals_the_model_of_from_pretrained(tmp_path: Path, name: str, stored: str, wanted: str) -> None:
    save(name, tmp_path, dtype=stored)
    dtype = wanted if wanted == "auto" else getattr(torch, wanted)
    found, expected, told = both(name, tmp_path, dtype=dtype)
    assert told.endswith("GB/s")
    assert_same_models(found, expected)
    if name == "llama tied":
        assert found.lm_head.weight.data_ptr() == found.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    "case", ["in shards", "joined by Transformers", "without a generation config", "with its own generation config"]
)
def test_unusual_model_equals_the_model_of_from_pretrained(tmp_path: Path, case: str) -> None:
    name = "mixtral" if case == "joined by Transformers" else "llama"
    save(name, tmp_path, **{"max_shard_size": "20KB"} if case == "in shards" else {})
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (case == "in shards")
    file = tmp_path / "generation_config.json"
    if case == "without a generation config":
        file.unlink()
    if case == "with its own generation config":
        file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": [5, 7], "max_new_tokens": 17}))
    found, expected, told = both(name, tmp_path, dtype=torch.float32)
    assert told.endswith("GB/s")
    assert (found.generation_config.max_new_tokens == 17) == (case == "with its own generation config")
    assert_same_models(found, expected)


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("mixtral", "float16", ""),  # the weights would lose precision
        ("t5", "float16", ""),
        ("masked", "float32", "missing_keys: pooler.dense.bias, pooler.dense.weight"),
        ("own code", "float32", ""),
        ("pickled", "float32", ""),
        ("adapter", "float32", "it has an adapter"),
    ],
)
def test_unusual_folders_are_left_to_transformers(tmp_path, name, dtype, why, caplog):
    model = name if name in MODELS else "llama"
    save(model, tmp_path)
    if name == "own code":
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(
            json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "mine.Model"}})
        )
    if name == "pickled":
        (tmp_path / "model.safetensors").unlink()
        torch.save(MODELS["llama"]().state_dict(), tmp_path / "pytorch_model.bin")
    if name == "adapter":
        (tmp_path / "adapter_config.json").write_text("{}")
        with streamed_model.StreamedWeights(str(tmp_path), dtype=torch.float32, devices=("cpu",)) as weights:
            assert weights.told == f"weights by Transformers: {why}"
        return
    with caplog.at_level(logging.DEBUG, logger="stoker.contexts.streamed_model"):
        found, expected, told = both(model, tmp_path, dtype=getattr(torch, dtype))
    assert told.startswith(f"weights by Transformers: {why}")
    own = [record for record in caplog.records if record.name.startswith("stoker")]
    assert own
    assert max(record.levelno for record in own) < logging.WARNING
    if name != "masked":  # Transformers initializes missing weights at random
        assert_same_models(found, expected)


def test_damaged_weights_raise_the_error_of_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save("llama", tmp_path)
    os.truncate(tmp_path / "model.safetensors", 30_000)
    with pytest.raises(Exception, match="incomplete metadata"):
        both("llama", tmp_path, dtype=torch.float32)
    assert "it is damaged" in caplog.text


def test_cpu_maps_weights_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found, expected, told = both("llama", save("llama", tmp_path), dtype=torch.float32)
    assert told == ""
    assert_same_models(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("wanted", ["auto", "bfloat16"])
@pytest.mark.parametrize("name", ["llama tied", "llama", "qwen2", "bert", "classifier"])
def test_model_on_a_gpu_equals_the_model_of_from_pretrained(tmp_path: Path, cuda: str, name: str, wanted: str) -> None:
    dtype = wanted if wanted == "auto" else getattr(torch, wanted)
    found, expected, told = both(name, save(name, tmp_path), dtype=dtype, device=cuda)
    assert told.endswith("GB/s")
    assert_same_models(found, expected)


@pytest.mark.gpu
def test_damaged_weights_leave_no_memory_on_a_gpu(tmp_path: Path, cuda: str) -> None:
    save("llama", tmp_path)
    os.truncate(tmp_path / "model.safetensors", 30_000)
    before = torch.cuda.memory_allocated(cuda)
    with pytest.raises(Exception, match="incomplete metadata"):
        both("llama", tmp_path, dtype=torch.float32, device=cuda)
    assert torch.cuda.memory_allocated(cuda) == before
