"""The futures of a call: the executor's future, and Parsl's future, which the program receives."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError, Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from parsl.dataflow.dflow import DataFlowKernel
from parsl.dataflow.futures import AppFuture

from stoker.errors import ConfigError
from stoker.manager.executor.failures import can_unpickle_without_user_code, result_or_raise
from stoker.manager.executor.kernel import make_memoizer_safe
from stoker.manager.executor.outgoing import end_future
from stoker.manager.executor.pieces import PieceInbox, PieceReader, unpickle_result_or_piece
from stoker.manager.executor.session_files import remove_result_file
from stoker.manager.executor.settling import SLOW_S, add_callback, done_callbacks_of, is_user_callback
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress
from stoker.protocol.ids import CallId, format_call_id

if TYPE_CHECKING:
    from stoker.manager.executor.client import ClientLink


class CallFuture(Future[Any]):
    """A future whose `cancel` also stops a running call. Made by `StokerExecutor.submit`.

    Attributes:
        progress: The call's last progress report, with its last checkpoint.
        forecast: The manager's forecast of the end of a call with a deadline, in seconds since the epoch.
        due_at: The call's deadline, in seconds on the monotonic clock.
    """

    def __init__(self, link: ClientLink, *, inbox: PieceInbox | None = None) -> None:
        super().__init__()
        self._inbox = inbox
        self.progress: CallProgress | None = None
        self.forecast: CallForecast | None = None
        self.call: CallId | None = None
        self.due_at: float | None = None
        self._link = link

    @property
    def parsl_executor_task_id(self) -> str:
        """The call's id in Parsl's monitoring."""
        return "" if self.call is None else format_call_id(self.call)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Run a function after the call has ended, on a callback thread if the call is still open.

        Args:
            fn: Receives the future; may wait for other calls.
        """
        record = _parsl_task_record(fn)
        if record is None:
            add_callback(self, fn, register=super().add_done_callback)
            return
        record["exec_fu"] = self
        kernel = getattr(getattr(fn, "func", None), "__self__", None)
        if isinstance(kernel, DataFlowKernel):
            make_memoizer_safe(kernel)
        super().add_done_callback(fn)
        # The app's future may be cancelled while the executor submits the call. `AppCallFuture.cancel` marks the record
        # and then looks for this future; this method stores the future and then looks for the mark.
        if record.get("resource_specification") is CANCELLED:
            self.cancel()

    def cancel(self) -> bool:
        """Return True after cancelling the call, even while the call runs; False if the call has ended."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()  # otherwise `concurrent.futures.wait` would never return
        if self.call is not None:
            self._link.cancel([self.call])
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in an event loop. If the waiting task is cancelled, the call is cancelled."""
        return asyncio.wrap_future(self).__await__()

    def settle(self, end: CallEnd) -> bool:
        """Set the call's result, on another thread if this may take long.

        Args:
            end: The manager's message about the call's end.

        Returns:
            Always False, because no `flush` is needed.
        """
        settling = self._link.result_threads
        if (
            self._inbox is not None
            or settling.has_slow_callbacks
            or not can_unpickle_without_user_code(end)
            or self._triggers_user_callbacks()
        ):
            settling.add(functools.partial(self._set_outcome, end))
            return False
        before = time.monotonic()
        self._set_outcome(end)
        if time.monotonic() - before > SLOW_S:
            settling.has_slow_callbacks = True
        return False

    def _triggers_user_callbacks(self) -> bool:
        for callback in done_callbacks_of(self):
            app = (_parsl_task_record(callback) or {}).get("app_fu")
            if isinstance(app, Future) and not isinstance(app, AppCallFuture):
                return any(map(is_user_callback, done_callbacks_of(app)))
        return False

    def _set_outcome(self, end: CallEnd) -> None:
        if self.done():
            remove_result_file(end)
            return
        try:
            if end.ok and self._inbox is not None:
                packed = self._inbox.pickled_pieces_at_end(end)
                value: Any = [unpickle_result_or_piece(each, call=end.call, piece=n) for n, each in enumerate(packed)]
            else:
                value = result_or_raise(end, session=self._link.session.session)
        except BaseException as error:
            end_future(self, error=error)
            error.__traceback__ = None  # the frames of the traceback would keep the future alive
        else:
            end_future(self, value)

    def fail(self, call: CallId, error: Exception) -> None:  # noqa: ARG002
        """Set an exception as the result.

        Args:
            call: Not used.
            error: The exception.
        """
        end_future(self, error=error)

    def flush(self) -> None:
        """Do nothing, because `settle` needs no flush."""

    def report(self, said: CallProgress | CallForecast) -> None:
        """Store the call's last progress report or forecast.

        Args:
            said: The manager's message.
        """
        if isinstance(said, CallForecast):
            self.forecast = said
        else:  # keep a checkpoint until a newer checkpoint arrives
            kept = b"" if self.progress is None else self.progress.state
            self.progress = said if said.state or not kept else msgspec.structs.replace(said, state=kept)

    def __repr__(self) -> str:
        return f"<call {self.parsl_executor_task_id or 'not sent'} {self._state.lower()}>"


