"""A causal language model as a context: `generate`, `stream`, `complete` and `label_scores`.

What is asked for in several slots at once is written in one batch: each prompt becomes a request of the model's engine
(`inference/`), which one thread steps; a slot's thread waits for its own.

Scoring labels ("true", "false") is what verification wants, and is much cheaper than generating: one pass over the
prompt gives the log-likelihood of every label of one token; labels of more tokens add just their own to that pass, all
labels together (`forward.py`). It runs beside the batch, between two of its steps. What prompts have in common at their
beginning is computed once (`prefixes.py`), within a call and from call to call, for texts and for scores.

Results do not depend on the batch, beyond rounding; random draws are seeded a prompt, by its place in the call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import msgspec
import torch

from stoker.contexts.forward import Ids, ModelRunner, shared_beginning
from stoker.contexts.inference.adapter import EngineLoad, EngineMemory, Sampling, TokenChance
from stoker.contexts.inference.choosing import PREFIX_LIMIT_BYTES, own_engine
from stoker.contexts.inference.engine_thread import EngineThread, Generation
from stoker.contexts.inference.written import ModelTexts

F = TypeVar("F", bound=Callable[..., Any])

_PROCESS_BYTES = 500_000_000
"""What a process that computes takes beside weights and cache: libraries, activations."""
_LEAST_CACHE_BYTES = 64_000_000


class Completion(msgspec.Struct, frozen=True):
    """What a model wrote after a prompt. `finish_reason` is `stop` (the text is complete) or `length` (it was cut at
    `max_new_tokens`). `logprobs`: of each new token the token's text, its log-likelihood, and the likeliest tokens with
    theirs; empty unless they were asked for."""

    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    logprobs: tuple[tuple[str, float, tuple[tuple[str, float], ...]], ...] = ()


def _between_steps(function: F) -> F:
    """In the engine's thread, between two of its steps, without gradients."""

    @functools.wraps(function)
    def guarded(self: CausalLM, *args: Any, **kwargs: Any) -> Any:
        def compute() -> Any:
            with torch.inference_mode():
                return function(self, *args, **kwargs)

        return self._thread.run(compute)

    return cast(F, guarded)


