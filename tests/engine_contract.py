"""Tests of the inference engine contract (`stoker.contexts.inference.adapter`). A driver makes an engine over a small
model. The expected tokens come from the model's method `generate`.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest

from stoker.contexts.inference.adapter import FinishReason, GenerationRequest, NewToken, Sampling

Ids = tuple[int, ...]
_STEPS = 2_000


class EngineDriver(abc.ABC):
    """An engine and facts of its model. `cache_bytes`: cache budget, 0 without a cache."""

    def __init__(self, engine: Any, *, prompts: Sequence[Ids], cache_bytes: int = 0) -> None:
        self.engine = engine
        self.prompts = prompts
        self.cache_bytes = cache_bytes
        self.ids = itertools.count(1)

    @abc.abstractmethod
    def own_tokens(self, prompt: Ids, *, most: int) -> list[int]:
        """Return the tokens that the model's method `generate` writes, including the end token."""

    def ask(self, prompt: Ids, **options: Any) -> int:
        pieces = options.pop("pieces", False)
        request = GenerationRequest(next(self.ids), prompt, Sampling(**options), pieces=pieces)
        self.engine.add(request)
        return request.id

    def run(self, found: dict[int, list[NewToken]] | None = None, *, steps: int = _STEPS) -> dict[int, list[NewToken]]:
        found = {} if found is None else found
        for _ in range(steps):
            load = self.engine.get_load()
            if not load.running + load.waiting:
                break
            for token in self.engine.step():
                found.setdefault(token.request, []).append(token)
            if self.cache_bytes:
                assert self.engine.get_memory().held_bytes <= self.cache_bytes
        else:
            assert steps < _STEPS, "the engine does not finish"
        return found

    def run_text(self, id: int) -> str:
        return "".join(token.text for token in self.run()[id])

    def tokens(self, prompt: Ids, **options: Any) -> list[int]:
        id = self.ask(prompt, **options)
        return [token.token for token in self.run()[id]]


