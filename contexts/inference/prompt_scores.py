"""Log-likelihoods of a prompt's tokens, collected while an engine reads the prompt in parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stoker.contexts.inference.adapter import PromptToken, TokenChance

_LOGITS_AT_ONCE = 8_000_000
_LARGE_VOCABULARY = 262_144


def positions_scored_at_once(vocabulary: int) -> int:
    """Return how many positions of a prompt to score together, so that their logits need about 32 MB."""
    return max(1, _LOGITS_AT_ONCE // (vocabulary or _LARGE_VOCABULARY))


class PromptScores:
    """The log-likelihoods of one prompt's tokens. `most`: likeliest tokens per position. `before`: length of the soft
    prompt. Parts may be scored again.
    """

    def __init__(self, prompt: Sequence[int], *, most: int, before: int = 0) -> None:
        self._most = most
        self._before = before
        self._tokens = [PromptToken(token) for token in prompt]

    @property
    def tokens(self) -> tuple[PromptToken, ...]:
        return tuple(self._tokens)

    def take(self, start: int, logits: torch.Tensor) -> None:
        """Score the tokens that follow the positions from `start`. `logits`: `[positions, vocabulary]`."""
        first = start + 1 - self._before
        skipped = max(0, 1 - first)  # the first token and tokens of a soft prompt have no likelihood
        tokens = [each.token for each in self._tokens[first + skipped : max(0, first + len(logits))]]
        if not tokens:
            return
        rows = logits[skipped : skipped + len(tokens)].float()
        total = rows.logsumexp(dim=-1, keepdim=True)
        own = rows.gather(-1, torch.tensor(tokens, device=rows.device)[:, None]) - total
        chances, likeliest = rows.topk(min(self._most, rows.shape[-1]))
        found = zip(tokens, own[:, 0].tolist(), likeliest.tolist(), (chances - total).tolist(), strict=True)
        for at, (token, logprob, ids, logprobs) in enumerate(found, start=first + skipped):
            self._tokens[at] = PromptToken(token, logprob, tuple(map(TokenChance, ids, logprobs)))
