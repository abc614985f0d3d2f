from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from lazily import lazily

from stoker.contexts.inference.adapter import GenerationRequest, ModelTexts, Sampling

torch, transformers, kernels, static, token_rules = lazily(
    "torch", "transformers", "stoker.contexts.inference.kernels", "stoker.contexts.inference.static",
    "stoker.contexts.inference.token_rules",
)  # fmt: skip


@pytest.mark.parametrize(("heads", "key_heads"), [(9, 3), (4, 4), (5, 1)])
@pytest.mark.parametrize(("precision", "apart"), [("float32", 1e-5), ("bfloat16", 0.03)])
def test_all_attention_kernels_give_equal_results(heads: int, key_heads: int, precision: str, apart: float) -> None:
    chance = torch.Generator().manual_seed(3)
    dtype, rows, length, size = getattr(torch, precision), 6, 48, 16
    q, held, values = (
        torch.randn(shape, generator=chance).to(dtype)
        for shape in ((rows, heads, size), (rows + 2, key_heads, 64, size), (rows + 2, key_heads, 64, size))
    )
    # a slice of a larger array: its rows are not dense in memory
    held, values = held[:rows, :, :length], values[:rows, :, :length]
    seen = torch.arange(length)[None] <= torch.tensor([0, 3, 11, 20, 40, 47])[:, None]
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, float("-inf"))[:, None, None]
    one = kernels.attend_with_shared_keys(q, held, values, mask)
    for way in (kernels.attend_by_matrix_products, kernels.attend_with_grouped_queries):
        other = way(q, held, values, mask)
        assert one.shape == other.shape == (rows, heads * size)
        assert (one.float() - other.float()).abs().max() < apart
    assert (one.float() - one.float().roll(1, 0)).abs().max() > 10 * apart  # the comparison detects different rows


def test_kernel_choice_depends_only_on_processor_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for tiles, half, expected in (
        (True, True, kernels.attend_with_shared_keys),
        (False, True, kernels.attend_by_matrix_products),
        (False, False, kernels.attend_with_grouped_queries),
    ):
        monkeypatch.setattr("stoker.contexts.inference.kernels.uses_matrix_tiles", lambda tiles=tiles: tiles)
        monkeypatch.setattr("stoker.contexts.inference.kernels.has_fast_bfloat16", lambda half=half: half)
        assert kernels.choose_decode_attention(torch.float32, cpu) is kernels.attend_by_matrix_products
        assert kernels.choose_decode_attention(torch.bfloat16, cpu) is expected
        assert kernels.choose_decode_attention(torch.bfloat16, gpu) is kernels.ON_GPU
        wide = () if half else (torch.float32,)  # without half precision, weights are also copied to float32
        assert kernels.packed_dtypes(torch.bfloat16) == (*wide, torch.bfloat16)
        assert kernels.packed_dtypes(torch.float32) == (torch.float32,)
        assert kernels.packed_dtypes(torch.float16) == ()


@pytest.mark.parametrize("vocabulary", [257, 49152])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_likeliest_token_equals_argmax(vocabulary: int, precision: str) -> None:
    logits = torch.randn(9, vocabulary, generator=torch.Generator().manual_seed(5)).to(getattr(torch, precision))
    logits[2] = 0  # all logits are equal: the first token is chosen
    logits[3, [7, vocabulary - 1]] = 50  # equal maxima in two parts: the first token is chosen
    logits[4] = float("-inf")
    logits[5, 11] = float("nan")
    assert kernels.find_likeliest_tokens(logits) == logits.float().argmax(dim=-1).tolist()


def layers_of(dtype: Any, *, bias: bool) -> list[Any]:
    torch.manual_seed(5)
    made = [torch.nn.Linear(48, width, bias=bias and width != 16) for width in (32, 16, 16)]
    return [layer.to(dtype).requires_grad_(False) for layer in made]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 70])
def test_float32_weight_copy_gives_correctly_rounded_products(rows: int, bias: bool) -> None:
    layers = layers_of(torch.bfloat16, bias=bias)
    wide = kernels.PackedLinear(layers, copy_dtype=torch.float32)
    if not wide.packed_bytes:
        pytest.skip("PyTorch was built without oneDNN")
    x = torch.randn(rows, 48, generator=torch.Generator().manual_seed(3)).bfloat16()
    exact = torch.cat(
        [x.double() @ one.weight.double().T + (0 if one.bias is None else one.bias.double()) for one in layers], dim=-1
    )
    with torch.inference_mode():
        found = wide(x)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= exact.abs().max() * 2**-8  # half a unit in the last place
    assert wide.packed_bytes == 64 * 48 * 4


