"""Stops one running call.

A library stops a call when its client cancels it or leaves, when its `timeout` is over, and when a policy evicts it. It
asks the call's `CallStop`, which wakes the call's waits: an engine aborts the call's requests before its next
step, a batch drops the call's rows. The wait raises `Evicted`, and so do later waits of the call and its next
`stoker.progress(...)`. The slot is free within a step, and the library continues to serve its other calls.
"""

from __future__ import annotations

from collections.abc import Callable


class Evicted(BaseException):
    """Ends a call that was told to stop: at its `stoker.progress(...)`, or while it waits for a model. `state` is its
    checkpoint, pickled.

    It is not an `Exception`: the `except Exception` of a retry loop would swallow it and start the next request of a
    call whose client has left.
    """

    def __init__(self, state: bytes = b"") -> None:
        super().__init__("the call was told to stop")
        self.state = state


class CallStop:
    """The order to one call to stop. One thread gives it; the call's threads check it and register how to wake them."""

    __slots__ = ("_wakes", "asked")

    def __init__(self) -> None:
        self.asked = False
        """True once the call was told to stop."""
        self._wakes: dict[Callable[[], None], None] = {}

    def ask(self) -> None:
        """Tell the call to stop, and wake its waits."""
        self.asked = True
        for wake in list(self._wakes):
            wake()

    def check(self) -> None:
        """Raise Evicted if the call was told to stop."""
        if self.asked:
            raise Evicted

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the call is told to stop, at once if it was told already. `wake` may be called twice and in
        any thread; it must not wait or raise."""
        self._wakes[wake] = None
        if self.asked:
            wake()

    def forget(self, wake: Callable[[], None]) -> None:
        """Do not call `wake` any more. No-op if it is not registered."""
        self._wakes.pop(wake, None)


def comes_of_stop(error: BaseException) -> bool:
    """True if an exception was raised because `Evicted` ended the code below: user code may translate exceptions, and
    a group of tasks puts them together."""
    seen: set[int] = set()
    open_ones: list[BaseException | None] = [error]
    while open_ones:
        found = open_ones.pop()
        if found is None or id(found) in seen:
            continue
        if isinstance(found, Evicted):
            return True
        seen.add(id(found))
        open_ones += (found.__cause__, found.__context__)
        if isinstance(found, BaseExceptionGroup):
            open_ones += found.exceptions
    return False