class EngineContract:
    """The contract tests. A subclass must provide the fixture `driver`."""

    def test_greedy_tokens_equal_those_of_the_model(self, driver: EngineDriver) -> None:
        expected = [driver.own_tokens(prompt, most=12) for prompt in driver.prompts]
        assert [driver.tokens(prompt, max_new_tokens=12) for prompt in driver.prompts] == expected
        ids = [driver.ask(prompt, max_new_tokens=12) for prompt in driver.prompts]
        found = driver.run()
        assert [[token.token for token in found[id]] for id in ids] == expected

    def test_joining_or_leaving_request_does_not_change_other_texts(self, driver: EngineDriver) -> None:
        first, second, third, *_ = driver.prompts
        alone = {prompt: driver.tokens(prompt, max_new_tokens=20) for prompt in (first, second)}
        one = driver.ask(first, max_new_tokens=20)
        found = driver.run(steps=4)
        two = driver.ask(second, max_new_tokens=20)
        gone = driver.ask(third, max_new_tokens=20)
        driver.run(found, steps=3)
        driver.engine.abort(gone)
        driver.run(found)
        assert [token.token for token in found[one]] == alone[first]
        assert [token.token for token in found[two]] == alone[second]
        assert len(found.get(gone, [])) < 20

    def test_aborted_requests_leave_nothing(self, driver: EngineDriver) -> None:
        before = driver.engine.get_load()
        ids = [driver.ask(prompt, max_new_tokens=50) for prompt in driver.prompts]
        driver.run(steps=3)
        for id in (*ids, 10_000):  # aborting the unknown id 10,000 changes nothing
            driver.engine.abort(id)
        load = driver.engine.get_load()
        assert (load.running, load.waiting) == (before.running, before.waiting) == (0, 0)
        assert driver.engine.step() == []
        assert driver.tokens(driver.prompts[0], max_new_tokens=3) == driver.own_tokens(driver.prompts[0], most=3)

    def test_aborted_request_is_in_no_later_step(self, driver: EngineDriver) -> None:
        first, second, *_ = driver.prompts
        unread = driver.ask(first, max_new_tokens=20)
        driver.engine.abort(unread)
        assert driver.engine.step() == []
        alone = driver.tokens(second, max_new_tokens=20)
        gone, stays = driver.ask(first, max_new_tokens=20), driver.ask(second, max_new_tokens=20)
        found = driver.run(steps=4)
        before = len(found.get(gone, []))
        driver.engine.abort(gone)
        load = driver.engine.get_load()
        assert load.running + load.waiting == 1
        driver.run(found)
        assert len(found.get(gone, [])) == before
        assert [token.token for token in found[stays]] == alone

    def test_sampled_tokens_depend_only_on_the_seed(self, driver: EngineDriver) -> None:
        prompt, other, *_ = driver.prompts
        draws = {"max_new_tokens": 12, "temperature": 1.0}
        alone = driver.tokens(prompt, seed=(5, 0), **draws)
        assert driver.tokens(prompt, seed=(5, 0), **draws) == alone
        assert driver.tokens(prompt, seed=(6, 0), **draws) != alone
        driver.ask(other, seed=(7, 1), **draws)
        id = driver.ask(prompt, seed=(5, 0), **draws)
        assert [token.token for token in driver.run()[id]] == alone
        assert driver.tokens(prompt, seed=(5, 0), max_new_tokens=5, temperature=1.0, top_p=1e-9) == (
            driver.tokens(prompt, max_new_tokens=5)
        )

    def test_options_apply_only_to_their_request(self, driver: EngineDriver) -> None:
        prompt, other, *_ = driver.prompts
        plain = driver.tokens(prompt, max_new_tokens=8)
        banned = (("logit_bias", {plain[0]: -100}),)
        without = driver.tokens(prompt, max_new_tokens=8, engine_options=banned)
        assert plain[0] not in without
        free = driver.ask(prompt, max_new_tokens=8)
        held = driver.ask(prompt, max_new_tokens=8, engine_options=banned)
        options = (("top_k", 20), ("min_p", 0.01), ("repetition_penalty", 1.2), ("frequency_penalty", 0.5))
        draws = {"max_new_tokens": 8, "temperature": 1.0, "seed": (3, 1), "engine_options": options}
        drawn = driver.ask(other, **draws)
        found = {id: [token.token for token in tokens] for id, tokens in driver.run().items()}
        assert (found[free], found[held]) == (plain, without)
        assert found[drawn] == driver.tokens(other, **draws)
        one = {"max_new_tokens": 8, "temperature": 1.0, "engine_options": (("top_k", 1),)}
        assert driver.tokens(prompt, **one) == plain
        for wrong in ({"top_k": "many"}, {"logit_bias": {10**6: 1.0}}, {"topk": 3}):
            with pytest.raises(ValueError, match=next(iter(wrong))):
                driver.ask(prompt, engine_options=tuple(wrong.items()))

    def test_text_has_its_minimum_number_of_tokens(self, driver: EngineDriver) -> None:
        written = driver.tokens(driver.prompts[0], max_new_tokens=6)
        ending = {"max_new_tokens": 6, "engine_options": (("stop_token_ids", [written[1]]),)}
        assert len(driver.tokens(driver.prompts[0], **ending)) <= 2
        least = (("stop_token_ids", [written[1]]), ("min_tokens", 5))
        found = driver.tokens(driver.prompts[0], max_new_tokens=6, engine_options=least)
        assert len(found) >= 5
        assert written[1] not in found[:5]

    def test_pieces_join_to_the_text_and_a_stop_text_ends_it(self, driver: EngineDriver) -> None:
        prompt = driver.prompts[0]
        whole = driver.run_text(driver.ask(prompt, max_new_tokens=16))
        assert len(whole) > 4
        id = driver.ask(prompt, max_new_tokens=16, pieces=True)
        pieces = [token.text for token in driver.run()[id]]
        assert "".join(pieces) == whole
        assert len([piece for piece in pieces if piece]) > 1
        stop = whole[3:5]
        for asked in (False, True):
            id = driver.ask(prompt, max_new_tokens=16, stop=("never", stop), pieces=asked)
            tokens = driver.run()[id]
            assert "".join(token.text for token in tokens) == whole[: whole.index(stop)]
            assert tokens[-1].finish is FinishReason.STOP

    def test_log_likelihoods_equal_those_of_the_model(self, driver: EngineDriver) -> None:
        id = driver.ask(driver.prompts[0], max_new_tokens=3, logprobs=2)
        for token in driver.run()[id]:
            assert token.logprob is not None
            assert token.logprob <= 0
            assert token.likeliest[0].token == token.token  # a greedy request chooses the likeliest token
            assert token.likeliest[0].logprob == pytest.approx(token.logprob, abs=1e-3)
            assert math.exp(token.likeliest[0].logprob) + math.exp(token.likeliest[1].logprob) <= 1 + 1e-6

    def test_request_that_never_fits_is_refused(self, driver: EngineDriver) -> None:
        with pytest.raises(ValueError, match="the model accepts at most"):
            driver.ask(driver.prompts[0] * 3_000, max_new_tokens=5)
        for wrong in (
            {"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"logprobs": -1}, {"stop": ("",)},
            {"stop": (None,)}, {"max_new_tokens": 2.5},
        ):  # fmt: skip
            with pytest.raises(ValueError, match=r"temperature|logprobs|stop text|max_new_tokens"):
                driver.ask(driver.prompts[0], **wrong)
        assert driver.engine.get_load().waiting == 0

    def test_engine_sleeps_and_writes_the_same_text_after_waking(self, driver: EngineDriver) -> None:
        prompt = driver.prompts[1]
        before = driver.tokens(prompt, max_new_tokens=8)
        driver.ask(prompt, max_new_tokens=8)
        with pytest.raises(RuntimeError, match="cannot sleep"):
            driver.engine.sleep()
        driver.run()
        held = driver.engine.get_memory().held_bytes
        driver.engine.sleep()
        assert driver.engine.get_memory().held_bytes <= held
        with pytest.raises(ValueError, match="asleep"):
            driver.ask(prompt)
        driver.engine.wake()
        assert driver.tokens(prompt, max_new_tokens=8) == before
