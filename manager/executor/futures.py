"""The futures of one call: ours, and the one that Parsl's kernel makes around it."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from parsl.dataflow.dflow import DataFlowKernel
from parsl.dataflow.futures import AppFuture

from stoker.errors import ConfigError
from stoker.manager.executor.failures import opens_at_once, outcome
from stoker.manager.executor.kernel import make_safe
from stoker.manager.executor.large_payloads import discard_result
from stoker.manager.executor.pieces import PieceInbox, PieceReader, open_piece
from stoker.manager.executor.settling import SLOW_S, add_callback, callbacks_of, is_users_callback
from stoker.protocol.calls import CallEnd, CallForecast, CallProgress
from stoker.protocol.ids import CallId, show_call

if TYPE_CHECKING:
    from stoker.manager.executor.client import Link


class CallFuture(Future[Any]):
    """A concurrent.futures.Future whose cancellation reaches the manager. `progress` is the call's last report, with
    the last checkpoint that it has told, and `forecast` what the manager expects of its end, if it has a deadline, in
    seconds since the epoch as this machine counts them. `due_at`: that deadline on the monotonic clock.

    A call that runs can be cancelled too: it is told to stop, and its library goes on. Parsl logs
    `parsl_executor_task_id`.
    """

    def __init__(self, link: Link, *, inbox: PieceInbox | None = None) -> None:
        super().__init__()
        self._inbox = inbox
        self.progress: CallProgress | None = None
        self.forecast: CallForecast | None = None
        self.call: CallId | None = None
        self.due_at: float | None = None
        self._link = link

    @property
    def parsl_executor_task_id(self) -> str:
        """The call's id as people write it."""
        return "" if self.call is None else show_call(self.call)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Have a function called when the call has ended, on a thread for callbacks. It may wait for other calls."""
        record = _record_of(fn)
        if record is None:
            add_callback(self, fn, register=super().add_done_callback)
            return
        record["exec_fu"] = self
        kernel = getattr(getattr(fn, "func", None), "__self__", None)
        if isinstance(kernel, DataFlowKernel):
            make_safe(kernel)
        super().add_done_callback(fn)
        # The app's future may have been cancelled while the executor submitted the call. Its `cancel` marks the record
        # and then looks for this future; here it is the other way round, so that one of the two finds the other.
        if record.get("resource_specification") is CANCELLED:
            self.cancel()

    def cancel(self) -> bool:
        """Cancel the call, also when it runs. False if it has ended."""
        if self.cancelled():
            return True
        if not super().cancel():
            return False
        self.set_running_or_notify_cancel()  # else `concurrent.futures.wait` would wait for it for ever
        if self.call is not None:
            self._link.cancel([self.call])
        return True

    def __await__(self) -> Generator[Any, None, Any]:
        """`await future` in an event loop, a notebook's for one. To cancel the task that waits cancels the call."""
        return asyncio.wrap_future(self).__await__()

    def settle(self, end: CallEnd) -> bool:
        """The call has ended. What may take long is done on another thread than this one."""
        settling = self._link.settling
        if self._inbox is not None or settling.has_slow_callbacks or not opens_at_once(end) or self._runs_users_code():
            settling.add(functools.partial(self._open_later, end))
            return False
        before = time.monotonic()
        self._open(end)
        if time.monotonic() - before > SLOW_S:
            settling.has_slow_callbacks = True
        return False

    def _runs_users_code(self) -> bool:
        """True if to settle this runs a program's callback here: the future of an app of Parsl's own has one."""
        for callback in callbacks_of(self):
            record = _record_of(callback)
            app = None if record is None else record.get("app_fu")
            if (
                isinstance(app, Future)
                and not isinstance(app, AppCallFuture)
                and any(map(is_users_callback, callbacks_of(app)))
            ):
                return True
        return False

    def _open_later(self, end: CallEnd) -> None:
        if self.done():  # cancelled meanwhile
            discard_result(end)
        else:
            self._open(end)

    def _open(self, end: CallEnd) -> None:
        try:
            if end.ok and self._inbox is not None:
                packed = self._inbox.values_at_end(end)
                value: Any = [open_piece(each, call=end.call, number=n) for n, each in enumerate(packed)]
            else:
                value = outcome(end, session=self._link.session.session)
        except BaseException as error:
            self._set(None, error)
            error.__traceback__ = None  # its frames are this function's; they would keep the future alive
        else:
            self._set(value, None)

    def fail(self, call: CallId, error: Exception) -> None:  # noqa: ARG002
        """The call will have no end."""
        self._set(None, error)

    def flush(self) -> None:
        """Nothing: a future is settled at once."""

    def report(self, said: CallProgress | CallForecast) -> None:
        """The running call says how far it is, or the manager when it will end."""
        if isinstance(said, CallForecast):
            self.forecast = said
        else:  # a checkpoint stays until there is a newer one
            kept = b"" if self.progress is None else self.progress.state
            self.progress = said if said.state or not kept else msgspec.structs.replace(said, state=kept)

    def _set(self, value: Any, error: BaseException | None) -> None:
        try:
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)
        except InvalidStateError:  # it was cancelled a moment ago
            pass

    def __repr__(self) -> str:
        return f"<call {self.parsl_executor_task_id or 'not sent'} {self._state.lower()}>"


