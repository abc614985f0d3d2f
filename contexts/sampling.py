"""Draw the next token of a prompt.

A token is drawn by the inverse of its distribution function: chances are added up in the order of the vocabulary (with
`top_p` from the likeliest on), and the first token whose sum exceeds the request's next random number is taken. The
request's own generator on the host gives one number per token, so draws do not depend on the batch. The rule uses
tensor operations only, so a CPU, a GPU and a captured step share it. (Not `torch.where` with a number, which copies the
number to the device and waits.)
"""

from __future__ import annotations

import random

import torch

from stoker.contexts.inference.adapter import Finish, NewToken, Sampling, TokenChance

NOT_FINITE = "the model's numbers for the next token are not finite"


class TokenDraw:
    """How the tokens of one prompt are drawn, with its own random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.temperature = sampling.temperature
        self.top_p = sampling.top_p
        self._chance = random.Random(draw_seed(sampling.seed)) if sampling.temperature else None

    @property
    def greedy(self) -> bool:
        """True if it takes the likeliest token each time."""
        return self._chance is None

    def number(self) -> float:
        """The random number for its next token, in [0, 1); 0 if it is greedy."""
        return 0.0 if self._chance is None else self._chance.random()


def draw_seed(seed: tuple[int, int]) -> int:
    """One number of 63 bits for a request's seed and its place."""
    return (seed[0] * 1_000_003 + seed[1]) % 2**63


def drawn_tokens(logits: torch.Tensor, draws: torch.Tensor, *, nucleus: bool) -> torch.Tensor:
    """A token for each row of logits `[rows, vocabulary]`; -1 where the logits are not finite numbers.

    `draws`: `float64` `[3, rows]`, the temperature (above 0), `top_p` and random number of each row. With `nucleus`
    rows are drawn from the likeliest tokens that make up `top_p`; without, from all tokens.
    """
    temperatures, top_p, numbers = (row[:, None] for row in draws)
    wide = logits.double()
    chances = torch.softmax((wide - wide.amax(dim=-1, keepdim=True)) / temperatures, dim=-1)
    order = None
    if nucleus:
        chances, order = chances.sort(dim=-1, descending=True, stable=True)
        chances = chances.masked_fill(chances.cumsum(dim=-1) - chances >= top_p, 0.0)  # the likeliest is always kept
    sums = chances.cumsum(dim=-1)
    total = sums[:, -1:]
    place = torch.searchsorted(sums, numbers * total, right=True).clamp(max=logits.shape[-1] - 1)
    tokens = place if order is None else order.gather(-1, place)
    return tokens.masked_fill(~total.isfinite(), -1)[:, 0]


def take_tokens(draws: list[TokenDraw], logits: torch.Tensor) -> list[int | Exception]:
    """The next token of each row of logits `[rows, vocabulary]`, or why a row has none: logits that are no numbers cost
    the request that has them, and no other."""
    found: list[int | Exception] = [*likeliest_tokens(logits)]
    for nucleus in (False, True):
        rows = [at for at, draw in enumerate(draws) if not draw.greedy and (draw.top_p < 1) == nucleus]
        if not rows:
            continue
        options = [(draws[at].temperature, draws[at].top_p, draws[at].number()) for at in rows]
        table = torch.tensor(options, dtype=torch.float64, device=logits.device).T
        tokens = drawn_tokens(logits[rows], table, nucleus=nucleus).tolist()
        for at, token in zip(rows, tokens, strict=True):
            found[at] = token if token >= 0 else ValueError(NOT_FINITE)
    return found


def likeliest_tokens(logits: torch.Tensor) -> list[int]:
    """The likeliest token of each row of logits `[rows, vocabulary]`; the first of those that are equal.

    On a CPU the largest value of each part of a row is found first, and the token in that part alone: PyTorch's
    `argmax` reads half precision an element at a time, and a copy in float32 costs as much again.
    """
    rows, size = logits.shape
    parts = next((parts for parts in (64, 48, 40, 32, 16) if size % parts == 0), 1)
    if logits.device.type != "cpu" or parts == 1:
        return list(logits.float().argmax(dim=-1).tolist())
    split = logits.view(rows, parts, size // parts)
    part = split.amax(dim=-1).float().argmax(dim=-1)
    inside = split[torch.arange(rows), part].float().argmax(dim=-1)
    return list((part * (size // parts) + inside).tolist())


def failed_token(request: int, error: Exception) -> NewToken:
    """The end of a request that no token could be drawn for."""
    return NewToken(request, -1, finish=Finish.STOP, error=f"no token could be drawn: {error}")


def chances_of(token: int, logits: torch.Tensor, *, most: int) -> tuple[float, tuple[TokenChance, ...]]:
    """The log-likelihood of a token, and the `most` likeliest tokens with theirs, from logits `[vocabulary]`."""
    steps = torch.log_softmax(logits.float(), dim=-1)
    found, tokens = steps.topk(min(most, len(steps)))
    likeliest = tuple(TokenChance(int(id), float(chance)) for id, chance in zip(tokens, found, strict=True))
    return float(steps[token]), likeliest
