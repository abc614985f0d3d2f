"""Draws follow the distribution, keep to `top_p`, depend on the request's seed alone, and fail by themselves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from lazily import lazily

from stoker.contexts.inference.adapter import Sampling

torch, sampling = lazily("torch", "stoker.contexts.inference.kernels")

DRAWS = 4_000
CHANCES = (0.05, 0.4, 0.0, 0.25, 0.3)


def logits_of(*chances: float, rows: int = 1) -> Any:
    return torch.tensor([chances] * rows).log()


def shares(options: Sampling, logits: Any) -> list[float]:
    """How often each token is drawn, in parts of all draws."""
    draw = sampling.TokenDraw(options)
    counts = Counter(sampling.take_tokens([draw], logits)[0] for _ in range(DRAWS))
    return [counts[token] / DRAWS for token in range(logits.shape[-1])]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, CHANCES),
        ({"temperature": 0.5}, [chance**2 / sum(one**2 for one in CHANCES) for chance in CHANCES]),
        ({"temperature": 1.0, "top_p": 0.7}, (0, 4 / 7, 0, 0, 3 / 7)),  # the two likeliest make up 0.7
        ({"temperature": 1.0, "top_p": 0.71}, (0, 8 / 19, 0, 5 / 19, 6 / 19)),
        ({"temperature": 1.0, "top_p": 1e-9}, (0, 1, 0, 0, 0)),
        ({"temperature": 1e-310}, (0, 1, 0, 0, 0)),
    ],
)
def test_tokens_are_drawn_as_often_as_their_chances_say(options: dict[str, float], expected: Any) -> None:
    found = shares(Sampling(seed=(3, 1), **options), logits_of(*CHANCES).double())
    assert found == pytest.approx(expected, abs=0.03)  # the deviation of a share is at most 0.008
    assert all(share == 0 for share, chance in zip(found, expected, strict=True) if not chance)


def test_a_token_is_the_first_whose_sum_exceeds_the_number() -> None:
    numbers = torch.tensor([0.0, 0.0499, 0.0501, 0.44, 0.46, 0.9999999])
    draws = torch.stack([torch.ones(6), torch.ones(6), numbers]).double()
    logits = logits_of(*CHANCES, rows=6)
    assert sampling.drawn_tokens(logits, draws, nucleus=False).tolist() == [0, 0, 1, 1, 3, 4]
    assert sampling.drawn_tokens(logits, draws, nucleus=True).tolist() == [1, 1, 1, 4, 4, 0]


def test_a_request_draws_the_same_tokens_in_every_batch() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    options = [
        Sampling(temperature=1.0, seed=(5, 0)), Sampling(), Sampling(temperature=0.7, top_p=0.6, seed=(5, 1)),
        Sampling(temperature=1.3, top_p=0.9, seed=(5, 2)), Sampling(temperature=2.0, seed=(5, 3)), Sampling(),
    ]  # fmt: skip
    together = [sampling.TokenDraw(one) for one in options]
    found = [sampling.take_tokens(together, logits.roll(step, 1)) for step in range(5)]
    for at, one in enumerate(options):
        alone = sampling.TokenDraw(one)
        assert [row[at] for row in found] == [
            sampling.take_tokens([alone], logits[at : at + 1].roll(step, 1))[0] for step in range(5)
        ]
    other = sampling.TokenDraw(Sampling(temperature=1.0, seed=(6, 0)))
    mine = sampling.TokenDraw(options[0])
    assert [other.number() for _ in range(4)] != [mine.number() for _ in range(4)]


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_cost_their_request_alone(wrong: float, top_p: float) -> None:
    logits = logits_of(*CHANCES, rows=3)
    logits[1, 2] = wrong
    draws = [sampling.TokenDraw(Sampling(temperature=1.0, top_p=top_p, seed=(4, place))) for place in range(3)]
    first, failed, last = sampling.take_tokens(draws, logits)
    assert isinstance(failed, ValueError)
    assert "not finite" in str(failed)
    assert {first, last} <= {0, 1, 3, 4}