@pytest.mark.parametrize(
    ("declared", "free", "expected"),
    [
        (0, 1 << 40, "float32"),
        (0, 3_000, "bfloat16"),  # host memory holds twice the weights, but not twice their float32 copy
        (0, 1_000, ""),
        (564_003_000, 1 << 40, "float32"),
        (564_002_900, 1 << 40, "bfloat16"),
    ],
)
def test_float32_weight_copy_is_made_if_memory_is_sufficient(declared, free, expected, monkeypatch):
    model = torch.nn.Linear(25, 20, bias=False).bfloat16()  # 1,000 bytes; a wide copy has 2,000
    model.dtype = torch.bfloat16
    monkeypatch.setattr("stoker.contexts.inference.kernels.has_fast_bfloat16", lambda: False)
    monkeypatch.setattr("stoker.contexts.ambient.device_memory_bytes", lambda: declared)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Free", (), {"available": free})())
    found = static._weight_copy_dtype(model)
    assert found == (getattr(torch, expected) if expected else None)


DRAWS = 4_000
CHANCES = (0.05, 0.4, 0.0, 0.25, 0.3)


def logits_of(*chances: float, rows: int = 1) -> Any:
    return torch.tensor([chances] * rows).log()


def shares(options: Sampling, logits: Any) -> list[float]:
    """Sample `DRAWS` tokens; return the share of each token."""
    draw = kernels.TokenSampler(options)
    counts = Counter(kernels.sample_or_argmax_tokens([draw] * DRAWS, logits.expand(DRAWS, -1)))
    return [counts[token] / DRAWS for token in range(logits.shape[-1])]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, CHANCES),
        ({"temperature": 0.5}, [chance**2 / sum(one**2 for one in CHANCES) for chance in CHANCES]),
        ({"temperature": 1.0, "top_p": 0.7}, (0, 4 / 7, 0, 0, 3 / 7)),  # the two most likely tokens make up 0.7
        ({"temperature": 1.0, "top_p": 0.71}, (0, 8 / 19, 0, 5 / 19, 6 / 19)),
        ({"temperature": 1e-310}, (0, 1, 0, 0, 0)),
    ],
)
def test_tokens_are_sampled_with_their_probabilities(options: dict[str, float], expected: Any) -> None:
    found = shares(Sampling(seed=(3, 1), **options), logits_of(*CHANCES).double())
    assert found == pytest.approx(expected, abs=0.03)  # the standard deviation of a share is at most 0.008
    assert all(share == 0 for share, chance in zip(found, expected, strict=True) if not chance)


def test_request_samples_the_same_tokens_in_every_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    options = [
        Sampling(temperature=1.0, seed=(5, 0)), Sampling(), Sampling(temperature=0.7, top_p=0.6, seed=(5, 1)),
        Sampling(temperature=1.3, top_p=0.9, seed=(5, 2)), Sampling(temperature=2.0, seed=(5, 3)), Sampling(),
    ]  # fmt: skip
    together = [kernels.TokenSampler(one) for one in options]
    found = [kernels.sample_or_argmax_tokens(together, logits.roll(step, 1)) for step in range(5)]
    for at, one in enumerate(options):
        alone = kernels.TokenSampler(one)
        assert [row[at] for row in found] == [
            kernels.sample_or_argmax_tokens([alone], logits[at : at + 1].roll(step, 1))[0] for step in range(5)
        ]
    other = kernels.TokenSampler(Sampling(temperature=1.0, seed=(6, 0)))
    mine = kernels.TokenSampler(options[0])
    assert [other.next_random_number() for _ in range(4)] != [mine.next_random_number() for _ in range(4)]


@pytest.mark.parametrize(("wrong", "top_p"), [(float("nan"), 1.0), (float("inf"), 0.5)])
def test_invalid_logits_fail_only_their_request(wrong: float, top_p: float) -> None:
    logits = logits_of(*CHANCES, rows=3)
    logits[1, 2] = wrong
    draws = [kernels.TokenSampler(Sampling(temperature=1.0, top_p=top_p, seed=(4, place))) for place in range(3)]
    first, failed, last = kernels.sample_or_argmax_tokens(draws, logits)
    assert isinstance(failed, ValueError)
    assert "not finite" in str(failed)
    assert {first, last} <= {0, 1, 3, 4}


# ---- rules for the next token

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
        made.record_token(token)
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


def test_token_rules_match_transformers_in_any_batch() -> None:
    some = [rules(**options) for options, _ in CASES]
    together = token_rules.apply_token_rules(some, logits().repeat(len(some), 1))
    for row, one, (options, expected) in zip(together, some, CASES, strict=True):
        torch.testing.assert_close(row, expected(), msg=str(options))
        assert torch.equal(row, token_rules.apply_token_rules([one], logits()[None].clone())[0]), options
    for plain in ((), (("ignore_eos", True), ("stop_token_ids", [3]))):
        request = GenerationRequest(1, tuple(PROMPT), Sampling(engine_options=plain))
        assert token_rules.build_token_rules(request, TEXTS) is None
