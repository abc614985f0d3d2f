"""A gateway whose models are a base and its adapters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from adapter_folders import write_tiny_lora, write_tiny_soft_prompt
from gateway.running import LIMIT_S

import stoker

pytestmark = pytest.mark.slow
MODELS = """
[models.small]
path = "models/tiny"

[models.legal]
base = "small"
adapter = "lora"
ttft = "10 min"

[models.soft]
base = "small"
adapter = "soft"

[models.damaged]
base = "small"
adapter = "damaged"
"""
NAMES = ("small", "legal", "soft")
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def write_models():
    def write(folder):
        (folder / "models.toml").write_text(MODELS)
        write_tiny_lora(folder / "lora", seed=1)
        write_tiny_lora(folder / "damaged", seed=2, scale=float("nan"))
        write_tiny_soft_prompt(folder / "soft", seed=3)

    return write


def text_of(http, name, **options):
    body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **options}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == name
    return answer.json()["choices"][0]["text"], answer.json()["usage"]


def pefts_model(folder, adapter):
    import peft
    import transformers

    tiny = folder / "models" / "tiny"
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, folder / adapter).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    return model, tokenizer, tokenizer([PROMPT], return_tensors="pt")["input_ids"]


def pefts_text(folder, adapter):
    import torch

    model, tokenizer, ids = pefts_model(folder, adapter)
    with torch.inference_mode():
        made = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def test_base_and_adapters_write_pefts_texts_in_one_context(gateway, http):
    with ThreadPoolExecutor(len(NAMES)) as pool:
        found = dict(zip(NAMES, pool.map(lambda name: text_of(http, name), NAMES), strict=True))
    texts = {name: text for name, (text, _) in found.items()}
    assert texts == {"small": pefts_text(gateway.folder, ""), "legal": pefts_text(gateway.folder, "lora"),
                     "soft": pefts_text(gateway.folder, "soft")}  # fmt: skip
    assert {usage["prompt_tokens"] for _, usage in found.values()} == {len(PROMPT)}
    with stoker.load(session=gateway.session, progress=False) as session:
        assert len({library.recipe for library in session.status().libraries}) == 1


@pytest.mark.parametrize(("name", "adapter"), [("legal", "lora"), ("soft", "soft")])
def test_echoed_prompts_of_adapters_have_pefts_likelihoods(gateway, http, name, adapter):
    import torch

    body = {"model": name, "prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 1}
    found = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    model, _, ids = pefts_model(gateway.folder, adapter)
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -ids.shape[1] : -1]
    expected = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[0, 1:, None])[:, 0]
    assert found[0] is None
    assert found[1:] == pytest.approx(expected.tolist(), abs=1e-4)


def test_adapters_are_listed_with_their_base(http):
    listed = {each["id"]: each.get("parent") for each in http.get("/v1/models").json()["data"]}
    assert listed == {"small": None, "legal": "small", "soft": "small", "damaged": "small"}


def test_request_that_outgrows_a_soft_prompt_is_refused(http):
    body = {"model": "soft", "prompt": PROMPT, "max_tokens": 2048 - len(PROMPT) - 4}
    answer = http.post("/v1/completions", json=body, timeout=LIMIT_S)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_damaged_adapter_is_refused_by_name(http):
    answer = http.post("/v1/completions", json={"model": "damaged", "prompt": PROMPT})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "the adapter damaged cannot be served" in answer.json()["error"]["message"]
