"""Request options, engine settings and adapters reach vLLM. `test_contexts_vllm` describes the environment."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; test_contexts_vllm.py says how to run it", allow_module_level=True)

import msgspec
import psutil
from adapter_folders import write_lora, write_tiny_soft_prompt
from faults.world import until
from lazily import lazily
from random_models import random_model
from tiny_model import write_tiny_model

import stoker
from stoker.contexts import ambient, causal_lm
from stoker.contexts.inference.options import OptionRefused
from stoker.contexts.loading import load_context
from stoker.errors import StokerError

torch, transformers, peft, safetensors = lazily("torch", "transformers", "peft", "safetensors.torch")

WIDTH = 128
PROMPTS = ["Once upon a time", "The quick brown fox jumps over", "abc"]
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Load = Callable[..., Any]

pytestmark = pytest.mark.timeout(900)  # vLLM starts slowly on a busy machine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm")
    write_tiny_model(folder / "base")
    (folder / "base" / "model.safetensors").unlink()
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=WIDTH, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    random_model(config).save_pretrained(folder / "base")
    base = partial(random_model, config)
    write_lora(folder / "few", base(), seed=0, modules=["q_proj", "v_proj"])
    write_lora(folder / "every", base(), seed=1, modules=EVERY, use_rslora=True, rank=12)
    write_lora(folder / "part", base(), seed=2, modules=EVERY, layers_to_transform=[1], alpha_pattern={"up_proj": 64})
    write_tiny_soft_prompt(folder / "soft", seed=3, width=WIDTH, tokens=11)
    return folder


@pytest.fixture(scope="module")
def load(folder: Path) -> Iterator[Load]:
    """Return a function that loads a model and keeps it until the next load: a process can hold one vLLM model."""
    kept: dict[str, Any] = {}
    named: dict[str, str] = {}

    def load(engine: str = "vllm", **options: Any) -> Any:
        if engine == "vllm":
            options["vllm"] = {"enforce_eager": True, **options.get("vllm", {})}  # a compilation takes minutes
        if named.get(engine) != str(options):
            if engine in kept:
                named.pop(engine)
                kept.pop(engine).close()
            recipe = causal_lm(folder / "base", engine=engine, device_memory="1 GB", dtype="float32", **options)
            ambient.enter_library(device="cpu", device_memory_bytes=recipe.needs.device_memory_bytes)
            try:
                kept[engine] = load_context(recipe, {ref.name: ref.source for ref in recipe.objects})
                named[engine] = str(options)
            finally:
                ambient.leave_library()
        return kept[engine]

    yield load
    for model in kept.values():
        model.close()


def adapters_in(folder: Path, *names: str) -> dict[str, str]:
    return {name: str(folder / name) for name in names}


GRAMMAR = 'root ::= "yes " word | "no"\nword ::= "sir" | "madam"\n'
LARK = 'start: "yes " word | "no"\nword: "sir" | "madam"\n'
SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["age", "kind"],
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["cat", "dog"]}},
}  # fmt: skip


class TestOptions:
    """Test request options with one engine: vLLM starts once per class."""

    @pytest.mark.parametrize(
        "options",
        [
            {"presence_penalty": 1.5},
            {"frequency_penalty": 0.7},
            {"repetition_penalty": 1.3},
            {"logit_bias": {65: 8.0, 70: -50.0}},
            {"min_tokens": 12},
            {"ignore_eos": True},
            {"stop_token_ids": [5, 17, 33, 60]},
            {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "min_tokens": 3},
        ],
        ids=lambda options: "-".join(options),
    )
    def test_vllm_and_continuous_engine_write_equal_text_with_options(
        self, load: Load, options: dict[str, Any]
    ) -> None:
        own, model = load("continuous"), load()
        for prompt in PROMPTS:
            asked = {"max_new_tokens": 24, "engine_options": options, "logprobs": 1}
            expected, found = own.complete(prompt, **asked), model.complete(prompt, **asked)
            assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)

    @pytest.mark.parametrize(
        ("option", "value", "pattern"),
        [
            ("regex", r"[a-c]{3}-[0-9]{2}", r"[a-c]{3}-[0-9]{2}"),
            ("choice", ["red", "green", "light green"], r"red|green|light green"),
            ("grammar", GRAMMAR, r"yes (sir|madam)|no"),
            ("grammar", LARK, r"yes (sir|madam)|no"),
        ],
    )
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_generated_text_matches_the_requested_format(
        self, load: Load, option: str, value: Any, pattern: str, temperature: float
    ) -> None:
        model = load()
        for prompt in PROMPTS:
            found = model.complete(prompt, max_new_tokens=40, temperature=temperature, engine_options={option: value})
            assert re.fullmatch(pattern, found.text), found.text
            assert found.finish_reason == "stop"
        free = model.generate([PROMPTS[0]], max_new_tokens=10)
        assert free == load("continuous").generate([PROMPTS[0]], max_new_tokens=10)
        schema = msgspec.json.encode(SCHEMA).decode()
        found = model.complete(PROMPTS[0], max_new_tokens=200, temperature=temperature, json_schema=schema)
        said = msgspec.json.decode(found.text, type=dict[str, Any])
        assert said["kind"] in ("cat", "dog")
        assert 0 <= said["age"] <= 99

    def test_completed_format_ends_the_text_despite_ignore_eos(self, load: Load) -> None:
        asked = {"max_new_tokens": 20, "engine_options": {"choice": ["red", "blue"], "ignore_eos": True}}
        found = load().complete(PROMPTS[0], **asked)
        assert (found.text, found.finish_reason) == (load("continuous").complete(PROMPTS[0], **asked).text, "stop")
        assert found.text in ("red", "blue")

    @pytest.mark.parametrize(
        ("option", "value"),
        [("regex", "[a-"), ("grammar", "root ::= missing"), ("json_schema", '{"type": "cat"}'), ("json_schema", "{")],
    )
    def test_format_that_cannot_be_compiled_is_refused_by_name(self, load: Load, option: str, value: str) -> None:
        model = load()
        given = {option: value} if option == "json_schema" else {"engine_options": {option: value}}
        with pytest.raises(OptionRefused) as error:
            model.complete(PROMPTS[0], max_new_tokens=8, **given)
        assert error.value.option == option
        assert len(model.generate([PROMPTS[0]], max_new_tokens=4)[0]) > 0


class TestSettings:
    def test_settings_are_passed_to_vllm(self, load: Load) -> None:
        model = load(
            max_model_len=96, chat_template="<{{ messages[0].content }}>",
            vllm={"max_num_seqs": 3, "max_num_batched_tokens": 128},
        )  # fmt: skip
        config = model._vllm_engine._llm.vllm_config
        assert (config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens) == (3, 128)
        assert (config.model_config.max_model_len, model.longest, model.slots()) == (96, 96, 3)
        assert model.chat_prompt([{"role": "user", "content": "hello"}]) == "<hello>"
        with pytest.raises(ValueError, match="96"):
            model.generate(["a" * 90], max_new_tokens=10)
        assert model.generate(PROMPTS, max_new_tokens=6) == load("continuous").generate(PROMPTS, max_new_tokens=6)

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (
                {"vllm": {"max_num_seq": 3}},
                "max_num_seq is not an engine argument of vLLM .*; did you mean max_num_seqs",
            ),
            (
                {"vllm": {"quantization": "fp9"}},
                "vLLM cannot start with .*quantization = 'fp9'(?s:.*)Unknown quantization method: fp9",
            ),
            ({"vllm": {"max_num_seqs": 0}}, "vLLM cannot start with .*max_num_seqs = 0"),
            ({"max_model_len": 4096}, "max_model_len = 4096 is more than the 512 tokens of the model"),
            ({"chat_template": "\n{% if %}"}, "chat_template: line 2"),
        ],
    )
    def test_setting_that_vllm_does_not_support_is_named(self, load: Load, options: dict[str, Any], said: str) -> None:
        with pytest.raises(StokerError, match=said):
            load(**options)


def pefts_text(folder: Path, adapter: str, prompt: str, *, most: int = 12) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    if adapter:
        model = peft.PeftModel.from_pretrained(model, folder / adapter).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "base")
    ids = tokenizer([prompt], return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, pad_token_id=0
        )
    return str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))


NAMES = ("few", "every", "part", "soft")


@pytest.fixture
def adapted(load: Load, folder: Path) -> Any:
    return load(adapters=adapters_in(folder, *NAMES))


class TestAdapters:
    def test_adapters_and_base_in_one_batch_write_the_tokens_of_peft(self, adapted: Any, folder: Path) -> None:
        asked = [(name, prompt) for name in ("", *NAMES) for prompt in PROMPTS[:2]]
        expected = [pefts_text(folder, name, prompt) for name, prompt in asked]
        assert len(set(expected)) == len(expected)  # each adapter changes the text
        for _ in range(2):  # the second run uses the prefix cache
            with ThreadPoolExecutor(len(asked)) as pool:
                found = pool.map(lambda one: adapted.complete(one[1], max_new_tokens=12, adapter=one[0]).text, asked)
            assert list(found) == expected
        assert adapted._thread.engine.get_load().most_running > 4

    def test_options_and_formats_apply_to_adapters(self, adapted: Any) -> None:
        for name in NAMES:
            written = adapted.complete(
                PROMPTS[0], max_new_tokens=20, adapter=name, engine_options={"choice": ["a", "bc"]}
            )
            assert written.text in ("a", "bc")
        own = adapted.complete(PROMPTS[0], max_new_tokens=9, adapter="soft", engine_options={"repetition_penalty": 1.2})
        assert own.completion_tokens <= 9

    def test_unusable_adapter_fails_without_affecting_other_adapters(
        self, load: Load, folder: Path, tmp_path: Path
    ) -> None:
        damaged = shutil.copytree(folder / "few", tmp_path / "damaged")
        file = damaged / "adapter_model.safetensors"
        tensors = {name: part * float("nan") for name, part in safetensors.load_file(file).items()}
        safetensors.save_file(tensors, file)
        model = load(adapters={**adapters_in(folder, "few"), "damaged": str(damaged)})
        for name, why in (
            ("damaged", "not finite"),
            ("none", "the model has no adapter 'none'; there are damaged, few"),
        ):
            with pytest.raises(OptionRefused, match=why) as error:
                model.complete(PROMPTS[0], max_new_tokens=4, adapter=name)
            assert error.value.option == "adapter"
        written = model.complete(PROMPTS[0], max_new_tokens=12, adapter="few").text
        assert written == pefts_text(folder, "few", PROMPTS[0])

    def test_soft_prompt_reduces_the_space_for_the_text(self, adapted: Any) -> None:
        assert adapted.virtual_tokens("soft") == 11
        with pytest.raises(ValueError, match="the model accepts at most 512"):
            adapted.complete("a" * 100, max_new_tokens=405, adapter="soft")
        assert adapted.complete("a" * 100, max_new_tokens=405).prompt_tokens == 100


def test_library_on_two_devices_ends_if_one_of_its_processes_dies(folder: Path, tmp_path: Path) -> None:
    """A library on two devices serves adapters. If one of its processes dies, its calls run again."""

    def written(model: Any, asked: list[tuple[str, str]], most: int) -> tuple[list[str], int, list[int]]:
        import psutil as processes

        own = processes.Process()
        parts = [each.pid for each in own.children() if each.name().startswith("VLLM::Worker_TP")]
        with ThreadPoolExecutor(len(asked)) as pool:
            texts = pool.map(
                lambda one: (
                    model.complete(
                        one[1], max_new_tokens=most, adapter=one[0], engine_options={"ignore_eos": most > 12}
                    ).text
                ),
                asked,
            )
        return list(texts), own.pid, parts

    two = causal_lm(
        folder / "base", engine="vllm", dtype="float32", devices=2, device_memory="3 GB", max_libraries=1,
        adapters=adapters_in(folder, *NAMES), vllm={"enforce_eager": True},
    )  # fmt: skip
    asked = [(name, prompt) for name in ("", *NAMES) for prompt in PROMPTS[:2]]
    expected = [pefts_text(folder, name, prompt) for name, prompt in asked]
    (tmp_path / "two.toml").write_text('[provider]\nkind = "local"\n[pilot]\ndevices = "cpu:2"\nmax_blocks = 1\n')
    with stoker.load(str(tmp_path / "two.toml"), run_dir=str(tmp_path)):
        call = stoker.app(written, context=two)
        texts, library, parts = call(asked, 12).result(timeout=600)
        assert texts == expected
        assert len(parts) == 2
        running = call(asked[:1], 400)
        os.kill(parts[1], signal.SIGKILL)
        until(lambda: not {library, *parts} & set(psutil.pids()))
        again, other, others = call(asked, 12).result(timeout=600)
        assert again == expected
        assert other != library
        assert running.result(timeout=600)[0][0].startswith(expected[0])
    until(lambda: not {other, *others} & set(psutil.pids()))
