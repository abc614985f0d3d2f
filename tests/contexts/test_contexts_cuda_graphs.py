from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lazily import lazily
from own_driver import PROMPTS, GraphDriver

torch, step_graphs = lazily("torch", "stoker.contexts.inference.decode_graphs", needs="transformers")

ENDLESS = {"engine_options": (("ignore_eos", True),)}
MODEL = {
    "vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_driver(*, captures: bool = True, dtype: str = "float32") -> Any:
    driver = GraphDriver(
        step_graphs.CudaGraphs(torch.device("cuda:0")), captures=captures, cache_bytes=400_000_000,
        device="cuda:0", dtype=dtype, **MODEL,
    )  # fmt: skip
    assert (driver.ahead is not None) == captures  # the check of captured steps at load passed
    return driver


def asked(driver: Any) -> list[list[int]]:
    """Return the tokens of greedy and sampled requests in one batch; one request leaves, another request joins."""
    options = [{}, {"temperature": 1.0, "seed": (1, 0)}, {"temperature": 0.8, "top_p": 0.7, "seed": (2, 0)}]
    ids = [
        driver.ask(prompt, max_new_tokens=60 + 7 * at, **options[at % 3], **ENDLESS)
        for at, prompt in enumerate(PROMPTS)
    ]
    gone = driver.ask(PROMPTS[2], max_new_tokens=200, **ENDLESS)
    found = driver.run(steps=20)
    driver.engine.abort(gone)
    ids.append(driver.ask(PROMPTS[3], max_new_tokens=30, **ENDLESS))
    driver.run(found)
    return [[token.token for token in found[id]] for id in ids]


@pytest.mark.gpu
def test_captured_steps_give_the_tokens_of_eager_steps() -> None:
    driver = make_driver()
    assert asked(driver) == asked(make_driver(captures=False))
    assert not driver.ahead.graphs.failed
    assert driver.ahead.graphs._graphs
    assert driver.tokens(PROMPTS[0], max_new_tokens=12) == driver.own_tokens(PROMPTS[0], most=12)
    half = make_driver(dtype="bfloat16")
    assert [len(tokens) for tokens in asked(half)] == [60, 67, 74, 81, 88, 95, 30]
    assert not half.ahead.graphs.failed


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.7, "seed": (2, 0)}])
def test_step_waits_only_for_the_tokens_of_the_previous_step(options: dict[str, Any]) -> None:
    driver = make_driver()
    for prompt in PROMPTS[:2]:
        driver.ask(prompt, max_new_tokens=50, **options, **ENDLESS)
    driver.run(steps=5)
    assert driver.ahead.has_launched_step
    # from here on, implicit synchronization raises; a wait for the event of a copy is allowed
    torch.cuda.set_sync_debug_mode("error")
    found = driver.run(steps=10)
    torch.cuda.set_sync_debug_mode("default")
    assert [len(tokens) for tokens in found.values()] == [10, 10]


@pytest.mark.gpu
def test_memory_of_graphs_is_counted_and_freed() -> None:
    driver = make_driver()
    driver.tokens(PROMPTS[0], max_new_tokens=5)
    assert driver.backend.held_bytes > 0
    held = driver.engine.get_memory().held_bytes
    graphs = driver.backend.held_bytes
    before = torch.cuda.memory_reserved()
    driver.engine.sleep()
    assert driver.backend.held_bytes == 0
    assert driver.engine.get_memory().held_bytes <= held - graphs
    assert torch.cuda.memory_reserved() <= before - graphs
    driver.engine.wake()
    assert driver.tokens(PROMPTS[0], max_new_tokens=12) == driver.own_tokens(PROMPTS[0], most=12)
    assert driver.backend.held_bytes > 0


@pytest.mark.gpu
def test_other_threads_use_the_device_while_steps_are_captured() -> None:
    over = threading.Event()

    def use_device() -> None:
        while not over.is_set():
            (torch.ones(1 << 20, device="cuda:0") * 2).sum().item()

    other = threading.Thread(target=use_device)
    other.start()
    try:
        driver = make_driver()
        tokens = driver.tokens(PROMPTS[0], max_new_tokens=12)
        assert not driver.ahead.graphs.failed
    finally:
        over.set()
        other.join()
    assert tokens == driver.own_tokens(PROMPTS[0], most=12)
