"""Prompt scores equal the log-likelihoods of the Transformers model in any batch and at any length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from lazily import lazily
from tiny_encoder import load_recipe
from tiny_model import write_tiny_model

from stoker.contexts import causal_lm

torch, transformers, adapter, batching, forward, choosing, prompt_scores = lazily(
    "torch", "transformers", "stoker.contexts.inference.adapter", "stoker.contexts.batching", "stoker.contexts.forward",
    "stoker.contexts.inference.static", "stoker.contexts.inference.prompt_scores",
)  # fmt: skip

VOCABULARY = 64
SHORT, LONG = (5, 9, 2, 33), tuple(number * 7 % VOCABULARY for number in range(150))
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
MODELS = {
    "continuous": lambda: transformers.LlamaConfig(**SMALL),
    "static": lambda: transformers.LlamaConfig(**SMALL),
    "sliding": lambda: transformers.MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=6),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256),
}


class Engine:
    """An engine over a random model, and the model's own log-probabilities."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(3)
        self.model = transformers.AutoModelForCausalLM.from_config(MODELS[kind]()).eval()
        texts = adapter.ModelTexts(
            decode=lambda ids: " ".join(map(str, ids)), ends=frozenset(), longest=256, vocabulary=VOCABULARY
        )
        runner = forward.ModelRunner(self.model, limit_bytes=10_000_000)
        engine = "continuous" if kind == "continuous" else "static"
        self.engine = choosing.build_inference_engine(runner, texts, engine=engine, cache_bytes=50_000_000)
        self._numbers = 0

    def ask(self, prompt: Sequence[int], **options: Any) -> int:
        self._numbers += 1
        self.engine.add(adapter.GenerationRequest(self._numbers, tuple(prompt), adapter.Sampling(**options)))
        return self._numbers

    def run(self) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        while self.engine.load().running + self.engine.load().waiting:
            for token in self.engine.step():
                found.setdefault(token.request, []).append(token)
        return found

    def run_all(self, prompt: Sequence[int], **options: Any) -> list[Any]:
        id = self.ask(prompt, **options)
        return self.run()[id]

    def own(self, prompt: Sequence[int]) -> Any:
        """Return the model's log-probabilities after each token of a prompt."""
        with torch.inference_mode():
            return torch.log_softmax(self.model(torch.tensor([prompt])).logits[0].float(), dim=-1)


@pytest.fixture(params=MODELS)
def driver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(
        "stoker.contexts.inference.prompt_scores._LOGITS_AT_ONCE", 20 * VOCABULARY
    )  # split even a short prompt into several parts
    return Engine(request.param)


def assert_scores(driver: Engine, token: Any, prompt: Sequence[int], *, most: int) -> None:
    own = driver.own(prompt)
    assert [each.token for each in token.prompt] == list(prompt)
    assert (token.prompt[0].logprob, token.prompt[0].likeliest) == (None, ())
    for place, scored in enumerate(token.prompt[1:]):
        assert scored.logprob == pytest.approx(float(own[place, scored.token]), abs=1e-4)
        assert [each.logprob for each in scored.likeliest] == pytest.approx(own[place].topk(most)[0].tolist(), abs=1e-4)
        assert all(each.logprob == pytest.approx(float(own[place, each.token]), abs=1e-4) for each in scored.likeliest)


def test_prompt_scores_equal_those_of_the_model_in_any_batch(driver: Engine) -> None:
    plain = driver.ask(LONG, max_new_tokens=8)
    scored = driver.ask(LONG, max_new_tokens=8, prompt_logprobs=3)
    alone = driver.ask(SHORT, max_new_tokens=0, prompt_logprobs=1)
    one = driver.ask(SHORT[:1], max_new_tokens=2, prompt_logprobs=1)
    found = driver.run()
    assert [token.token for token in found[scored]] == [token.token for token in found[plain]]
    assert all(not token.prompt for token in (*found[plain], *found[scored][1:], found[one][1]))
    assert_scores(driver, found[scored][0], LONG, most=3)
    [last] = found[alone]
    assert (last.token, last.text, last.finish) == (-1, "", adapter.Finish.LENGTH)
    assert_scores(driver, last, SHORT, most=1)
    assert found[one][0].prompt == (adapter.PromptToken(SHORT[0]),)


