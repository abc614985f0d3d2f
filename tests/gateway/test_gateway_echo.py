"""Prompts as token ids, echoed prompts with log-probabilities, and `best_of`, as evaluation harnesses request them."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
from gateway.asking import openai
from lazily import lazily

torch, transformers = lazily("torch", "transformers")
pytestmark = pytest.mark.slow
PROMPTS = ["Paris lies in France.", "Water boils at 100 °C, on most days", "x"]
ECHO = {"model": "small", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}
"""What lm-eval sends for log-likelihoods."""


@pytest.fixture(scope="module")
def own(gateway):
    """Return the model's own log-probabilities after each token of a prompt, by Transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(gateway.folder / "models" / "tiny")

    def after_tokens(ids):
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)

    return after_tokens


@pytest.fixture(scope="module")
def tokenizer(gateway):
    return transformers.AutoTokenizer.from_pretrained(gateway.folder / "models" / "tiny")


def test_echoed_likelihoods_are_those_of_transformers(client, own, tokenizer):
    rows = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    with ThreadPoolExecutor(8) as threads:  # batched with requests that write
        others = [
            threads.submit(client.completions.create, model="small", prompt=prompt, max_tokens=30)
            for prompt in PROMPTS * 3
        ]
        answer = client.completions.create(**ECHO, prompt=rows)
        assert all(other.result().choices for other in others)
    assert answer.usage.prompt_tokens == sum(map(len, rows))
    assert answer.usage.completion_tokens == len(rows)
    for prompt, ids, choice in zip(PROMPTS, rows, answer.choices, strict=True):
        found, expected = choice.logprobs, own(ids)
        assert choice.text.startswith(prompt)
        assert len(found.tokens) == len(ids) + 1
        assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
        greedy = expected[-1].max().item()
        per_token = [expected[place, token].item() for place, token in enumerate(ids[1:])] + [greedy]
        assert found.token_logprobs[1:] == pytest.approx(per_token, abs=1e-4)
        likeliest = [max(each.values()) for each in found.top_logprobs[1:]]
        assert likeliest == pytest.approx(expected.max(dim=-1)[0].tolist(), abs=1e-4)


def test_an_echo_of_no_new_tokens_is_the_prompt(client):
    whole = client.completions.create(**{**ECHO, "max_tokens": 0}, prompt=PROMPTS[0])
    [choice] = whole.choices
    assert (choice.text, choice.finish_reason) == (PROMPTS[0], "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPTS[0]), 0)
    assert "".join(choice.logprobs.tokens) == PROMPTS[0]
    assert choice.logprobs.text_offset == list(range(len(PROMPTS[0])))
    plain = client.completions.create(model="small", prompt=PROMPTS[0], max_tokens=0, echo=True)
    assert (plain.choices[0].text, plain.choices[0].logprobs) == (PROMPTS[0], None)
    with pytest.raises(openai.BadRequestError, match="max_tokens must be a whole number from 1") as refused:
        client.completions.create(model="small", prompt="x", max_tokens=0)
    assert refused.value.param == "max_tokens"


@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("most", [0, 5])
def test_a_streamed_echo_is_the_whole_one(client, most, logprobs):
    asked = {**ECHO, "max_tokens": most, "prompt": PROMPTS[:2], "logprobs": logprobs}
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage == whole.usage
    for index, choice in enumerate(whole.choices):
        parts = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "text_offset", "token_logprobs") if logprobs else ():
            found = itertools.chain.from_iterable(getattr(part.logprobs, name) for part in parts if part.logprobs)
            expected = getattr(choice.logprobs, name)
            assert list(found) == (pytest.approx(expected, abs=1e-4) if name == "token_logprobs" else expected)


def test_token_ids_write_what_their_text_writes(client, tokenizer):
    asked = {"model": "small", "max_tokens": 8, "temperature": 0}
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    texts = [choice.text for choice in client.completions.create(**asked, prompt=PROMPTS).choices]
    assert [choice.text for choice in client.completions.create(**asked, prompt=ids).choices] == texts
    one = client.completions.create(**asked, prompt=ids[0], echo=True)
    assert one.choices[0].text == PROMPTS[0] + texts[0]
    assert one.usage.prompt_tokens == len(ids[0])


@pytest.mark.parametrize("stream", [False, True])
def test_ids_beyond_the_vocabulary_are_refused_by_field(client, stream):
    with pytest.raises(openai.BadRequestError, match="the token 40000; this model's tokens are 0 to") as refused:
        client.completions.create(model="small", prompt=[5, 40_000], max_tokens=4, stream=stream)
    assert refused.value.param == "prompt"


def test_best_of_returns_the_likeliest_of_its_candidates(client):
    asked = {"model": "small", "prompt": ["One", "Two"], "max_tokens": 6, "seed": 5, "temperature": 1.5}
    every = client.completions.create(**asked, n=6, logprobs=0)
    best = client.completions.create(**asked, n=2, best_of=6)

    def mean(choice):
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = [sorted(every.choices[start : start + 6], key=mean, reverse=True)[:2] for start in (0, 6)]
    assert [choice.text for choice in best.choices] == [choice.text for each in expected for choice in each]
    assert [choice.logprobs for choice in best.choices] == [None] * 4
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage == every.usage  # all candidates count


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
def test_lm_eval_finds_what_its_own_backend_finds(gateway):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder = str(gateway.folder / "models" / "tiny")
    served = LocalCompletionsAPI(
        f"{gateway.url}/v1/completions", model="small", tokenizer=folder, batch_size=4, num_concurrent=2
    )
    own = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=2)
    ends = itertools.product(PROMPTS, (" yes", " no", " perhaps not"))
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(ends)]
    for found, expected in zip(served.loglikelihood(asked), own.loglikelihood(asked), strict=True):
        assert found == (pytest.approx(expected[0], abs=1e-3), expected[1])
    how = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    asked = [Instance("generate_until", {}, (prompt, how), number) for number, prompt in enumerate(PROMPTS)]
    assert served.generate_until(asked) == own.generate_until(asked)
