"""`stoker.stream`: run one call, and read its pieces while the call runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from parsl.executors.errors import BadStateException

from stoker.errors import ConfigError
from stoker.manager.executor.client import ClientLink
from stoker.manager.executor.failures import result_or_raise
from stoker.manager.executor.map_calls import MapCalls, find_kernel_and_executor
from stoker.manager.executor.options import check_boolean_option
from stoker.manager.executor.pieces import PieceInbox, PieceReader
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress
from stoker.protocol.ids import CallId, format_call_id


def stream(function: Callable[..., Any], *args: Any, rerun_may_differ: bool = False, **kwargs: Any) -> PieceStream:
    """Return an iterator (`for` or `async for`) over the pieces that one call of `function` yields, as they arrive.

    Leaving the loop, or dropping the iterator, cancels the call. While the reader is slow, the call waits. If the call
    runs again after a pilot's loss, the iterator does not repeat pieces that were read.

    Args:
        function: An app or a plain function: a generator function (also `async`), or a function that returns an
            iterator. A piece is a picklable value of at most 1 MB.
        *args: Arguments of the function.
        rerun_may_differ: Accept a second run that yields different pieces.
        **kwargs: Keyword arguments of the function.

    Raises:
        SessionError: No site is loaded.
        ConfigError: An option or its value is not allowed.
        StreamDiffersError: A second run yields different pieces.
        Exception: The error of the call, after its pieces.
    """
    check_boolean_option("stoker.stream: rerun_may_differ", rerun_may_differ)
    if not callable(function):
        raise ConfigError(f"stoker.stream: {function!r:.80} is not a function; write stoker.stream(function, item)")
    _, executor = find_kernel_and_executor(function, "stoker.stream", inside="loop over the function itself")
    calls = MapCalls(executor, function, streams=True)
    end = StreamReceiver(PieceInbox(keeps_all=False, may_differ=rerun_may_differ))
    payload = calls.pack_call(args, kwargs)
    submission = calls.create_submission_for_arguments(args, kwargs)
    call = executor.link.submit(submission, payload, end, features=calls.features, inbox=end.inbox)
    return PieceStream(executor.link, end, call, name=calls.name)


class StreamReceiver:
    def __init__(self, inbox: PieceInbox) -> None:
        self.inbox = inbox
        self.failed: CallEnd | None = None

    def settle(self, end: CallEnd) -> bool:
        self.failed = None if end.ok else end
        self.inbox.end_stream(end=end)
        return False

    def fail(self, call: CallId, error: Exception) -> None:  # noqa: ARG002
        self.inbox.end_stream(error.__cause__ if isinstance(error, BadStateException) and error.__cause__ else error)

    def flush(self) -> None:
        """Do nothing, because `settle` wakes readers."""

    def report(self, said: CallProgress | CallForecast) -> None:
        """Ignore the report."""


class PieceStream(PieceReader):
    """The pieces of one call, for `for` and `async for`.

    Attributes:
        taken: Number of pieces that the program has read.
    """

    def __init__(self, link: ClientLink, end: StreamReceiver, call: CallId, *, name: str) -> None:
        session = link.session.session
        super().__init__(
            end.inbox,
            link.acknowledge_pieces,
            at_end=lambda: result_or_raise(end.failed, session=session) if end.failed is not None else None,
        )
        self._link = link
        self._name = name
        self._id = call

    @property
    def call(self) -> str:
        """The call's id, for `stoker explain`."""
        return format_call_id(self._id)

    def close(self) -> None:
        """Cancel the call if it has not ended. The function stops when it yields the next piece."""
        self._link.cancel([self._id])
        self._inbox.close()

    def __enter__(self) -> PieceStream:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_id") and not _ending():
            self.close()

    def __repr__(self) -> str:
        return f"<stream of {self._name}: {self.call}, {self.taken:,} pieces taken>"
