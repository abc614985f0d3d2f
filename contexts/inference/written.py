"""What a request has written: its tokens as text, as it comes, and where it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stoker.contexts.inference.adapter import Finish, GenerationRequest, Sampling

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
Decode = Callable[[list[int]], str]


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError for an option that no engine can follow."""
    if not 0 <= sampling.temperature < math.inf or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"temperature must be 0 or more and top_p in (0, 1]; they are {sampling.temperature} and {sampling.top_p}"
        )
    if type(sampling.max_new_tokens) is not int or sampling.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be a whole number, 1 or more, not {sampling.max_new_tokens!r}")
    if type(sampling.logprobs) is not int or sampling.logprobs < 0:
        raise ValueError(f"logprobs must be a whole number, 0 or more, not {sampling.logprobs!r}")
    for stop in sampling.stop:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"a stop text must be a text that is not empty, not {stop!r}")


class ModelTexts:
    """What a model's texts are made of: how tokens become text, which tokens end one, how many it reads at most."""

    def __init__(self, *, decode: Decode, ends: frozenset[int], longest: int) -> None:
        self.decode = decode
        self.ends = ends
        self.longest = longest

    def check(self, request: GenerationRequest, *, options: frozenset[str]) -> None:
        """Raises ValueError for a request that an engine cannot take. `options`: those that the engine honours."""
        sampling = request.sampling
        check_sampling(sampling)
        sampling.check_honoured(options)
        length = len(request.prompt) + sampling.max_new_tokens
        if self.longest and length > self.longest:
            raise ValueError(
                f"the prompt comes to {length} tokens with what follows it; the model reads {self.longest}."
                " Shorten it, or split it"
            )

    def begin(self, request: GenerationRequest) -> Written:
        """The text of a request that has written nothing yet."""
        sampling = request.sampling
        return Written(
            decode=self.decode, ends=sampling.ends(self.ends), most=sampling.max_new_tokens, stop=sampling.stop,
            pieces=request.pieces,
        )  # fmt: skip


class Written:
    """The text of one request. Without `pieces` and stop texts it is decoded once, when the request ends.

    Tokens are no letters: one character may take several. A piece is therefore what the last few tokens add to the text
    of those before them, once its characters are complete.
    """

    def __init__(
        self, *, decode: Decode, ends: frozenset[int], most: int, stop: Sequence[str] = (), pieces: bool = False
    ) -> None:
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        self._decode = decode
        self._ends = ends
        self._most = most
        self._stop = tuple(stop)
        self._follows = pieces or bool(stop)
        self._pieces = pieces
        self._text = ""
        self._given = 0
        self._shown, self._complete = 0, 0

    def add(self, token: int) -> str:
        """Add a token; returns the new piece of text. `finish` says afterwards whether the text is complete with it."""
        if token in self._ends:
            return self._end(Finish.STOP)
        self.tokens.append(token)
        if self._follows:
            self._extend()
            cut = self._stop_at()
            if cut >= 0:
                self._text = self._text[:cut]
                return self._end(Finish.STOP, whole=False)
        if len(self.tokens) >= self._most:
            return self._end(Finish.LENGTH)
        if not self._pieces:
            return ""
        return self._give(len(self._text) - self._held_back())

    def _end(self, finish: Finish, *, whole: bool = True) -> str:
        self.finish = finish
        if whole:
            text = self._decode(self.tokens)
            if not self._follows or text.startswith(self._text):
                self._text = text
            cut = self._stop_at(everywhere=True)
            if cut >= 0:
                self._text = self._text[:cut]
        return self._give(len(self._text))

    def _give(self, end: int) -> str:
        piece = self._text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _extend(self) -> None:
        before = self._decode(self.tokens[self._shown : self._complete])
        after = self._decode(self.tokens[self._shown :])
        if len(after) > len(before) and not after.endswith(_INCOMPLETE):
            self._text += after[len(before) :]
            self._shown, self._complete = self._complete, len(self.tokens)

    def _stop_at(self, *, everywhere: bool = False) -> int:
        """Where the first stop text begins; -1 if none is there. What was given already holds none."""
        start = 0 if everywhere else max(0, self._given)
        return min((at for at in (self._text.find(one, start) for one in self._stop) if at >= 0), default=-1)

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop text."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
