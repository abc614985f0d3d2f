from __future__ import annotations

import importlib
import json
import logging
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from lazily import LazyModule
from tiny_model import write_tiny_model

from stoker.apps.common.models_file import make_recipe_from_settings, parse_models
from stoker.contexts import causal_lm
from stoker.contexts.engine_settings import EngineSettings, check_vllm_arguments
from stoker.contexts.model_source import add_token_cache_to_needs
from stoker.contexts.recipe import Needs
from stoker.errors import ConfigError, RecipeError, StokerError

needs_models = pytest.mark.skipif(
    not (find_spec("torch") and find_spec("transformers")), reason="needs the extra models"
)
loading = LazyModule("stoker.contexts.model_loading")
HEAD = '[models.a]\npath = "m"\n'


def models(text: str, folder):
    (folder / "m").mkdir(exist_ok=True)
    (folder / "m" / "config.json").write_text('{"max_position_embeddings": 2048}')
    return parse_models(HEAD + text, file="models.toml", folder=folder)["a"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('quantization = "fp8"\n', 'quantization: only vLLM supports this; write engine = "vllm"'),
        ('engine = "static"\n[models.a.vllm]\nmax_num_seqs = 8\n', "max_num_seqs: only vLLM supports this"),
        ('engine = "vllm"\n[models.a.vllm]\ntensor_parallel_size = 2\n', "instead of tensor_parallel_size"),
        ('engine = "vllm"\n[models.a.vllm]\nmax_logprobs = 2\n', "Stoker sets max_logprobs itself; leave it out"),
        ('engine = "vllm"\nquantization = "fp8"\nvllm = {quantization = "awq"}\n', "quantization is given twice"),
        ("max_model_len = 4096\n", "max_model_len = 4096 is more than the 2048 tokens of the model"),
        ('chat_template = "chat.jinja"\n', "chat_template: chat.jinja cannot be read: No such file"),
        ('kind = "embedding"\nmax_model_len = 8\n', "max_model_len is for models that generate text"),
    ],
)  # fmt: skip
def test_invalid_setting_is_refused_with_its_file(tmp_path, text, said):
    with pytest.raises(ConfigError) as error:
        models(text, tmp_path)
    assert said in str(error.value)


def test_settings_of_a_models_file_equal_those_of_its_recipe(tmp_path):
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    lines = 'engine = "vllm"\nmax_model_len = 64\nchat_template = "chat.jinja"\nquantization = "fp8"\n'
    found = models(lines + "[models.a.vllm]\nmax_num_seqs = 8\n", tmp_path)
    assert found.engine_settings == EngineSettings(64, "{{ messages }}", {"quantization": "fp8", "max_num_seqs": 8})
    same = causal_lm(
        tmp_path / "m", engine="vllm", max_model_len=64, chat_template="{{ messages }}",
        vllm={"max_num_seqs": 8, "quantization": "fp8"},
    )  # fmt: skip
    assert make_recipe_from_settings(found).key == same.key
    plain = models("", tmp_path)
    assert make_recipe_from_settings(plain).key == causal_lm(tmp_path / "m").key != same.key
    for options in ({"max_model_len": -1}, {"chat_template": 3}, {"vllm": {"block_size": 16}}):
        with pytest.raises(RecipeError):
            causal_lm(tmp_path / "m", **options)
    inline = models('chat_template = "{{ messages[0].content }}"\n', tmp_path)
    assert inline.engine_settings.chat_template == "{{ messages[0].content }}"


def test_unknown_argument_of_vllm_is_named(tmp_path):
    check_vllm_arguments(["max_num_seqs"], ["max_num_seqs", "seed"], version="1")
    with pytest.raises(
        StokerError, match=r"max_num_seq is not an engine argument of vLLM 1; did you mean max_num_seqs\?"
    ):
        check_vllm_arguments(["max_num_seq"], ["max_num_seqs", "seed"], version="1")


@needs_models
def test_model_has_the_length_and_the_template_of_its_settings(tmp_path):
    write_tiny_model(tmp_path / "tiny")
    path = str(tmp_path / "tiny")
    model = loading.load_model(path, settings=EngineSettings(64, "<{{ messages[0].content }}>"))
    assert (model.longest, model.chat_prompt([{"role": "user", "content": "hello"}])) == (64, "<hello>")
    with pytest.raises(ValueError, match="64"):
        model.generate(["two " * 60], max_new_tokens=32)
    with pytest.raises(StokerError, match="chat_template: line 2"):
        loading.load_model(path, settings=EngineSettings(chat_template="\n{% if %}"))
    with pytest.raises(StokerError, match="max_model_len = 999999 is more than the 2048 tokens"):
        loading.load_model(path, settings=EngineSettings(999_999))


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


@needs_models
@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_missing_vllm_error_names_the_package_to_install() -> None:
    with pytest.raises(StokerError, match=r"vLLM is not installed here; pip install 'stoker\[vllm\]'"):
        loading.load_model("models/mine", engine="vllm")
    assert loading.reason_for_vllm("auto", device="cuda:0") == ""


@needs_models
def test_vllm_is_used_on_a_gpu_if_it_can_be_imported(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    (tmp_path / "vllm.py").write_text("raise OSError('libcuda.so.1: cannot open')")
    for engine, device in (("continuous", "cuda:0"), ("static", "cuda:0"), ("auto", "cpu")):
        assert loading.reason_for_vllm(engine, device=device) == "", "other engines do not import vLLM"
    with pytest.raises(StokerError, match=r"its import fails \(libcuda.so.1: cannot open\)"):
        loading.reason_for_vllm("vllm", device="cuda:0")
    with caplog.at_level(logging.WARNING):
        assert loading.reason_for_vllm("auto", device="cuda:0") == ""
    assert "libcuda.so.1" in caplog.text
    (tmp_path / "vllm.py").write_text("")
    importlib.invalidate_caches()
    assert "GPU" in loading.reason_for_vllm("auto", device="cuda:0")
    assert loading.reason_for_vllm("vllm", device="cpu") == 'engine="vllm" was given'
    sys.modules.pop("vllm", None)