class CausalLM:
    """A language model and its tokenizer on their device. Calls of several slots join one batch."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "",
        origin: str = "",
        engine: str = "auto",
        cache_bytes: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.origin = origin
        """How it was loaded, for people: from a snapshot or not, and in what time."""
        self._runner = ModelRunner(model, limit_bytes=PREFIX_LIMIT_BYTES)
        self._longest = int(getattr(model.config, "max_position_embeddings", 0) or 0)
        texts = ModelTexts(decode=self._decode, ends=self._end_tokens(), longest=self._longest)
        chosen, self.engine_chosen = own_engine(self._runner, texts, engine=engine, cache_bytes=cache_bytes)
        self._thread = EngineThread(chosen)

    @property
    def device(self) -> str:
        """Where it is: `cpu`, `cuda:0`."""
        return str(self._runner.device)

    @property
    def engine(self) -> str:
        """The name of the engine that writes."""
        return self._thread.engine.name

    @property
    def reused_tokens(self) -> int:
        """Tokens that kept prefixes have saved so far."""
        return self._runner.prefixes.reused_tokens

    def slots(self, device_memory_bytes: int = 0) -> int:
        """How many calls at once the model serves within so much device memory (0 = not limited), and its own limit."""
        with self._thread.hold() as engine:
            if device_memory_bytes:
                room = device_memory_bytes - engine.memory().weights_bytes - _PROCESS_BYTES
                engine.resize(max(room, _LEAST_CACHE_BYTES))
            return engine.slots()

    def resize(self, *, device_memory_bytes: int) -> None:
        """Hold no more device memory than this from now on, weights included."""
        with self._thread.hold() as engine:
            engine.resize(device_memory_bytes - engine.memory().weights_bytes - _PROCESS_BYTES)

    def batch_load(self) -> EngineLoad:
        """How full the engine's batch is and was."""
        return self._thread.engine.load()

    def memory(self) -> EngineMemory:
        """Device memory that the model and the cache of its batch hold."""
        with self._thread.hold() as engine:
            return engine.memory()

    def sleep(self) -> None:
        """Free device memory as far as the engine can; requests are refused until `wake`. Raises RuntimeError while
        requests run."""
        with self._thread.hold() as engine:
            engine.sleep()

    def wake(self) -> None:
        """Be as before `sleep`."""
        with self._thread.hold() as engine:
            engine.wake()

    def close(self) -> None:
        """End the engine; what is asked for afterwards is refused."""
        self._thread.close()

    # ---- prompts

    def chat(self, message: str, *, system: str = "") -> str:
        """The prompt that asks this message in the model's own chat format (the message itself, if it has none)."""
        turns = [{"role": "user", "content": message}]
        if system:
            turns.insert(0, {"role": "system", "content": system})
        return self.chat_prompt(turns)

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt of a conversation in the model's own chat format: messages with a `role` and a `content`, the
        oldest
        first. Without a chat format their contents stand below each other."""
        if not getattr(self.tokenizer, "chat_template", None):
            return "\n\n".join(message["content"] for message in messages)
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True))

    def count_tokens(self, text: str) -> int:
        """The length of a prompt in tokens."""
        return len(self._encode([text])[0])

    @contextlib.contextmanager
    def alone(self) -> Iterator[ModelRunner]:
        """The model for the caller alone, without gradients, for readings that are not among these methods."""
        with self._thread.hold(), torch.inference_mode():
            yield self._runner

    def forget_prefixes(self) -> None:
        """Free what is kept of earlier prompts."""
        with self._thread.hold():
            self._runner.prefixes.clear()

    # ---- texts

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 64,
        batch_size: int = 0,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | Sequence[int] = 0,
        stop: Sequence[str] = (),
        prefix: str = "",
    ) -> list[str]:
        """The continuation of each prompt, special tokens left out.

        Temperature 0 takes the likeliest token each time; else one is drawn from the likeliest that make up `top_p`,
        seeded by `seed` and the prompt's place in the call (or by its own, if `seed` lists one a prompt). A text ends
        at the model's end token, at one of the `stop` texts (which is left out), or at `max_new_tokens`. `prefix` is
        put before every prompt. At most `batch_size` prompts of this call are written at a time; 0 leaves that to the
        engine. Raises ValueError for an empty prompt, and for more tokens than the model reads; then nothing is
        written.
        """
        rows = self._rows(prompts, prefix=prefix, batch_size=batch_size)
        if max_new_tokens < 1:
            raise ValueError(f"generate wants max_new_tokens of 1 or more, not {max_new_tokens}")
        self._check_lengths([len(row) + max_new_tokens for row in rows])
        seeds = [(seed, place) for place in range(len(rows))] if isinstance(seed, int) else [(one, 0) for one in seed]
        if len(seeds) != len(rows):
            raise ValueError(f"generate was given {len(seeds)} seeds for {len(rows)} prompts")
        common = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, stop=tuple(stop))
        samplings = [msgspec.structs.replace(common, seed=one) for one in seeds]
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index])) if batch_size > 1 else range(len(rows))
        size = batch_size or max(1, len(rows))
        texts = [""] * len(rows)
        for start in range(0, len(rows), size):
            some = order[start : start + size]
            with self._asked([(rows[index], samplings[index]) for index in some]) as generations:
                for index, generation in zip(some, generations, strict=True):
                    texts[index] = "".join(token.text for token in generation.tokens())
        return texts

    def stream(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> Iterator[str]:
        """The continuation of a prompt, in pieces as they are written; together they are what `generate` returns.

        Raises ValueError as `generate` does, when it is called. An iterator that is closed ends the request.
        """
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=(seed, 0), stop=tuple(stop)
        )
        row = self._row(prompt, sampling)

        def pieces() -> Iterator[str]:
            with self._asked([(row, sampling)], pieces=True) as [generation]:
                for token in generation.tokens():
                    if token.text:
                        yield token.text

        return pieces()

    def complete(
        self,
        prompt: str,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        logprobs: int = 0,
        json_schema: str = "",
    ) -> Completion:
        """The continuation of a prompt with its facts: why it ended, tokens, and `logprobs` likeliest tokens a place.

        `json_schema`: a JSON schema that the text satisfies, where the engine can (vLLM). Raises ValueError as
        `generate` does, and for what the engine cannot do.
        """
        sampling = Sampling(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=(seed, 0), stop=tuple(stop),
            logprobs=logprobs, json_schema=json_schema,
        )  # fmt: skip
        row = self._row(prompt, sampling)
        with self._asked([(row, sampling)]) as [generation]:
            tokens = list(generation.tokens())
        finish = tokens[-1].finish
        assert finish is not None
        chances = [
            (self._token_text(token.token), token.logprob, tuple(map(self._named, token.likeliest)))
            for token in tokens
            if token.logprob is not None
        ]
        return Completion(
            text="".join(token.text for token in tokens),
            finish_reason=finish.value,
            prompt_tokens=len(row),
            completion_tokens=len(tokens),
            logprobs=tuple(chances),
        )

    @contextlib.contextmanager
    def _asked(self, asked: Sequence[tuple[Ids, Sampling]], *, pieces: bool = False) -> Iterator[list[Generation]]:
        """The requests of one call; those that nobody has waited for to their end are aborted."""
        generations = [self._thread.submit(row, sampling, pieces=pieces) for row, sampling in asked]
        try:
            yield generations
        finally:
            for generation in generations:
                if not generation.over:
                    self._thread.abort(generation)

    def _row(self, prompt: str, sampling: Sampling) -> Ids:
        """The one prompt's tokens; raises ValueError for what cannot be written."""
        if not isinstance(prompt, str):
            raise ValueError(f"the prompt must be one text, not a {type(prompt).__name__}; generate takes several")
        if sampling.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be 1 or more, not {sampling.max_new_tokens}")
        [row] = self._rows([prompt], prefix="", batch_size=0)
        self._check_lengths([len(row) + sampling.max_new_tokens])
        return row

    def _token_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))

    def _named(self, chance: TokenChance) -> tuple[str, float]:
        return self._token_text(chance.token), chance.logprob

    # ---- scores of labels

    @_between_steps
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

    def _end_tokens(self) -> frozenset[int]:
        configured = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        if configured is None:
            configured = self.tokenizer.eos_token_id
        return frozenset([configured] if isinstance(configured, int) else configured or ())

    # ---- tokens

    def _rows(self, prompts: Sequence[str], *, prefix: str, batch_size: int) -> list[Ids]:
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of texts, and is one text; write [prompt]")
        if batch_size < 0:
            raise ValueError(f"batch_size must be 1 or more, or 0 for any, not {batch_size}")
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
