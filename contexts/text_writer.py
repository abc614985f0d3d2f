"""Write texts with a language model. Each prompt becomes an engine request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice

import msgspec

from stoker.contexts import ambient
from stoker.contexts.forward import Ids
from stoker.contexts.inference.adapter import NewToken, Sampling, ScoredPromptToken
from stoker.contexts.inference.engine_thread import EngineThread, Generation
from stoker.contexts.prompts import PromptReader

Prompt = str | Sequence[int]

Likelihoods = tuple[tuple[str, float | None, tuple[tuple[str, float], ...]], ...]
"""For each token: its text, its log-likelihood (None for the first token of a prompt), and the likeliest tokens with
their log-likelihoods. The text of an incomplete character is a `prompts.TokenText`.
"""


class Completion(msgspec.Struct, frozen=True):
    """The text that continues a prompt. `finish_reason`: `stop`, or `length` if the maximum length ended the text."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: Likelihoods = ()
    prompt_logprobs: Likelihoods = ()


class CompletionToken(msgspec.Struct, frozen=True):
    """A new token of a streamed completion. Only the first token has `prompt_logprobs`."""

    text: str
    finish_reason: str = ""
    logprobs: Likelihoods = ()
    prompt_logprobs: Likelihoods = ()


class CompletionStream(Iterator[CompletionToken]):
    """The tokens of a completion while they are written. `close` ends the request."""

    def __init__(self, tokens: Generator[CompletionToken, None, None], texts: CompletionTexts) -> None:
        self._tokens = tokens
        self._texts = texts

    def __next__(self) -> CompletionToken:
        return next(self._tokens)

    def close(self) -> None:
        self._tokens.close()

    def texts(self) -> CompletionTexts:
        """Return the texts as one object, which a function can yield."""
        return self._texts


class CompletionTexts(ambient.RelayedTexts):
    """The texts of a completion. After the last text, `finish_reason` and `tokens` describe the completion."""

    def __init__(self, submit: Callable[[ambient.TextSink | None], Generation]) -> None:
        self._submit = submit
        self.finish_reason = ""
        self.tokens = 0

    def __iter__(self) -> Iterator[str]:
        return self._read(None)

    def send_to(self, sink: ambient.TextSink) -> Generator[str, None, None]:
        return self._read(sink)

    def _read(self, sink: ambient.TextSink | None) -> Generator[str, None, None]:
        generation = self._submit(sink)
        try:
            for token in generation.tokens():
                if token.text:
                    yield token.text
                if token.finish is not None:
                    self.finish_reason, self.tokens = token.finish.value, generation.made
        finally:
            generation.abort()


class TextWriter:
    def __init__(self, thread: EngineThread, prompts: PromptReader) -> None:
        self._thread = thread
        self._prompts = prompts

    def generate(
        self, prompts: Sequence[str], sampling: Sampling, *, seed: int | Sequence[int], batch_size: int, prefix: str
    ) -> list[str]:
        """Generate a text per prompt, as `CausalLM.generate` describes."""
        rows = self._prompts.encode_prompts(prompts, prefix=prefix, batch_size=batch_size)
        self._prompts.texts.prepare_sampling(sampling)
        for place, row in enumerate(rows):
            self._prompts.texts.check_length(len(row) + sampling.max_new_tokens, f"prompt {place}")
        seeds = [(seed, place) for place in range(len(rows))] if isinstance(seed, int) else [(one, 0) for one in seed]
        if len(seeds) != len(rows):
            raise ValueError(f"generate was given {len(seeds)} seeds for {len(rows)} prompts")
        samplings = [msgspec.structs.replace(sampling, seed=one) for one in seeds]
        order, texts = _submission_order(rows, all_sorted=batch_size > 1), [""] * len(rows)
        if rows:
            size, ahead = batch_size or len(rows), batch_size or 2 * self._thread.engine.count_slots()
            for start in range(0, len(rows), size):
                self._write_group(order[start : start + size], rows, samplings, texts, ahead=ahead)
        return texts

    def stream_text(self, prompt: str, sampling: Sampling) -> Iterator[str]:
        row = self._encode_prompt(prompt, sampling)
        return (token.text for token in self._new_tokens(row, sampling, pieces=True) if token.text)

    def stream_tokens(self, prompt: Prompt, sampling: Sampling) -> CompletionStream:
        row = self._encode_prompt(prompt, sampling)
        tokens = (
            CompletionToken(
                token.text, token.finish.value if token.finish else "", self._likelihoods([token]),
                self._likelihoods(token.prompt),
            )
            for token in self._new_tokens(row, sampling, pieces=True)
        )  # fmt: skip
        return CompletionStream(
            tokens, CompletionTexts(lambda sink: self._submit(row, sampling, pieces=True, sink=sink))
        )

    def complete(self, prompt: Prompt, sampling: Sampling) -> Completion:
        row = self._encode_prompt(prompt, sampling)
        tokens = list(self._new_tokens(row, sampling, pieces=False))
        finish = tokens[-1].finish
        assert finish is not None
        text, made = "".join(token.text for token in tokens), min(len(tokens), sampling.max_new_tokens)
        likelihoods = self._likelihoods(tokens), self._likelihoods(tokens[0].prompt)
        return Completion(text, finish.value, len(row), made, *likelihoods)

    def _write_group(
        self, order: Sequence[int], rows: Sequence[Ids], samplings: Sequence[Sampling], texts: list[str], *, ahead: int
    ) -> None:
        left = iter(order)
        open_ones: deque[tuple[int, Generation]] = deque()
        try:
            while True:
                for index in islice(left, ahead - len(open_ones)):
                    open_ones.append((index, self._submit(rows[index], samplings[index])))
                if not open_ones:
                    return
                index, generation = open_ones[0]
                texts[index] = "".join(token.text for token in generation.tokens())
                open_ones.popleft()
        finally:
            for _, generation in open_ones:
                generation.abort()

    def _new_tokens(self, row: Ids, sampling: Sampling, *, pieces: bool) -> Iterator[NewToken]:
        generation = self._submit(row, sampling, pieces=pieces)
        try:
            yield from generation.tokens()
        finally:
            generation.abort()

    def _submit(
        self, row: Ids, sampling: Sampling, *, pieces: bool = False, sink: ambient.TextSink | None = None
    ) -> Generation:
        due_at, tpot_s = ambient.token_due_times(len(row))
        return self._thread.submit(row, sampling, pieces=pieces, due_at=due_at, tpot_s=tpot_s, sink=sink)

    def _encode_prompt(self, prompt: Prompt, sampling: Sampling) -> Ids:
        row = self._prompts.encode_prompt(prompt)
        self._prompts.texts.check_prompt(row, sampling)
        return row

    def _likelihoods(self, tokens: Sequence[NewToken | ScoredPromptToken]) -> Likelihoods:
        text = self._prompts.token_text
        return tuple(
            (text(token.token), token.logprob, tuple((text(each.token), each.logprob) for each in token.likeliest))
            for token in tokens
            if token.logprob is not None or isinstance(token, ScoredPromptToken)
        )


def _submission_order(rows: Sequence[Ids], *, all_sorted: bool) -> list[int]:
    """Return prompt indices in the order of submission: the longest first, so that a too long prompt fails at once."""
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
    return order if all_sorted or not order else [order[0], *sorted(order[1:])]