def test_cached_prefix_does_not_hide_log_likelihoods(driver: Engine) -> None:
    driver.ask(LONG, max_new_tokens=1)
    driver.run()
    again = driver.ask((*LONG, 5), max_new_tokens=0, prompt_logprobs=2)
    assert_scores(driver, driver.run()[again][0], (*LONG, 5), most=2)


def test_likeliest_prompt_tokens_equal_their_own_likelihood(driver: Engine) -> None:
    """lm-eval detects greedy continuations by this equality."""
    written = [token.token for token in driver.run_all(SHORT, max_new_tokens=10)]
    [scored] = driver.run_all((*SHORT, *written), max_new_tokens=0, prompt_logprobs=1)
    assert all(each.logprob == each.likeliest[0].logprob for each in scored.prompt[len(SHORT) :])


def test_prompt_read_in_parts_survives_an_eviction() -> None:
    driver = Engine("continuous")
    limits = driver.engine._batch.limits
    driver.engine._batch.limits = batching.BatchLimits(rows=4, prefill_tokens=40, cache_tokens=limits.cache_tokens)
    id = driver.ask(LONG, max_new_tokens=2, prompt_logprobs=2)
    driver.engine.step()
    driver.engine._store.free(id)
    assert driver.engine._batch._evict() == id
    assert_scores(driver, driver.run()[id][0], LONG, most=2)


@pytest.mark.parametrize("driver", ["continuous", "static"], indirect=True)
def test_only_a_part_of_the_logits_exists_at_a_time(driver: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    take = prompt_scores.PromptScores.take

    def noted(self: Any, start: int, logits: Any) -> None:
        sizes.append(len(logits))
        take(self, start, logits)

    monkeypatch.setattr(prompt_scores.PromptScores, "take", noted)
    driver.ask(LONG, max_new_tokens=0, prompt_logprobs=1)
    driver.run()
    assert sum(sizes) == len(LONG)
    assert max(sizes) == 20


@pytest.mark.parametrize(("options", "says"), [
    ({"max_new_tokens": 0}, "max_new_tokens must be a whole number, 1 or more, not 0"),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be a whole number, 0 or more, not -1"),
])  # fmt: skip
def test_score_options_are_checked(options, says):
    with pytest.raises(ValueError, match=says):
        Engine("continuous").ask(SHORT, **options)


@pytest.fixture(scope="module", params=["continuous", "static"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder)
    loaded = load_recipe(causal_lm(folder, engine=request.param))
    yield loaded
    loaded.close()


def test_prompt_may_be_token_ids(model: Any) -> None:
    ids = model._prompts.row("Paris lies in France")
    text = model.complete("Paris lies in France", max_new_tokens=6, prompt_logprobs=1)
    assert model.complete(ids, max_new_tokens=6, prompt_logprobs=1) == text
    assert (model.count_tokens(ids), model.text_of(ids)) == (20, "Paris lies in France")
    assert "".join(token for token, _, _ in text.prompt_logprobs) == "Paris lies in France"
    first, *_ = model.stream_completion(list(ids), max_new_tokens=6, prompt_logprobs=1)
    assert first.prompt_logprobs == text.prompt_logprobs


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([5, 100_000], "the prompt has the token 100000; this model's tokens are 0 to"),
        ([], "the prompt is empty"),
        (["a", "b"], "must be one text, or its token ids, not a list"),
        ([1.5], "must be one text, or its token ids"),
    ],
)
def test_invalid_token_ids_are_refused(model, prompt, says):
    with pytest.raises(ValueError, match=says):
        model.complete(prompt, max_new_tokens=1)
