"""The engine for every other architecture: a batch that begins and ends together. Waiting requests are read together
and write until the last of them has ended. It is slower where texts differ in length, and supports everything
that Transformers computes: sliding windows, recurrent layers, caches of other kinds."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import msgspec
import torch

from stoker.contexts.forward import ModelRunner, PrefilledBatch
from stoker.contexts.inference.adapter import (
    OWN_OPTIONS,
    EngineLoad,
    EngineMemory,
    GenerationRequest,
    ModelTexts,
    NewToken,
    Written,
)
from stoker.contexts.inference.kernels import TokenDraw, chances_of, failed_token, take_tokens


class _BatchMember:
    def __init__(self, request: GenerationRequest, written: Written) -> None:
        self.request = request
        self.written = written
        self.draw = TokenDraw(request.sampling)
        self.ids = request.prompt


class StaticEngine:
    """One model, a batch at a time (`adapter.InferenceEngine`). It holds no cache between batches, so it has no
    budget."""

    name = "static"
    options = OWN_OPTIONS

    def __init__(self, runner: ModelRunner, texts: ModelTexts, *, rows: int) -> None:
        self._runner = runner
        self._texts = texts
        self._rows = rows
        self._waiting: deque[_BatchMember] = deque()
        self._batch: list[_BatchMember] = []
        self._steps: _Steps | None = None
        self._load = EngineLoad()
        self._asleep = False

    def add(self, request: GenerationRequest) -> None:
        """Add a request to the next batch (`InferenceEngine.add`)."""
        if self._asleep:
            raise ValueError("the model is asleep; wake it first")
        self._texts.check(request, options=self.options)
        self._waiting.append(_BatchMember(request, self._texts.begin(request)))

    def abort(self, request: int) -> None:
        """Remove the request from the batch."""
        self._waiting = deque(writing for writing in self._waiting if writing.request.id != request)
        going = [at for at, writing in enumerate(self._batch) if writing.request.id != request]
        with torch.inference_mode():
            self._keep(going)

    def step(self) -> list[NewToken]:
        """Return one more token of each request of the batch, or the first of a new batch."""
        with torch.inference_mode():
            return self._step()

    def slots(self) -> int:
        """Return how many requests one batch takes."""
        return self._rows

    def _step(self) -> list[NewToken]:
        began, prefill = time.perf_counter(), not self._batch
        if prefill:
            size = min(self._rows, len(self._waiting)) if self._runner.shares else min(1, len(self._waiting))
            self._batch = [self._waiting.popleft() for _ in range(size)]
            if not self._batch:
                return []
        logits = self._first() if prefill else self._next()
        tokens = take_tokens([writing.draw for writing in self._batch], logits)
        new = [self._new_token(*one) for one in zip(self._batch, tokens, logits, strict=True)]
        read = sum(len(writing.request.prompt) for writing in self._batch) if prefill else 0
        rows, load = len(new), self._load
        self._load = msgspec.structs.replace(
            load, steps=load.steps + 1, decode_steps=load.decode_steps + (not prefill),
            row_steps=load.row_steps + (0 if prefill else rows), most_running=max(load.most_running, rows),
            prompt_tokens=load.prompt_tokens + read, new_tokens=load.new_tokens + rows,
            busy_s=load.busy_s + time.perf_counter() - began,
        )  # fmt: skip
        self._keep([at for at, token in enumerate(new) if token.finish is None])
        return new

    def load(self) -> EngineLoad:
        """Return how full the batch is."""
        return msgspec.structs.replace(self._load, running=len(self._batch), waiting=len(self._waiting))

    def memory(self) -> EngineMemory:
        """Return the memory of weights and kept prefixes; not all caches of Transformers know their size."""
        weights = sum(part.numel() * part.element_size() for part in self._runner.model.parameters())
        return EngineMemory(weights_bytes=weights, held_bytes=self._runner.prefixes.size_bytes, budget_bytes=0)

    def resize(self, cache_bytes: int) -> None:
        """No-op: see the class."""

    def sleep(self) -> None:
        """Forget kept prefixes."""
        if self._batch or self._waiting:
            raise RuntimeError(f"{len(self._batch) + len(self._waiting)} requests run; the model cannot sleep")
        self._runner.prefixes.clear()
        self._asleep = True

    def wake(self) -> None:
        """Take requests again."""
        self._asleep = False

    def stop(self) -> None:
        """End."""
        self._batch, self._steps = [], None

    # ---- steps

    def _first(self) -> torch.Tensor:
        rows = [writing.ids for writing in self._batch]
        if not self._runner.shares:
            return self._runner.whole(rows)[:, -1]
        batch = self._runner.prefill(rows)
        self._steps = _Steps(self._runner, batch)
        return batch.logits

    def _next(self) -> torch.Tensor:
        if self._steps is None:  # without a cache that can be cut each step reads the whole row again: slow and right
            return self._runner.whole([writing.ids for writing in self._batch])[:, -1]
        return self._steps.next([writing.ids[-1] for writing in self._batch])

    def _new_token(self, writing: _BatchMember, token: int | Exception, logits: torch.Tensor) -> NewToken:
        id, most = writing.request.id, writing.request.sampling.logprobs
        if isinstance(token, Exception):
            return failed_token(id, token)
        writing.ids = (*writing.ids, token)
        text = writing.written.add(token)
        logprob, likeliest = chances_of(token, logits, most=most) if most else (None, ())
        return NewToken(id, token, text, writing.written.finish, logprob, likeliest)

    def _keep(self, going: list[int]) -> None:
        if len(going) == len(self._batch):
            return
        self._batch = [self._batch[at] for at in going]
        if not going:
            self._steps = None
        elif self._steps is not None:
            self._steps.keep(going)


class _Steps:
    """A batch that grows by one token per row and step."""

    def __init__(self, runner: ModelRunner, batch: PrefilledBatch) -> None:
        self._runner = runner
        self._cache = batch.cache
        device = runner.device
        self._positions = torch.tensor(batch.lengths, device=device)
        self._seen = torch.arange(batch.width, device=device)[None, :] < self._positions[:, None]

    def keep(self, rows: list[int]) -> None:
        index = torch.tensor(rows, device=self._runner.device)
        self._cache.batch_select_indices(index)
        self._positions, self._seen = self._positions[index], self._seen[index]

    def next(self, tokens: list[int]) -> torch.Tensor:
        """Return logits `[rows, vocabulary]` after one more token a row."""
        self._seen = torch.cat([self._seen, self._seen.new_ones(len(tokens), 1)], dim=1)
        output: Any = self._runner.model(
            input_ids=torch.tensor(tokens, device=self._runner.device)[:, None],
            attention_mask=self._seen.long(),
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._positions = self._positions + 1
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits
