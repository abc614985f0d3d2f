from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import adapter_folders
import pytest
from lazily import lazily
from own_driver import SMALL, OwnDriver, generated, small_llama

torch, peft, safetensors, passes, recorded = lazily(
    "torch", "peft", "safetensors.torch", "stoker.tuning.passes", "recorded_graphs"
)  # fmt: skip

PROMPTS = [tuple(40 + (7 * at * length) % 70 for at in range(length)) for length in (9, 21, 40)]
ATTENTION, EVERY = ["q_proj", "v_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

pytestmark = pytest.mark.usefixtures("one_thread")


class AdapterDriver(OwnDriver):
    """The continuous engine with adapters, and the PEFT model with the same adapters."""

    def __init__(self, folders: dict[str, str], *, engine: str = "continuous", backend: Any = None) -> None:
        self.folders = folders
        super().__init__(
            small_llama(), engine=engine, prompts=PROMPTS, adapters=folders, graphs=backend is not None,
            backend=lambda _: backend,
        )  # fmt: skip

    def own_tokens(self, prompt: tuple[int, ...], *, most: int, adapter: str = "") -> list[int]:
        model = small_llama()
        if adapter:
            model = peft.PeftModel.from_pretrained(model, self.folders[adapter]).eval()
        return generated(model, prompt, most=most)

    def check(self, asked: list[tuple[str, tuple[int, ...]]], *, most: int = 12) -> list[list[int]]:
        expected = [self.own_tokens(prompt, most=most, adapter=name) for name, prompt in asked]
        ids = [self.ask(prompt, max_new_tokens=most, adapter=name) for name, prompt in asked]
        found = self.run()
        assert [[token.token for token in found[id]] for id in ids] == expected
        return expected


def write_lora(folder: Path, *, base: Any = None, **options: Any) -> str:
    return adapter_folders.write_lora(folder, base if base is not None else small_llama(), **options)


def write_soft_prompt(folder: Path, *, seed: int, tokens: int) -> str:
    torch.manual_seed(seed)
    with passes.attach_soft_prompt(small_llama(), torch.randn(tokens, SMALL["hidden_size"])) as soft:
        weights, config = soft.adapter_files()
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_bytes(config)
    return str(folder)


def test_adapters_and_base_in_one_batch_write_the_tokens_of_peft(tmp_path: Path) -> None:
    driver = AdapterDriver({
        "few": write_lora(tmp_path / "few", seed=1, modules=ATTENTION),
        "every": write_lora(tmp_path / "every", seed=2, modules=EVERY, use_rslora=True),
        "part": write_lora(tmp_path / "part", seed=3, modules=["down_proj", "o_proj"], layers_to_transform=[1]),
    })  # fmt: skip
    asked = [(name, prompt) for prompt in PROMPTS[:2] for name in ("", "few", "every", "part")]
    found = driver.check(asked)
    assert len({tuple(tokens) for tokens in found[:4]}) == 4  # the adapters change the text
    assert driver.engine.get_load().most_running == len(asked)


def test_soft_prompts_write_the_tokens_of_peft(tmp_path: Path) -> None:
    driver = AdapterDriver({
        "soft": write_soft_prompt(tmp_path / "soft", seed=1, tokens=11),
        "other": write_soft_prompt(tmp_path / "other", seed=2, tokens=3),
        "lora": write_lora(tmp_path / "lora", seed=2, modules=ATTENTION),
    })  # fmt: skip
    for _ in range(2):  # the second run uses cached prefixes
        found = driver.check([(name, PROMPTS[2]) for name in ("soft", "", "other", "lora")])
    assert len({tuple(tokens) for tokens in found}) == 4
    assert driver.engine._prefixes.reused_tokens >= 40


def test_long_prompts_of_adapters_are_read_in_parts(tmp_path: Path) -> None:
    driver = AdapterDriver({
        "soft": write_soft_prompt(tmp_path / "soft", seed=1, tokens=20),
        "lora": write_lora(tmp_path / "lora", seed=2, modules=EVERY),
    })  # fmt: skip
    limits = driver.engine._batch.limits
    driver.engine._batch.limits = type(limits)(rows=8, prefill_tokens=7, mixes=True, cache_tokens=limits.cache_tokens)
    driver.check([("soft", PROMPTS[2]), ("lora", PROMPTS[2]), ("", PROMPTS[0])])


def test_steps_with_a_lora_adapter_use_no_captured_graph(tmp_path: Path) -> None:
    folders = {
        "lora": write_lora(tmp_path / "lora", seed=1, modules=ATTENTION),
        "soft": write_soft_prompt(tmp_path / "soft", seed=1, tokens=4),
    }
    driver = AdapterDriver(folders, backend=recorded.RecordedGraphs())
    driver.engine._ahead.graphs._uses_before = 0
    driver.check([("", PROMPTS[0]), ("soft", PROMPTS[1])])
    replays = driver.engine._ahead.graphs._backend.replays
    assert replays > 0
    driver.check([("", PROMPTS[0]), ("lora", PROMPTS[1])], most=6)
    assert driver.engine._ahead.graphs._backend.replays == replays
    driver.check([("lora", PROMPTS[1])])
    assert driver.engine._ahead.graphs._backend.replays == replays


def test_adapter_evicted_from_memory_is_read_again(tmp_path: Path) -> None:
    folders = {
        f"lora-{seed}": write_lora(tmp_path / str(seed), seed=seed, modules=EVERY, rank_pattern={"q_proj": 32})
        for seed in range(6)
    }
    driver = AdapterDriver(folders)
    weights = driver.engine.get_memory().weights_bytes
    expected = driver.check([("lora-0", PROMPTS[0])])
    kept = driver.engine.get_memory().weights_bytes - weights
    assert kept > 0
    for name in list(folders)[1:]:
        driver.tokens(PROMPTS[0], max_new_tokens=3, adapter=name)
    assert driver.engine.get_memory().weights_bytes - weights < 3 * kept
    assert driver.tokens(PROMPTS[0], max_new_tokens=12, adapter="lora-0") == expected[0]


def test_adapter_of_another_base_model_fails_only_its_request(tmp_path: Path) -> None:
    wide, deep = small_llama(hidden_size=64), small_llama(num_hidden_layers=5)
    driver = AdapterDriver({
        "good": write_lora(tmp_path / "good", seed=1, modules=ATTENTION),
        "wide": write_lora(tmp_path / "wide", seed=1, modules=ATTENTION, base=wide),
        "deep": write_lora(tmp_path / "deep", seed=1, modules=ATTENTION, base=deep),
        "gone": str(tmp_path / "gone"),
    })  # fmt: skip
    for name, why in (
        ("wide", "of another base model: q_proj of layer 0 maps 64 to 64 numbers, but 32 to 32 in the base model"),
        ("deep", "it has layer 3, and the base model has 3 layers"),
        ("gone", "has no adapter_config.json"),
        ("none", "the model has no adapter 'none'; there are good, wide, deep, gone"),
    ):
        with pytest.raises(ValueError, match=why):
            driver.ask(PROMPTS[0], adapter=name)
    driver.check([("good", PROMPTS[0]), ("", PROMPTS[1])])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        ({"use_dora": True}, "DoRA is not supported"),
        ({"lora_alpha": "x"}, "lora_alpha = 'x' is not a number"),
        ({"weights": b"\xff" * 40}, "cannot be read as safetensors"),
        ({"weights": None}, "not finite"),
    ],
)
def test_damaged_adapter_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    folder = write_lora(tmp_path / "lora", seed=1, modules=ATTENTION)
    file = Path(folder, "adapter_model.safetensors")
    if "weights" in change:
        infinite = {name: part * float("inf") for name, part in safetensors.load_file(file).items()}
        file.write_bytes(change["weights"] or safetensors.save(infinite))
    else:
        config = Path(folder, "adapter_config.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(ValueError, match=why):
        AdapterDriver({"lora": folder}).ask(PROMPTS[0], adapter="lora")
    with pytest.raises(ValueError, match="engine does not support adapters"):
        AdapterDriver({"lora": folder}, engine="static").ask(PROMPTS[0], adapter="lora")
