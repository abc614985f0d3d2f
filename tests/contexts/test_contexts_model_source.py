from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path

import pytest
from lazily import lazily

from stoker.contexts.model_source import add_token_cache_to_needs
from stoker.contexts.recipe import Needs
from stoker.errors import StokerError

CONFIG = {
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64,
    "max_position_embeddings": 2048, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("more", "needs", "dtype", "found"),
    [
        ({}, Needs(), "auto", (2 * 6 * 4 * 8 * 4, 2048)),
        ({}, Needs(kinds=("NVIDIA A10",)), "auto", (2 * 6 * 4 * 8 * 2, 2048)),
        ({"head_dim": 16}, Needs(), "float32", (2 * 6 * 4 * 16 * 4, 2048)),
        ({"num_key_value_heads": None}, Needs(), "float32", (2 * 6 * 8 * 8 * 4, 2048)),
        ({"max_position_embeddings": 1 << 20}, Needs(), "float32", (1536, 4096)),
        ({}, Needs(device_memory_bytes=1_536_100), "float32", (1536, 1000)),
        ({}, Needs(memory_bytes=10**10, device_memory_bytes=768_100, kinds=("NVIDIA A10",)), "auto", (768, 1000)),
        ({"num_hidden_layers": "six"}, Needs(), "auto", (0, 0)),
    ],
)
def test_token_memory_is_keys_and_values_of_all_layers(tmp_path, more, needs, dtype, found):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **more}))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    made = add_token_cache_to_needs(needs, str(tmp_path), dtype=dtype)
    assert (made.token_bytes, made.cache_tokens) == found


@pytest.mark.parametrize("config", [None, "[]", "{", "7"])
def test_model_without_a_usable_config_keeps_its_declared_needs(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert add_token_cache_to_needs(Needs(disk_bytes=3), str(tmp_path), dtype="auto") == Needs(disk_bytes=3)


loading = lazily("stoker.contexts.model_loading", needs="torch transformers")
ABSENT = importlib.util.find_spec("vllm") is None


@pytest.mark.skipif(not ABSENT, reason="vLLM is installed here")
def test_missing_vllm_error_names_the_package_to_install() -> None:
    with pytest.raises(StokerError, match=r"vLLM is not installed here; pip install 'stoker\[vllm\]'"):
        loading.load_model("models/mine", engine="vllm")
    assert loading.why_vllm("auto", device="cuda:0") == ""


def test_vllm_is_used_on_a_gpu_if_it_can_be_imported(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    (tmp_path / "vllm.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    for engine, device in (("continuous", "cuda:0"), ("static", "cuda:0"), ("auto", "cpu")):
        assert loading.why_vllm(engine, device=device) == "", "other engines do not import vLLM"
    with pytest.raises(StokerError, match=r"does not import \(libcuda.so.1: cannot open\)"):
        loading.why_vllm("vllm", device="cuda:0")
    with caplog.at_level(logging.WARNING):
        assert loading.why_vllm("auto", device="cuda:0") == ""
    assert "libcuda.so.1" in caplog.text
    (tmp_path / "vllm.py").write_text("")
    importlib.invalidate_caches()
    assert "GPU" in loading.why_vllm("auto", device="cuda:0")
    assert loading.why_vllm("vllm", device="cpu") == 'engine="vllm" was given'
    sys.modules.pop("vllm", None)
