"""Which token comes next for one prompt, and when its text has ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


class TokenDraw:
    """The tokens of one prompt. Its random numbers are its own, so that no other prompt changes them."""

    def __init__(self, *, temperature: float, top_p: float, seed: tuple[int, int], stop: Sequence[str]) -> None:
        if not 0 <= temperature < math.inf or not 0 < top_p <= 1:
            raise ValueError(f"temperature must be 0 or more and top_p in (0, 1]; they are {temperature} and {top_p}")
        self.text = ""
        self._temperature = temperature
        self._top_p = top_p
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._generator = None
        if temperature:
            self._generator = torch.Generator().manual_seed((seed[0] * 1_000_003 + seed[1]) % 2**63)

    def take(self, logits: torch.Tensor) -> int:
        """The next token, from logits `[vocabulary]`."""
        if self._generator is None:
            return int(logits.argmax())
        chances = torch.softmax(logits.double().cpu() / self._temperature, dim=-1)
        if self._top_p < 1:
            ordered, order = chances.sort(descending=True)
            ordered[ordered.cumsum(0) - ordered >= self._top_p] = 0  # the likeliest is always kept
            chances = torch.zeros_like(chances).scatter(0, order, ordered)
        return int(torch.multinomial(chances, 1, generator=self._generator))

    def ended(self, token: int, *, ends: frozenset[int], decode: Callable[[list[int]], str], most: int) -> bool:
        """Add a token; whether the text is complete with it."""
        if token in ends:
            self.text = decode(self._tokens)
            return True
        self._tokens.append(token)
        if self._stop:
            text = decode(self._tokens)
            cuts = [at for at in (text.find(one) for one in self._stop) if at >= 0]
            if cuts:
                self.text = text[: min(cuts)]
                return True
        if len(self._tokens) >= most:
            self.text = decode(self._tokens)
            return True
        return False
