"""A causal language model as a context: `generate` and `label_scores`.

Scoring labels ("true", "false") is what verification wants, and is much cheaper than generating: one pass over the
prompt gives the log-likelihood of every label of one token; labels of more tokens add just their own to that pass, all
labels together (`forward.py`). What prompts have in common at their beginning is computed once (`prefixes.py`), within
a call and from call to call, so the cost of a prompt is the cost of what is its own.

Results do not depend on the batch size, beyond rounding (`forward.py` says why); random draws are seeded a prompt, by
its place in the call.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch

from stoker.contexts.forward import Ids, ModelRunner, PrefilledBatch, shared_beginning
from stoker.contexts.sampling import TokenDraw

F = TypeVar("F", bound=Callable[..., Any])

PREFIX_LIMIT_BYTES = 512_000_000
"""What kept prefixes may take of the device's memory."""


def _alone(function: F) -> F:
    """One call at a time, without gradients: kept prefixes are the model's, and slots are threads."""

    @functools.wraps(function)
    def guarded(self: CausalLM, *args: Any, **kwargs: Any) -> Any:
        with self._turn, torch.inference_mode():
            return function(self, *args, **kwargs)

    return cast(F, guarded)


class CausalLM:
    """A language model and its tokenizer on their device. Calls of several slots take turns."""

    def __init__(self, model: Any, tokenizer: Any, *, name: str = "", origin: str = "") -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.origin = origin
        """How it was loaded, for people: from a snapshot or not, and in what time."""
        self._runner = ModelRunner(model, limit_bytes=PREFIX_LIMIT_BYTES)
        self._turn = threading.RLock()
        self._longest = int(getattr(model.config, "max_position_embeddings", 0) or 0)

    @property
    def device(self) -> str:
        """Where it is: `cpu`, `cuda:0`."""
        return str(self._runner.device)

    @property
    def reused_tokens(self) -> int:
        """Tokens that kept prefixes have saved so far."""
        return self._runner.prefixes.reused_tokens

    def chat(self, message: str, *, system: str = "") -> str:
        """The prompt that asks this message in the model's own chat format (the message itself, if it has none)."""
        if not getattr(self.tokenizer, "chat_template", None):
            return f"{system}\n\n{message}" if system else message
        turns = [{"role": "user", "content": message}]
        if system:
            turns.insert(0, {"role": "system", "content": system})
        return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def count_tokens(self, text: str) -> int:
        """The length of a prompt in tokens."""
        return len(self._encode([text])[0])

    @contextlib.contextmanager
    def alone(self) -> Iterator[ModelRunner]:
        """The model for the caller alone, without gradients, for readings that are not among these methods."""
        with self._turn, torch.inference_mode():
            yield self._runner

    def forget_prefixes(self) -> None:
        """Free what is kept of earlier prompts."""
        self._runner.prefixes.clear()

    @_alone
    def label_scores(
        self, prompts: Sequence[str], labels: Sequence[str], *, batch_size: int = 1, prefix: str = ""
    ) -> list[list[float]]:
        """The log-likelihood (natural logarithm) of each label after each prompt: `[prompts][labels]`, all <= 0.

        A label is read as the prompt's continuation, so most begin with a space. `prefix` is put before every prompt
        and computed once; without it, what the prompts have in common is found. `batch_size` prompts are computed at a
        time. Raises ValueError for an empty prompt or label, and for more tokens than the model reads.
        """
        rows = self._rows(prompts, prefix=prefix, batch_size=batch_size)
        if not labels or not all(labels):
            raise ValueError(f"label_scores wants labels, none of them empty; it got {list(labels)!r}")
        if not rows:
            return []
        tails = self._label_tokens([prefix + prompt for prompt in prompts], rows, labels)
        longest = [max(map(len, tail)) for tail in tails]
        self._check_lengths([len(row) + more for row, more in zip(rows, longest, strict=True)])
        scores: list[list[float]] = [[]] * len(rows)
        for group in self._groups(rows, prefix=prefix, batch_size=batch_size):
            some = [rows[index] for index in group]
            of_labels = [tails[index] for index in group]
            found = self._score(some, of_labels) if self._runner.shares else self._score_whole(some, of_labels)
            for index, row in zip(group, found, strict=True):
                scores[index] = row
        return scores

    @_alone
    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 64,
        batch_size: int = 1,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
        prefix: str = "",
    ) -> list[str]:
        """The continuation of each prompt, special tokens left out.

        Temperature 0 takes the likeliest token each time; else one is drawn from the likeliest that make up `top_p`,
        seeded by `seed` and the prompt's place in the call (or by its own, if `seed` lists one a prompt). A text ends
        at the model's end token, at one of the `stop` texts (which is left out), or at `max_new_tokens`. Raises
        ValueError as `label_scores` does.
        """
        rows = self._rows(prompts, prefix=prefix, batch_size=batch_size)
        if max_new_tokens < 1:
            raise ValueError(f"generate wants max_new_tokens of 1 or more, not {max_new_tokens}")
        self._check_lengths([len(row) + max_new_tokens for row in rows])
        seeds = [(seed, place) for place in range(len(rows))] if isinstance(seed, int) else [(one, 0) for one in seed]
        if len(seeds) != len(rows):
            raise ValueError(f"generate was given {len(seeds)} seeds for {len(rows)} prompts")
        texts = [""] * len(rows)
        for group in self._groups(rows, prefix=prefix, batch_size=batch_size):
            draws = [
                TokenDraw(temperature=temperature, top_p=top_p, seed=seeds[index], stop=tuple(stop)) for index in group
            ]
            self._generate([rows[index] for index in group], draws, max_new_tokens)
            for index, draw in zip(group, draws, strict=True):
                texts[index] = draw.text
        return texts

    # ---- scoring

    def _score(self, rows: list[Ids], tails: list[list[Ids]]) -> list[list[float]]:
        # The last token of a label is never read: what matters of it is how likely it was.
        logits, after = self._runner.prefill_with_tails(rows, [[tail[:-1] for tail in some] for some in tails])
        first = torch.log_softmax(logits, dim=-1)
        scores: list[list[float]] = []
        for row, some in enumerate(tails):
            scores.append([float(first[row, tail[0]]) for tail in some])
            for label, tail in enumerate(some):
                if len(tail) > 1:
                    steps = torch.log_softmax(after[row][label], dim=-1)
                    scores[row][label] += sum(float(steps[at, token]) for at, token in enumerate(tail[1:]))
        return scores

    def _score_whole(self, rows: list[Ids], tails: list[list[Ids]]) -> list[list[float]]:
        """For models without a cache that can be shared: every label with its whole prompt."""
        scores: list[list[float]] = []
        for row, some in zip(rows, tails, strict=True):
            logits = self._runner.whole([row + tail[:-1] for tail in some])
            steps = torch.log_softmax(logits[:, len(row) - 1 :], dim=-1)
            scores.append([
                sum(float(steps[label, at, token]) for at, token in enumerate(tail)) for label, tail in enumerate(some)
            ])  # fmt: skip
        return scores

    def _label_tokens(self, prompts: list[str], rows: list[Ids], labels: Sequence[str]) -> list[list[Ids]]:
        """Each label's tokens after each prompt: as the two are written together, where the prompt's tokens stay."""
        alone = [ids if ids else (0,) for ids in self._encode(labels, special=False)]
        together = self._encode([prompt + label for prompt in prompts for label in labels])
        found: list[list[Ids]] = []
        for number, row in enumerate(rows):
            tails = []
            for index in range(len(labels)):
                whole = together[number * len(labels) + index]
                tail = whole[len(row) :]
                tails.append(tail if tail and whole[: len(row)] == row else alone[index])
            found.append(tails)
        return found

    # ---- generating

    def _generate(self, rows: list[Ids], draws: list[TokenDraw], most: int) -> None:
        ends = self._end_tokens()
        if not self._runner.shares:
            self._generate_whole(rows, draws, most, ends)
            return
        batch = self._runner.prefill(rows)
        live, logits = list(range(len(rows))), batch.logits
        steps = _Steps(self._runner, batch)
        for _ in range(most):
            tokens = [draws[row].take(logits[at]) for at, row in enumerate(live)]
            going = [
                at
                for at, row in enumerate(live)
                if not draws[row].ended(tokens[at], ends=ends, decode=self._decode, most=most)
            ]
            if not going:
                break
            if len(going) < len(live):
                steps.keep(going)
                live = [live[at] for at in going]
            logits = steps.next([tokens[at] for at in going])

    def _generate_whole(self, rows: list[Ids], draws: list[TokenDraw], most: int, ends: frozenset[int]) -> None:
        """Without a shareable cache each step reads the whole row again: slow and right."""
        for row, draw in zip(rows, draws, strict=True):
            ids = row
            while True:
                token = draw.take(self._runner.whole([ids])[0, -1])
                if draw.ended(token, ends=ends, decode=self._decode, most=most):
                    break
                ids = (*ids, token)

    def _end_tokens(self) -> frozenset[int]:
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if configured is None:
            configured = self.tokenizer.eos_token_id
        return frozenset([configured] if isinstance(configured, int) else configured or ())

    # ---- tokens

    def _rows(self, prompts: Sequence[str], *, prefix: str, batch_size: int) -> list[Ids]:
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of texts, and is one text; write [prompt]")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, not {batch_size}")
        rows = self._encode([prefix + prompt for prompt in prompts])
        for index, row in enumerate(rows):
            if not row:
                raise ValueError(f"prompt {index} is empty; a model needs a token to go on from")
        return rows

    def _encode(self, texts: Sequence[str], *, special: bool = True) -> list[Ids]:
        """Token ids of texts; the tokenizer's first token is added unless the text begins with it (chat formats)."""
        if not texts:
            return []
        first = self.tokenizer.bos_token
        adds = special and not (first and all(text.startswith(first) for text in texts))
        return [tuple(ids) for ids in self.tokenizer(list(texts), add_special_tokens=adds)["input_ids"]]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _check_lengths(self, lengths: list[int]) -> None:
        for index, length in enumerate(lengths):
            if self._longest and length > self._longest:
                raise ValueError(
                    f"prompt {index} comes to {length} tokens with what follows it; the model reads {self._longest}."
                    " Shorten it, or split it"
                )

    def _groups(self, rows: list[Ids], *, prefix: str, batch_size: int) -> list[list[int]]:
        """Prompts to compute together, by index: of like length, to pad little. What all have is computed first."""
        if not rows:
            return []
        if prefix:
            self._runner.share(shared_beginning([*rows, *self._encode([prefix])]))
        if len(rows) > 1:
            self._runner.share(shared_beginning(rows))
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index])) if batch_size > 1 else range(len(rows))
        return [list(order[start : start + batch_size]) for start in range(0, len(rows), batch_size)]


class _Steps:
    """A batch that grows by one token a row at a time."""

    def __init__(self, runner: ModelRunner, batch: PrefilledBatch) -> None:
        self._runner = runner
        self._cache = batch.cache
        device = runner.device
        self._positions = torch.tensor(batch.lengths, device=device)
        self._seen = torch.arange(batch.width, device=device)[None, :] < self._positions[:, None]

    def keep(self, rows: list[int]) -> None:
        """Go on with these rows only."""
        index = torch.tensor(rows, device=self._runner.device)
        self._cache.batch_select_indices(index)
        self._positions, self._seen = self._positions[index], self._seen[index]

    def next(self, tokens: list[int]) -> torch.Tensor:
        """Logits `[rows, vocabulary]` after one more token a row."""
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(tokens), 1)], dim=1)
        output = self._runner.model(
            input_ids=torch.tensor(tokens, device=self._runner.device)[:, None],
            attention_mask=self._seen.long(),
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._positions = self._positions + 1
        return output.logits[:, -1].float()
