from __future__ import annotations

import functools
from typing import Any

import pytest
from lazily import lazily
from own_driver import PROMPTS, SMALL, OwnDriver, generated, small_llama

transformers, forward, layer_split, pretended = lazily(
    "transformers", "stoker.contexts.forward", "stoker.contexts.layer_split", "pretended_devices", needs="torch"
)  # fmt: skip

DEVICES = ("gpu:0", "gpu:1")
pytestmark = pytest.mark.usefixtures("one_thread")

whole_model = functools.cache(small_llama)


def llama(layers: int = 3, **more: Any) -> Any:
    return transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": layers, **more})


def split_model() -> Any:
    model = small_llama()
    split = layer_split.device_map(model.config, DEVICES)
    pretended.place(model, split)
    layer_split.dispatch(model, split, first=DEVICES[0])
    return model


@pytest.mark.parametrize("kind", ["continuous", "static"])
def test_split_engine_writes_the_tokens_of_one_device(kind: str) -> None:
    first, second, long, one, *_ = PROMPTS
    expected = {prompt: generated(whole_model(), prompt, most=8) for prompt in (first, second, long, one)}
    with pretended.pretended_devices():
        driver = OwnDriver(split_model(), engine=kind)
        ids = {first: driver.ask(first, max_new_tokens=8), long: driver.ask(long, max_new_tokens=8)}
        found = driver.run(steps=3)
        ids[second], gone = driver.ask(second, max_new_tokens=8), driver.ask(long, max_new_tokens=8)
        driver.run(found, steps=3)
        driver.engine.abort(gone)
        ids[one] = driver.ask(one, max_new_tokens=8)
        driver.run(found)
        again = driver.tokens(long, max_new_tokens=8)  # with cached prefixes
    assert {prompt: [token.token for token in found[id]] for prompt, id in ids.items()} == expected
    assert again == expected[long]


def test_token_memory_is_that_of_the_device_with_most_layers() -> None:
    with pretended.pretended_devices():
        split = OwnDriver(split_model()).engine
    # the second device has layers 1 and 2: keys and values of 2 layers with 2 heads of 8 numbers of 4 bytes
    assert split._store.token_bytes == 2 * 2 * 2 * 8 * 4
    assert split.memory().weights_bytes < OwnDriver(whole_model()).engine.memory().weights_bytes


def test_scores_of_labels_equal_those_of_one_device() -> None:
    tails: list[list[tuple[int, ...]]] = [[(40, 41, 42), (43,)], [(44, 45), (46, 47, 48)]]
    rows = [PROMPTS[0], PROMPTS[2]]
    expected = forward.RunnerScorer(forward.ModelRunner(whole_model(), limit_bytes=0)).score(rows, tails)
    with pretended.pretended_devices():
        runner = forward.ModelRunner(split_model(), limit_bytes=10_000_000)
        by_tree = forward.RunnerScorer(runner).score(rows, tails, prefix=PROMPTS[0][:4], batch_size=2)
        runner._trees = False
        by_row = forward.RunnerScorer(runner).score(rows, tails, batch_size=2)
    for found in (by_tree, by_row):
        assert [x for row in found for x in row] == pytest.approx([x for row in expected for x in row], abs=1e-4)


def test_layers_are_distributed_by_their_bytes() -> None:
    split = layer_split.device_map(llama(8, vocab_size=1000, tie_word_embeddings=True), DEVICES)
    assert [split[f"model.layers.{layer}"][-1] for layer in range(8)] == list("00111111")
    split = layer_split.device_map(llama(8), ("gpu:0", "gpu:1", "gpu:2", "gpu:3"))
    assert [split[f"model.layers.{layer}"][-1] for layer in range(8)] == list("01112233")
    split = layer_split.device_map(llama(4, vocab_size=50_000), ("gpu:0", "gpu:1", "gpu:2", "gpu:3"))
    assert [split[f"model.layers.{layer}"][-1] for layer in range(4)] == list("0123"), "every device has a layer"
    with pytest.raises(ValueError, match="3 layers, which cannot be split over 4 devices"):
        layer_split.device_map(llama(3), ("gpu:0", "gpu:1", "gpu:2", "gpu:3"))


def test_other_modules_are_on_the_first_device() -> None:
    split = layer_split.device_map(llama(), DEVICES)
    for part in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "model.rotary_emb.inv_freq"):
        assert layer_split.device_of_module(split, part) == "gpu:0"
    assert layer_split.device_of_module(split, "model.layers.2.mlp.up_proj.weight") == "gpu:1"


def test_experts_are_not_counted_as_layers() -> None:
    config = transformers.MixtralConfig(**{**SMALL, "num_hidden_layers": 2}, num_local_experts=8)
    split = layer_split.device_map(config, DEVICES)
    assert {name for name in split if "layers" in name} == {"model.layers.0", "model.layers.1"}
