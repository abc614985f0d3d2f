"""The weight stream: what it reads is what safetensors reads, and failures leave nothing behind."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lazily import lazily

torch, safetensors_torch, weight_stream = lazily("torch", "safetensors.torch", "stoker.contexts.streamed_model")

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
    with weight_stream.WeightStream(weight_stream.stored_tensors(folder), **{"device": "cpu", **options}) as stream:
        return stream.wait()


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].cpu(), tensor), name


def threads_here() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("stoker-weights")]


def open_files() -> list[str]:
    return [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]


@settings(deadline=None, max_examples=150)
@given(spec=tensors, buffer_bytes=st.sampled_from([16, 64, 1024, 1 << 16]), readers=st.integers(1, 4))
def test_any_tensors_are_read_bit_for_bit(tmp_path_factory, spec, buffer_bytes, readers):
    folder = tmp_path_factory.mktemp("any")
    safetensors_torch.save_file(made(spec), folder / "model.safetensors")

    found = streamed(folder, buffer_bytes=buffer_bytes, readers=readers)

    assert_same(found, made(spec))


@settings(deadline=None, max_examples=50)
@given(spec=tensors, buffer_bytes=st.sampled_from([16, 64, 1 << 16]), wanted=st.sampled_from(FLOATING))
def test_floating_weights_are_converted_and_others_kept(tmp_path_factory, spec, buffer_bytes, wanted):
    folder = tmp_path_factory.mktemp("converted")
    safetensors_torch.save_file(made(spec), folder / "model.safetensors")

    found = streamed(folder, buffer_bytes=buffer_bytes, readers=2, dtype=getattr(torch, wanted))

    assert_same(
        found, {name: t.to(getattr(torch, wanted)) if t.is_floating_point() else t for name, t in made(spec).items()}
    )


def test_a_header_of_odd_length_is_read(tmp_path):
    weights = {"a": torch.arange(37.0), "b": torch.arange(5, dtype=torch.bfloat16)}
    safetensors_torch.save_file(weights, tmp_path / "plain.safetensors")
    plain = (tmp_path / "plain.safetensors").read_bytes()
    length = int.from_bytes(plain[:8], "little")
    head = plain[8 : 8 + length].rstrip() + b" " * 3
    (tmp_path / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + plain[8 + length :])

    assert_same(streamed(tmp_path, buffer_bytes=32), weights)


def test_shards_are_read_by_their_index(tmp_path):
    weights = {f"w{number}": torch.full((number + 1, 3), float(number)) for number in range(6)}
    shard_of = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(weights)}
    for shard in set(shard_of.values()):
        safetensors_torch.save_file(
            {name: weights[name] for name in weights if shard_of[name] == shard}, tmp_path / shard
        )
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))

    assert_same(streamed(tmp_path), weights)


def test_a_tensor_larger_than_all_buffers_is_read(tmp_path):
    weights = {"large": torch.randn(300_001), "small": torch.randn(3)}
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")

    assert_same(streamed(tmp_path, buffer_bytes=4096, readers=3), weights)


def test_size_and_rate_are_told(tmp_path):
    safetensors_torch.save_file({"a": torch.zeros(1_000_000)}, tmp_path / "model.safetensors")
    with weight_stream.WeightStream(weight_stream.stored_tensors(tmp_path), device="cpu") as stream:
        stream.wait()

    assert stream.size_bytes == 4_000_000
    assert stream.told().startswith("4.0 MB of weights in ")
    assert stream.told().endswith(" GB/s")


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
        weight_stream.stored_tensors(tmp_path)


def test_file_that_shrinks_while_it_is_read_raises_and_leaves_nothing(tmp_path):
    file = tmp_path / "model.safetensors"
    safetensors_torch.save_file({"a": torch.zeros(100_000), "b": torch.ones(100_000)}, file)
    stored = weight_stream.stored_tensors(tmp_path)
    os.truncate(file, 500_000)

    with (
        pytest.raises(OSError, match=r"ends at byte 500,000"),
        weight_stream.WeightStream(stored, device="cpu", buffer_bytes=4096, readers=4) as stream,
    ):
        stream.wait()

    assert threads_here() == []
    assert str(file) not in open_files()


def test_device_without_memory_raises_and_leaves_nothing(tmp_path):
    safetensors_torch.save_file({"a": torch.zeros(10)}, tmp_path / "model.safetensors")
    (stored,) = weight_stream.stored_tensors(tmp_path)

    with (
        pytest.raises(RuntimeError, match="memory"),
        weight_stream.WeightStream([stored._replace(shape=(1 << 60,))], device="cpu") as stream,
    ):
        stream.wait()

    assert threads_here() == []


def test_stream_that_is_left_early_ends_its_threads(tmp_path):
    safetensors_torch.save_file({"a": torch.zeros(1_000_000)}, tmp_path / "model.safetensors")

    with (
        pytest.raises(KeyError),
        weight_stream.WeightStream(weight_stream.stored_tensors(tmp_path), device="cpu", buffer_bytes=64),
    ):
        raise KeyError("the tokenizer is missing")

    assert threads_here() == []


# ---- on a GPU


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
    expected = made(spec)
    if dtype is not None:
        expected = {name: t.to(dtype) if t.is_floating_point() else t for name, t in expected.items()}
    assert_same(found, expected)


@pytest.mark.gpu
def test_large_weights_on_a_gpu_are_bit_equal(tmp_path, cuda):
    generator = torch.Generator().manual_seed(1)
    weights = {
        f"w{n}": torch.randint(-9, 9, (4096, 8192 + n), generator=generator).to(torch.bfloat16) for n in range(24)
    }
    safetensors_torch.save_file(weights, tmp_path / "model.safetensors")
    for what in ("first", "again"):
        with weight_stream.WeightStream(weight_stream.stored_tensors(tmp_path), device=cuda) as stream:
            found = stream.wait()
        print(f"{what}: {stream.told()}")

    assert_same(found, weights)


@pytest.mark.gpu
def test_gpu_without_memory_raises_and_keeps_nothing(tmp_path, cuda):
    safetensors_torch.save_file({"a": torch.zeros(10), "b": torch.zeros(10)}, tmp_path / "model.safetensors")
    first, second = weight_stream.stored_tensors(tmp_path)
    before = torch.cuda.memory_allocated(cuda)

    with (
        pytest.raises(torch.OutOfMemoryError),
        weight_stream.WeightStream([first, second._replace(shape=(1 << 45,))], device=cuda) as stream,
    ):
        stream.wait()

    assert torch.cuda.memory_allocated(cuda) == before
    assert threads_here() == []
