"""A view that cannot be written to: policies are asked over the manager's own state, and a write raises.

Between questions the core writes as it does always. While a policy is asked, setting an attribute of a noun raises at
the line that does it; what is changed inside of a noun's containers is found by comparing the state before and after.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
import pytest

from stoker.manager.core import nouns, per_context, state
from stoker.manager.core.call_queue import Queue
from stoker.manager.core.seams import Policies, View
from stoker.manager.live import snapshot
from stoker.manager.live.session_policies import COMMON, SEAMS

NOUNS = (
    nouns.Client, per_context.Cost, nouns.Group, nouns.Call, nouns.Gang, nouns.Context, nouns.Device, nouns.Library,
    nouns.Pilot, state.State, state.SourceState, state.Block,
)  # fmt: skip


class WriteError(Exception):
    """A policy has changed what it was shown."""


class ReadOnly:
    """Wraps policies so that none of them writes while it is asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked = ""
        self.questions: set[str] = set()
        for noun in NOUNS:
            patch.setattr(noun, "__setattr__", self._guarded(noun.__setattr__))
            patch.setattr(noun, "__delattr__", self._guarded(noun.__delattr__))

    def policies(self, given: Policies) -> Policies:
        """The same, watched."""
        watched = {seam: _Watched(getattr(given, seam), seam, self) for seam in SEAMS}
        return msgspec.structs.replace(given, **watched)

    def ask(self, question: str, answer: Callable[..., Any], view: View, *rest: Any) -> Any:
        """A policy's answer. Raises WriteError if the state is another one then."""
        assert isinstance(view, state.State)
        before, outer = _content(view), self.asked
        self.asked = question
        self.questions.add(question)
        try:
            found = answer(view, *rest)
            found = list(found) if isinstance(found, list | tuple) else found
        finally:
            self.asked = outer
        if _content(view) != before:
            raise WriteError(f"{question} has changed the state")
        return self._one_by_one(question, found, view) if isinstance(found, Iterator) else found

    def _one_by_one(self, question: str, answer: Iterator[Any], view: View) -> Iterator[Any]:
        """An answer that a policy thinks of while the core acts on what it said before."""
        while True:
            found = self.ask(question, lambda _: tuple(islice(answer, 1)), view)
            if not found:
                return
            yield found[0]

    def _guarded(self, change: Callable[..., None]) -> Callable[..., None]:
        def guarded(noun: Any, name: str, *value: Any) -> None:
            if self.asked:
                raise WriteError(f"{self.asked} writes {type(noun).__name__}.{name}")
            change(noun, name, *value)

        return guarded


class _Watched:
    """A policy that is asked through `ReadOnly`."""

    def __init__(self, policy: Any, seam: str, guard: ReadOnly) -> None:
        self._policy, self._seam, self._guard = policy, seam, guard

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._policy, name)
        if not callable(found) or name not in (*SEAMS[self._seam], *COMMON):
            return found
        return lambda view, *rest: self._guard.ask(f"{self._seam}.{name}", found, view, *rest)


class _Pickler(snapshot._Pickler):
    """Writes a queue as what waits in it: it forgets those that have left when it is next read."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Queue):
            return snapshot.deque, ([obj.count, [call.id for call in obj], list(obj.apart)],)
        return super().reducer_override(obj)


def _content(view: state.State) -> bytes:
    """Everything that hangs on the state."""
    file = io.BytesIO()
    pickler = _Pickler(file, ())
    pickler.dump(view)
    written = 0
    while written < len(pickler.nouns):
        some = pickler.nouns[written:]
        written += len(some)
        pickler.dump([pickler.state_of(each) for each in some])
    return file.getvalue()
