"""Decode steps that are launched before the tokens of the step before were read.

A device that waits for the host between two steps is idle while Python handles tokens. So the engine launches step n+1
with the tokens that step n has left on the device, and then reads the tokens of step n.

The invariant: between two calls of `step` at most one launched step is unread. The batch, the rows and the texts are
those before its tokens. The device runs launches, copies and moves of rows in their order, so:

- A step is launched ahead only if its requests, rows and reservations do not depend on the unread tokens: no waiting
  request could join, and no request outgrows its row. Otherwise the tokens are read first, and the batch decides.
- A request that turns out to have ended, or that leaves, has a row in the unread step. Its token is dropped when the
  step is read. Its row is free at once: what is written there later is written after the unread step.
- Each kept token has used the next random number of its request.
- Everything that moves or frees memory beyond rows (a resize, sleep, an eager step) reads the unread step first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from stoker.contexts.batching import RunningBatch, Step
from stoker.contexts.inference.adapter import GenerationRequest
from stoker.contexts.inference.decode_graphs import DecodeGraphs, LaunchedStep, RowInput, StepShape
from stoker.contexts.inference.kv_store import KVStore
from stoker.contexts.sampling import TokenDraw


class WritingRequest(Protocol):
    """What a step needs of a request: its tokens so far, and how it draws."""

    request: GenerationRequest
    draw: TokenDraw
    ids: list[int]


class StepsAhead:
    """The captured steps of one engine, over its batch, rows and requests."""

    def __init__(
        self, graphs: DecodeGraphs, batch: RunningBatch, store: KVStore, writing: Mapping[int, WritingRequest]
    ) -> None:
        self.graphs = graphs
        self._batch = batch
        self._store = store
        self._writing = writing
        self._unread: LaunchedStep | None = None

    def begin(self, step: Step) -> bool:
        """Launch a decode step whose tokens the host knows; False if it is to run eagerly. Its requests have rows."""
        if step.prefill or len(step.requests) < len(self._batch.running):
            return False
        shape = self._shape()
        if shape is None or not self.graphs.due(shape):
            return False
        self._unread = self.graphs.launch(shape, lambda id: self._input(id, behind=0))
        return self._unread is not None

    def read(self) -> tuple[StepShape, list[tuple[int, int]]] | None:
        """Read the unread step, and launch the one after it first if it does not depend on these tokens. Returns the
        step's shape, and its requests that have not left with their tokens (-1: none can be drawn)."""
        unread = self._unread
        if unread is None:
            return None
        self._unread = None
        self._unread = self._follow(unread)
        return self._tokens(unread)

    def settle(self) -> tuple[StepShape, list[tuple[int, int]]] | None:
        """Read the unread step, and launch none."""
        unread, self._unread = self._unread, None
        return None if unread is None else self._tokens(unread)

    @property
    def launched(self) -> bool:
        """True if a step is unread."""
        return self._unread is not None

    def drop(self) -> None:
        """Wait for what was launched, and free all graphs."""
        self._unread = None
        self.graphs.drop()

    def _follow(self, unread: LaunchedStep) -> LaunchedStep | None:
        batch, running = self._batch, self._batch.running.values()
        if batch.waiting and batch.has_room_for(batch.waiting[0]):
            return None
        if any(state.length >= state.reserved for state in running) or all(
            state.made + 1 >= state.most for state in running
        ):
            return None
        shape = self._shape()
        if shape is None or not self.graphs.captured(shape):
            return None
        return self.graphs.launch(shape, lambda id: self._input(id, behind=1), after=unread)

    def _shape(self) -> StepShape | None:
        writing = [self._writing[id] for id in self._batch.running]
        if any(each.request.sampling.logprobs for each in writing):
            return None
        return self.graphs.shape_of(list(self._store.arrays.values()), [each.draw for each in writing])

    def _input(self, id: int, *, behind: int) -> RowInput:
        """A request's row in the next step; `behind`: tokens of it that the host has not read."""
        writing = self._writing[id]
        return RowInput(writing.ids[-1], self._batch.running[id].read + behind, writing.draw)

    def _tokens(self, launched: LaunchedStep) -> tuple[StepShape, list[tuple[int, int]]]:
        found = zip(launched.shape.requests, launched.tokens(), strict=True)
        return launched.shape, [(id, token) for id, token in found if id is not None and id in self._batch.running]
