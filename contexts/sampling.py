"""Which token comes next for one prompt."""

from __future__ import annotations

import torch

from stoker.contexts.inference.adapter import Finish, NewToken, Sampling, TokenChance


class TokenDraw:
    """Draws the tokens of one prompt. Its random numbers are its own, so that no other prompt changes them."""

    def __init__(self, sampling: Sampling) -> None:
        self._temperature = sampling.temperature
        self._top_p = sampling.top_p
        self._generator = None
        if sampling.temperature:
            self._generator = torch.Generator().manual_seed(draw_seed(sampling.seed))

    @property
    def greedy(self) -> bool:
        """True if it takes the likeliest token each time."""
        return self._generator is None

    def take(self, logits: torch.Tensor) -> int:
        """The next token, from logits `[vocabulary]`."""
        if self._generator is None:
            return int(logits.argmax())
        chances = torch.softmax((logits - logits.max()).double().cpu() / self._temperature, dim=-1)
        if self._top_p < 1:
            ordered, order = chances.sort(descending=True)
            ordered[ordered.cumsum(0) - ordered >= self._top_p] = 0  # the likeliest is always kept
            chances = torch.zeros_like(chances).scatter(0, order, ordered)
        return int(torch.multinomial(chances, 1, generator=self._generator))


def draw_seed(seed: tuple[int, int]) -> int:
    """One number of 63 bits for a request's seed and its place."""
    return (seed[0] * 1_000_003 + seed[1]) % 2**63


def take_tokens(draws: list[TokenDraw], logits: torch.Tensor) -> list[int | Exception]:
    """The next token of each row of logits `[rows, vocabulary]`, or why a row has none: logits that are no numbers cost
    the request that has them, and no other."""
    found: list[int | Exception] = [*likeliest_tokens(logits)]
    for at, draw in enumerate(draws):
        if not draw.greedy:
            try:
                found[at] = draw.take(logits[at])
            except RuntimeError as error:
                found[at] = error
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