def _record_of(callback: Callable[..., object]) -> dict[str, Any] | None:
    """The task's record, if this is the callback of Parsl's kernel on the future of a call."""
    given = callback.args[0] if isinstance(callback, functools.partial) and callback.args else None
    return given if isinstance(given, dict) and "app_fu" in given else None


def _finish(inbox: PieceInbox, future: Future[Any]) -> None:
    """A call that gives pieces has its result, or its error."""
    error = future.exception()
    if error is not None:
        inbox.finish(error)
    else:
        inbox.finish_with(list(future.result()))


CANCELLED: Mapping[str, Any] = MappingProxyType({})
"""In place of a call's specification, known by its identity: it was cancelled before Parsl gave it to its executor."""


class AppCallFuture(AppFuture):  # type: ignore[misc]  # parsl is untyped
    """What a Stoker app returns: Parsl's future, which can be cancelled.

    Parsl's own cannot be cancelled. This one ends at once, with CancelledError; apps that wait for it fail as after any
    other error. The call is stopped where it is: with its kernel, if what it depends on
    is not there yet; in its queue; or while it runs. It is not tried again.
    """

    _was_cancelled = False
    _inbox: PieceInbox | None = None

    @staticmethod
    def of(future: AppFuture, *, inbox: PieceInbox | None = None) -> AppCallFuture:
        """The same future. Parsl's kernel makes it, and takes no other class. `inbox`: where its calls' pieces go."""
        future.__class__ = AppCallFuture
        if inbox is not None:
            future._inbox = inbox
            Future.add_done_callback(future, functools.partial(_finish, inbox))
        return future  # type: ignore[no-any-return]

    def pieces(self) -> PieceReader:
        """What the call yields, as it comes, from its first piece on: for `for` and `async for`. It may be asked for
        more
        than once. The future's result is the list of all pieces. Raises ConfigError if the function gives no pieces."""
        if self._inbox is None:
            raise ConfigError(
                "this call gives no pieces: its function has no yield (or stream=False); wait for its result()"
            )
        return PieceReader(self._inbox, lambda _taken: None)  # this inbox acknowledges what comes by itself

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """Have a function called when the call has ended, on a thread for callbacks. It may wait for other calls."""
        add_callback(self, fn, register=super().add_done_callback)

    def cancel(self) -> bool:
        """Cancel the call, also when it runs. False if it has ended."""
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
        """Whether it was cancelled before it ended."""
        return self._was_cancelled

    def __iter__(self) -> NoReturn:
        """No loop: Parsl gives a future for every index, so one would never end."""
        raise TypeError("a future cannot be looped over; loop over its result(), or over stoker.map(function, items)")

    def __await__(self) -> Generator[Any, None, Any]:
        """`await future` in an event loop, a notebook's for one. To cancel the task that waits cancels the call."""
        return asyncio.wrap_future(self).__await__()

    def set_result(self, result: Any) -> None:
        """The call has ended, if nobody has cancelled it."""
        if not self._was_cancelled:
            super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        """The call has failed, if nobody has cancelled it."""
        if not self._was_cancelled:
            super().set_exception(exception)
