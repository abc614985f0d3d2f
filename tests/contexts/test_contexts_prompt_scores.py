from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from lazily import lazily
from own_driver import SMALL, OwnDriver, small_llama
from random_models import random_model

torch, transformers, adapter, batching, prompt_scores = lazily(
    "torch", "transformers", "stoker.contexts.inference.adapter", "stoker.contexts.batching",
    "stoker.contexts.inference.kernels",
)  # fmt: skip

SHORT, LONG = (5, 9, 2, 33), tuple(number * 7 % 64 for number in range(150))
MODELS: dict[str, Callable[[], Any]] = {
    "continuous": small_llama,
    "static": small_llama,
    "sliding": lambda: random_model(transformers.MistralConfig(**SMALL, sliding_window=6)),
    "gpt2": lambda: random_model(transformers.GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4)),
}


def make_driver(kind: str) -> OwnDriver:
    return OwnDriver(MODELS[kind](), engine="continuous" if kind == "continuous" else "static", ends=())


@pytest.fixture(params=MODELS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> OwnDriver:
    # split even a short prompt into several parts
    monkeypatch.setattr("stoker.contexts.inference.kernels._MAX_LOGITS_AT_ONCE", 20 * SMALL["vocab_size"])
    return make_driver(request.param)


def assert_scores(driver: OwnDriver, token: Any, prompt: Sequence[int], *, most: int) -> None:
    """Compare the scores of a prompt with the log-probabilities of the bare model."""
    with torch.inference_mode():
        own = torch.log_softmax(driver.model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    assert [each.token for each in token.prompt] == list(prompt)
    assert (token.prompt[0].logprob, token.prompt[0].likeliest) == (None, ())
    for place, scored in enumerate(token.prompt[1:]):
        assert scored.logprob == pytest.approx(float(own[place, scored.token]), abs=1e-4)
        assert [each.logprob for each in scored.likeliest] == pytest.approx(own[place].topk(most)[0].tolist(), abs=1e-4)
        assert all(each.logprob == pytest.approx(float(own[place, each.token]), abs=1e-4) for each in scored.likeliest)


def test_prompt_scores_equal_those_of_the_model_in_any_batch(driver: OwnDriver) -> None:
    plain = driver.ask(LONG, max_new_tokens=8)
    scored = driver.ask(LONG, max_new_tokens=8, prompt_logprobs=3)
    alone = driver.ask(SHORT, max_new_tokens=0, prompt_logprobs=1)
    one = driver.ask(SHORT[:1], max_new_tokens=2, prompt_logprobs=1)
    found = driver.run()
    assert [token.token for token in found[scored]] == [token.token for token in found[plain]]
    assert all(not token.prompt for token in (*found[plain], *found[scored][1:], found[one][1]))
    assert_scores(driver, found[scored][0], LONG, most=3)
    [last] = found[alone]
    assert (last.token, last.text, last.finish) == (-1, "", adapter.FinishReason.LENGTH)
    assert_scores(driver, last, SHORT, most=1)
    assert found[one][0].prompt == (adapter.ScoredPromptToken(SHORT[0]),)


def test_cached_prefix_does_not_hide_log_likelihoods(driver: OwnDriver) -> None:
    driver.ask(LONG, max_new_tokens=1)
    driver.run()
    again = driver.ask((*LONG, 5), max_new_tokens=0, prompt_logprobs=2)
    assert_scores(driver, driver.run()[again][0], (*LONG, 5), most=2)


def test_greedy_tokens_have_the_logprob_of_the_likeliest_token(driver: OwnDriver) -> None:
    """lm-eval detects greedy continuations by this equality."""
    written = driver.tokens(SHORT, max_new_tokens=10)
    id = driver.ask((*SHORT, *written), max_new_tokens=0, prompt_logprobs=1)
    [scored] = driver.run()[id]
    assert all(each.logprob == each.likeliest[0].logprob for each in scored.prompt[len(SHORT) :])


def test_prompt_scores_survive_an_eviction_between_prompt_parts() -> None:
    driver = make_driver("continuous")
    for options in ({"max_new_tokens": 0}, {"prompt_logprobs": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be a whole number, [01] or more, not"):
            driver.ask(SHORT, **options)
    limits = driver.engine._batch.limits
    driver.engine._batch.limits = batching.BatchLimits(rows=4, prefill_tokens=40, cache_tokens=limits.cache_tokens)
    id = driver.ask(LONG, max_new_tokens=2, prompt_logprobs=2)
    driver.engine.step()
    driver.engine._store.free_row(id)
    assert driver.engine._batch._evict_latest_due() == id
    assert_scores(driver, driver.run()[id][0], LONG, most=2)


@pytest.mark.parametrize("driver", ["continuous", "static"], indirect=True)
def test_only_a_part_of_the_logits_exists_at_a_time(driver: OwnDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    take = prompt_scores.PromptScores.score_following_tokens

    def noted(self: Any, start: int, logits: Any) -> None:
        sizes.append(len(logits))
        take(self, start, logits)

    monkeypatch.setattr(prompt_scores.PromptScores, "score_following_tokens", noted)
    driver.ask(LONG, max_new_tokens=0, prompt_logprobs=1)
    driver.run()
    assert sum(sizes) == len(LONG)
    assert max(sizes) == 20
