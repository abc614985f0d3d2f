from __future__ import annotations

import functools
from typing import Any

import pytest
from engine_contract import EngineContract
from lazily import lazily
from own_driver import PROMPTS, SMALL, OwnDriver, generated, small_llama
from random_models import random_model

torch, transformers, decoder_module, forward, layer_split, pretended = lazily(
    "torch", "transformers", "stoker.contexts.inference.decoder", "stoker.contexts.forward",
    "stoker.contexts.layer_split", "pretended_devices",
)  # fmt: skip

MODELS: dict[str, tuple[str, Any]] = {
    "llama": ("continuous", lambda: transformers.LlamaConfig(**SMALL)),
    "qwen3": ("continuous", lambda: transformers.Qwen3Config(**SMALL, head_dim=8)),
    "static llama": ("static", lambda: transformers.LlamaConfig(**SMALL)),
    "sliding": ("static", lambda: transformers.MistralConfig(**SMALL, sliding_window=6)),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def make_model(kind: str) -> Any:
    return random_model(MODELS[kind][1]())


def make_driver(kind: str = "llama", **options: Any) -> OwnDriver:
    return OwnDriver(make_model(kind), engine=MODELS[kind][0], **options)


class TestOwnEngines(EngineContract):
    @pytest.fixture(params=["llama", "sliding"])  # test_contexts_architectures.py has more decoders
    def driver(self, request: pytest.FixtureRequest) -> OwnDriver:
        return make_driver(request.param)


def test_requests_that_outgrow_the_memory_write_the_same_text() -> None:
    # a token uses 384 bytes, so the cache fits six rows of the smallest size or one row of 512 tokens
    driver = make_driver(cache_bytes=250_000)
    expected = [driver.own_tokens(PROMPTS[at], most=150) for at in (0, 1, 2, 3)]
    ids = [driver.ask(PROMPTS[at], max_new_tokens=150) for at in (0, 1, 2, 3)]
    found = driver.run()
    assert [[token.token for token in found[id]] for id in ids] == expected
    assert driver.engine.get_load().evictions > 0
    with pytest.raises(ValueError, match=r"key-value cache.* more memory"):
        driver.ask(PROMPTS[4], max_new_tokens=1_500)


def test_smaller_memory_budget_applies_from_the_next_step_on() -> None:
    driver = make_driver()
    expected = {at: driver.own_tokens(PROMPTS[at], most=40) for at in (0, 2, 5)}
    ids = {at: driver.ask(PROMPTS[at], max_new_tokens=40) for at in (0, 2, 5)}
    found = driver.run(steps=6)
    with pytest.raises(ValueError, match="an open request would no longer fit"):
        driver.engine.resize(30_000)
    driver.cache_bytes = 100_000
    driver.engine.resize(driver.cache_bytes)
    assert driver.engine.get_memory().held_bytes <= driver.cache_bytes
    driver.run(found)
    assert {at: [token.token for token in found[id]] for at, id in ids.items()} == expected
    with pytest.raises(ValueError, match="too few for any request"):
        driver.engine.resize(10_000)
    driver.engine.resize(40_000)  # an idle engine shrinks too
    assert driver.engine.get_memory().held_bytes <= 40_000


def test_reused_row_leaks_nothing_to_the_next_request() -> None:
    driver = make_driver()
    expected = driver.tokens(PROMPTS[0], max_new_tokens=6)
    store = driver.engine._store
    for array in store.arrays.values():
        for layer in (*array.keys, *array.values):
            with torch.inference_mode():
                layer.fill_(float("nan"))
    driver.engine._prefixes.clear()
    assert driver.tokens(PROMPTS[0], max_new_tokens=6) == expected


def test_out_of_memory_in_a_step_fails_only_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = make_driver()
    expected = driver.own_tokens(PROMPTS[0], most=5)
    plain, layers = torch.empty, iter(range(100))

    def empty(shape: Any, **options: Any) -> Any:
        if shape[0] and next(layers) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return plain(shape, **options)

    id = driver.ask(PROMPTS[0], max_new_tokens=5)
    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", empty)
        with pytest.raises(RuntimeError, match="can't allocate"):
            driver.engine.step()
    driver.engine.abort(id)
    assert driver.tokens(PROMPTS[0], max_new_tokens=5) == expected


def test_shared_prompt_prefix_is_read_once() -> None:
    driver = make_driver()
    begin = PROMPTS[4]
    prompts = [(*begin, 50 + number) for number in range(4)]
    expected = [driver.own_tokens(prompt, most=6) for prompt in prompts]
    assert [driver.tokens(prompt, max_new_tokens=6) for prompt in prompts] == expected
    assert driver.engine.get_load().prompt_tokens < 2 * len(begin)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}, "rope_type dynamic"),
        ({"sliding_window": 6}, "sliding window of 6"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ],
)
def test_unsupported_models_get_no_optimized_decoder(change, says):
    kind = transformers.MistralConfig if "sliding_window" in change else transformers.LlamaConfig
    decoder, why = decoder_module.build_lean_decoder(
        transformers.AutoModelForCausalLM.from_config(kind(**SMALL, **change)).eval()
    )
    assert decoder is None
    assert says in why


