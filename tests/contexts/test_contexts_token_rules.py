from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from lazily import lazily

from stoker.contexts.inference.adapter import GenerationRequest, ModelTexts, Sampling

torch, transformers, token_rules = lazily(
    "torch", "transformers", "stoker.contexts.inference.token_rules", needs="transformers"
)

WORDS = 50
TEXTS = ModelTexts(decode=str, ends=frozenset({1}), longest=0, vocabulary=WORDS)
CHANCE = random.Random(5)
PROMPT = [CHANCE.randrange(WORDS) for _ in range(20)]
WRITTEN = [CHANCE.randrange(WORDS) for _ in range(80)]


def logits() -> Any:
    return torch.randn(WORDS, generator=torch.Generator().manual_seed(2)) * 3


def rules(**options: Any) -> Any:
    sampling = Sampling(temperature=0.5, engine_options=tuple(options.items()))
    made = token_rules.build_token_rules(GenerationRequest(1, tuple(PROMPT), sampling), TEXTS)
    assert made is not None
    for token in WRITTEN:
        made.take(token)
    return made


def processed(*processors: Any) -> Any:
    scores = logits()[None].clone()
    for processor in processors:
        scores = processor(torch.tensor([PROMPT + WRITTEN]), scores)
    return scores[0]


def penalties(*, frequency: float = 0.0, presence: float = 0.0) -> Any:
    """Compute the penalties of the OpenAI API, which Transformers lacks."""
    counts = torch.bincount(torch.tensor(WRITTEN), minlength=WORDS)
    return logits() - frequency * counts - presence * (counts > 0)


def min_p(least: float) -> Any:
    """Truncate at a temperature of 0.5 like vLLM, then undo the temperature."""
    return transformers.MinPLogitsWarper(least)(None, logits()[None] / 0.5)[0] * 0.5


CASES: list[tuple[dict[str, Any], Callable[[], Any]]] = [
    ({"repetition_penalty": 1.3}, lambda: processed(transformers.RepetitionPenaltyLogitsProcessor(1.3))),
    ({"frequency_penalty": 0.4}, lambda: penalties(frequency=0.4)),
    ({"presence_penalty": -0.7, "frequency_penalty": 0.2}, lambda: penalties(frequency=0.2, presence=-0.7)),
    ({"top_k": 7}, lambda: processed(transformers.TopKLogitsWarper(7))),
    ({"top_k": 7_000}, logits),
    ({"min_p": 0.05}, lambda: min_p(0.05)),
    (
        {"logit_bias": {3: 4.0, 9: -100}},
        lambda: processed(transformers.SequenceBiasLogitsProcessor([[[3], 4.0], [[9], -100.0]])),
    ),
    ({"min_tokens": 81}, lambda: processed(transformers.MinNewTokensLengthLogitsProcessor(20, 81, [1]))),
    ({"min_tokens": 80}, logits),
    (
        {"repetition_penalty": 0.8, "top_k": 5},
        lambda: processed(transformers.RepetitionPenaltyLogitsProcessor(0.8), transformers.TopKLogitsWarper(5)),
    ),
]


def test_rules_give_the_numbers_of_transformers_in_any_batch() -> None:
    some = [rules(**options) for options, _ in CASES]
    together = token_rules.apply_token_rules(some, logits().repeat(len(some), 1))
    for row, one, (options, expected) in zip(together, some, CASES, strict=True):
        torch.testing.assert_close(row, expected(), msg=str(options))
        assert torch.equal(row, token_rules.apply_token_rules([one], logits()[None].clone())[0]), options
    for plain in ((), (("ignore_eos", True), ("stop_token_ids", [3]))):
        request = GenerationRequest(1, tuple(PROMPT), Sampling(engine_options=plain))
        assert token_rules.build_token_rules(request, TEXTS) is None
