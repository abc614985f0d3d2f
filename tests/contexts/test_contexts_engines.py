from __future__ import annotations

import functools
from typing import Any

import pytest
from engine_contract import EngineContract
from lazily import lazily
from own_driver import PROMPTS, SMALL, OwnDriver
from random_models import random_model

torch, transformers, decoder_module = lazily("torch", "transformers", "stoker.contexts.inference.decoder")

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
    assert driver.engine.load().evictions > 0
    with pytest.raises(ValueError, match=r"key-value cache.* more memory"):
        driver.ask(PROMPTS[4], max_new_tokens=1_500)


def test_smaller_budget_applies_from_the_next_step_on() -> None:
    driver = make_driver()
    expected = {at: driver.own_tokens(PROMPTS[at], most=40) for at in (0, 2, 5)}
    ids = {at: driver.ask(PROMPTS[at], max_new_tokens=40) for at in (0, 2, 5)}
    found = driver.run(steps=6)
    with pytest.raises(ValueError, match="open would not fit"):
        driver.engine.resize(30_000)
    driver.cache_bytes = 100_000
    driver.engine.resize(driver.cache_bytes)
    assert driver.engine.memory().held_bytes <= driver.cache_bytes
    driver.run(found)
    assert {at: [token.token for token in found[id]] for at, id in ids.items()} == expected
    with pytest.raises(ValueError, match="no request fits"):
        driver.engine.resize(10_000)
    driver.engine.resize(40_000)  # an idle engine shrinks too
    assert driver.engine.memory().held_bytes <= 40_000


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
    assert driver.engine.load().prompt_tokens < 2 * len(begin)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}, "rope_type dynamic"),
        ({"sliding_window": 6}, "sliding window of 6"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ],
)
def test_unsupported_models_use_their_own_modules(change, says):
    kind = transformers.MistralConfig if "sliding_window" in change else transformers.LlamaConfig
    decoder, why = decoder_module.build_lean_decoder(
        transformers.AutoModelForCausalLM.from_config(kind(**SMALL, **change)).eval()
    )
    assert decoder is None
    assert says in why


def test_decoder_with_other_computations_is_not_used() -> None:
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
    """A token needs keys and values of 3 layers with 2 heads of 8 numbers of 4 bytes; sliding windows do not grow."""
    memory = make_driver(kind).engine.memory()
    assert (memory.token_bytes, memory.fixed_tokens) == (token_bytes, 0)