def _parsl_task_record(callback: Callable[..., object]) -> dict[str, Any] | None:
    given = callback.args[0] if isinstance(callback, functools.partial) and callback.args else None
    return given if isinstance(given, dict) and "app_fu" in given else None


def _finish_inbox(inbox: PieceInbox, future: Future[Any]) -> None:
    error = future.exception()
    inbox.end_stream(error, values=list(future.result()) if error is None else None)


CANCELLED: Mapping[str, Any] = MappingProxyType({})
"""The specification of a call that was cancelled before its submission. Compare with `is`."""


class AppCallFuture(AppFuture):  # type: ignore[misc]  # parsl is untyped
    """The future of a Stoker app: Parsl's future with a working `cancel`. Made by `AppCallFuture.of`.

    A cancelled future ends immediately with CancelledError. Its call stops in any state and is not retried.
    """

    _was_cancelled = False
    _inbox: PieceInbox | None = None

    @staticmethod
    def of(future: AppFuture, *, inbox: PieceInbox | None = None) -> AppCallFuture:
        """Return Parsl's future after changing its class to AppCallFuture.

        Args:
            future: The future that Parsl's kernel has created.
            inbox: Receives the pieces that the call yields.
        """
        future.__class__ = AppCallFuture
        if inbox is not None:
            future._inbox = inbox
            Future.add_done_callback(future, functools.partial(_finish_inbox, inbox))
        return future  # type: ignore[no-any-return]

    def pieces(self) -> PieceReader:
        """Return a new iterator (`for` or `async for`) over all yielded values, from the first piece.

        Raises:
            ConfigError: The function yields no pieces.
        """
        if self._inbox is None:
            raise ConfigError(
                "this call sends no pieces: the function has no yield (or stream=False); wait for its result()"
            )
        return PieceReader(self._inbox, lambda _taken: None)  # the link has already acknowledged the pieces

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """As `CallFuture.add_done_callback`."""
        add_callback(self, fn, register=super().add_done_callback)

    def cancel(self) -> bool:
        """As `CallFuture.cancel`."""
        record = self.task_record
        with self._update_lock:
            if self.done():
                return self._was_cancelled
            self._was_cancelled = True
            record["resource_specification"], record["fail_cost"] = CANCELLED, math.inf
            super().set_exception(CancelledError())
        sent = record["exec_fu"]
        if sent is not None:
            sent.cancel()
        return True

    def cancelled(self) -> bool:
        """True if the call was cancelled."""
        return self._was_cancelled

    def __iter__(self) -> NoReturn:
        """Raise TypeError: Parsl's futures accept any index, so `for x in future` would never stop."""
        raise TypeError("a future is not iterable; loop over its result(), or over stoker.map(function, items)")

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()

    def set_result(self, result: Any) -> None:
        """As `Future.set_result`, unless cancelled."""
        if not self._was_cancelled:
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """As `Future.set_exception`, unless cancelled."""
        if not self._was_cancelled:
            super().set_exception(exception)