def test_decoder_that_computes_wrong_values_is_not_used() -> None:
    model = make_model.__wrapped__("llama")
    model.config.num_key_value_heads = 1  # wrong value: the weights have two key-value heads
    decoder, why = decoder_module.build_lean_decoder(model)
    assert decoder is None
    assert "not as expected" in why or "other values" in why
    with pytest.raises(ValueError, match="does not support engine"):
        OwnDriver(model)


@pytest.mark.parametrize(
    ("kind", "token_bytes"), [("llama", 384), ("qwen3", 384), ("static llama", 384), ("sliding", 0)]
)
def test_engines_know_the_bytes_of_a_cached_token(kind: str, token_bytes: int) -> None:
    """Each cached token needs keys and values: 3 layers, 2 heads, 8 numbers of 4 bytes. Sliding windows do not grow."""
    memory = make_driver(kind).engine.get_memory()
    assert (memory.token_bytes, memory.fixed_tokens) == (token_bytes, 0)


# ---- models over several devices

DEVICES = ("gpu:0", "gpu:1")


def llama(layers: int = 3, **more: Any) -> Any:
    return transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": layers, **more})


def split_model() -> Any:
    model = small_llama()
    split = layer_split.assign_devices(model.config, DEVICES)
    pretended.place(model, split)
    layer_split.install_device_hooks(model, split, first=DEVICES[0])
    return model


@pytest.mark.parametrize("kind", ["continuous", "static"])
def test_split_model_and_whole_model_write_the_same_tokens(kind: str) -> None:
    first, second, long, one, *_ = PROMPTS
    expected = {prompt: generated(make_model("llama"), prompt, most=8) for prompt in (first, second, long, one)}
    with pretended.pretended_devices():
        driver = OwnDriver(split_model(), engine=kind)
        ids = {first: driver.ask(first, max_new_tokens=8), long: driver.ask(long, max_new_tokens=8)}
        found = driver.run(steps=3)
        ids[second], gone = driver.ask(second, max_new_tokens=8), driver.ask(long, max_new_tokens=8)
        driver.run(found, steps=3)
        driver.engine.abort(gone)
        ids[one] = driver.ask(one, max_new_tokens=8)
        driver.run(found)
        again = driver.tokens(long, max_new_tokens=8)  # this run uses cached prefixes
    assert {prompt: [token.token for token in found[id]] for prompt, id in ids.items()} == expected
    assert again == expected[long]


def test_token_memory_is_counted_on_the_device_with_most_layers() -> None:
    with pretended.pretended_devices():
        split = OwnDriver(split_model()).engine
    # the second device has layers 1 and 2: keys and values, 2 layers, 2 heads, 8 numbers of 4 bytes
    assert split._store.token_bytes == 2 * 2 * 2 * 8 * 4
    assert split.get_memory().weights_bytes < OwnDriver(make_model("llama")).engine.get_memory().weights_bytes


def test_split_model_and_whole_model_score_labels_equally() -> None:
    tails: list[list[tuple[int, ...]]] = [[(40, 41, 42), (43,)], [(44, 45), (46, 47, 48)]]
    rows = [PROMPTS[0], PROMPTS[2]]
    expected = forward.ModelRunner(make_model("llama"), limit_bytes=0).score(rows, tails)
    with pretended.pretended_devices():
        runner = forward.ModelRunner(split_model(), limit_bytes=10_000_000)
        by_tree = runner.score(rows, tails, prefix=PROMPTS[0][:4], batch_size=2)
        runner._has_tree_mask = False
        by_row = runner.score(rows, tails, batch_size=2)
    for found in (by_tree, by_row):
        assert [x for row in found for x in row] == pytest.approx([x for row in expected for x in row], abs=1e-4)


def test_layers_are_distributed_by_their_bytes() -> None:
    split = layer_split.assign_devices(llama(8, vocab_size=1000, tie_word_embeddings=True), DEVICES)
    assert [split[f"model.layers.{layer}"][-1] for layer in range(8)] == list("00111111")
    split = layer_split.assign_devices(llama(8), ("gpu:0", "gpu:1", "gpu:2", "gpu:3"))
    assert [split[f"model.layers.{layer}"][-1] for layer in range(8)] == list("01112233")
    split = layer_split.assign_devices(llama(4, vocab_size=50_000), ("gpu:0", "gpu:1", "gpu:2", "gpu:3"))
    assert [split[f"model.layers.{layer}"][-1] for layer in range(4)] == list("0123"), "every device has a layer"
    with pytest.raises(ValueError, match="3 layers, which cannot be split over 4 devices"):
        layer_split.assign_devices(llama(3), ("gpu:0", "gpu:1", "gpu:2", "gpu:3"))


def test_modules_outside_the_layers_are_on_the_first_device() -> None:
    split = layer_split.assign_devices(llama(), DEVICES)
    for part in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.rotary_emb.inv_freq"):
        assert layer_split.device_of_module(split, part) == "gpu:0"
    assert layer_split.device_of_module(split, "model.layers.2.mlp.up_proj.weight") == "gpu:1"


def test_experts_are_not_counted_as_layers() -> None:
    config = transformers.MixtralConfig(**{**SMALL, "num_hidden_layers": 2}, num_local_experts=8)
    split = layer_split.assign_devices(config, DEVICES)
    assert {name for name in split if "layers" in name} == {"model.layers.0", "model.layers.1"}
