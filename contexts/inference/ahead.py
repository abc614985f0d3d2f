"""Decode steps that are launched before the tokens of the step before were read.

A device that waits for the host between two steps is idle while Python handles tokens. So the engine launches step n+1
with the tokens that step n has left on the device, and then reads the tokens of step n.

The invariant: between two calls of `step` at most one launched step is unread. The batch, the rows and the texts are
those before its tokens. The device runs launches, copies and moves of rows in their order, so:

- A step is launched ahead only if its requests, rows and reservations do not depend on the unread tokens: no waiting
  request could join, and no request outgrows its row. Otherwise the tokens are read first, and the batch decides.
- A request that has ended or was aborted still has a row in the unread step. Its token is dropped when the
  step is read. Its row is free at once: the device writes to it again only after the unread step.
- Each kept token has used the next random number of its request.
- A resize and an eager step read the unread step before they free or move memory. Sleep and stop wait for it.
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
    """A request with its tokens so far and its draw."""

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
        """Launch a decode step from tokens on the host. False if the step must run eagerly. Its requests have rows."""
        if step.prefill or len(step.requests) < len(self._batch.running):
            return False
        shape = self._shape()
        if shape is None or not self.graphs.due(shape):
            return False
        self._unread = self.graphs.launch(shape, lambda id: self._input(id, behind=0))
        return self._unread is not None

    def read(self) -> tuple[StepShape, list[tuple[int, int]]] | None:
        """Read the unread step. Launch the next step before, if it does not depend on these tokens. Return the shape of
        the step, and the token of each request that still runs (-1: no token can be drawn)."""
        unread = self._unread
        if unread is None:
            return None
        self._unread = None
        self._unread = self._follow(unread)
        return self._tokens(unread)

    def settle(self) -> tuple[StepShape, list[tuple[int, int]]] | None:
        """Read the unread step without launching another."""
        unread, self._unread = self._unread, None
        return None if unread is None else self._tokens(unread)

    @property
    def launched(self) -> bool:
        """True if a step is unread."""
        return self._unread is not None

    def drop(self) -> None:
        """Wait for launched steps, drop their tokens, and free all graphs."""
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
